"""Settings of the Mooncake store, and what they become: environment and setup arguments of a worker.

Promises: every worker gets the bounded, non-falling-back environment that was tried against Mooncake 0.3.13; metadata
is always peer to peer (an HTTP metadata server lets a restarted owner serve zeros as a success).
Refuses to express what makes Mooncake lie: there is no setting for another metadata server, for a silent fallback
between transports, or for its own buffers.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvpool_agent.store.address import address_fault
from kvpool_agent.store.errors import StoreMisuse
from kvpool_agent.store.protocol import Transport

METADATA: Final = "P2PHANDSHAKE"
SMALLEST_SEGMENT: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Settings of `MooncakeStore`. Times in seconds, sizes in bytes.

    Attributes:
        master_address: "host:port" of the master, or "etcd://host:port[;host:port]" where several elect a leader.
        local_host: address under which peers reach this node: a pod or node IP, the same string for all processes
            of a node. Loopback works on one machine only; a wildcard never.
        protocol: transport, without fallback.
        devices: RDMA devices; empty lets Mooncake choose. Only with RDMA.
        segment_size: the node's share of the pool; 0 mounts no segment.
        setup_timeout: how long a starting worker may take (Mooncake needs 4.3 s to notice a dead master).
        rpc_timeout: for one answer of the master.
        connect_timeout: for connecting to the master or a peer.
        peer_timeout: for progress of one TCP transfer to a peer.
        probe_interval: between two probes of the master.
        probe_timeout: after which an unanswered probe means that the master is down.
        hang_timeout: after which a prober that leaves a request unanswered is replaced.
        reap_timeout: for a killed worker to be gone.
        put_discard_timeout: how long the keys of a put that died stay blocked; the master's
            `put_start_discard_timeout_sec`, plus a margin of a second.
        max_batch_items: slices per call to Mooncake.
        max_batch_bytes: bytes per call to Mooncake; a call must end within the lease (10 s or more).
        probe_threads: existence calls side by side.
        max_outstanding: requests that may wait in one worker.
        backoff_first: before the second start of a worker that died.
        backoff_most: longest pause between two starts.
        log_level: of Mooncake.
        log_dir: where workers write their logs, one file each; None lets them inherit the agent's stderr.
        cluster_id: `--cluster_id` of masters that are found through etcd; "" is Mooncake's own default. Only with etcd.
    """

    master_address: str
    local_host: str
    protocol: Transport = Transport.TCP
    devices: tuple[str, ...] = ()
    segment_size: int = 0
    setup_timeout: float = 15.0
    rpc_timeout: float = 3.0
    connect_timeout: float = 2.0
    peer_timeout: float = 5.0
    probe_interval: float = 1.0
    probe_timeout: float = 1.0
    hang_timeout: float = 15.0
    reap_timeout: float = 5.0
    put_discard_timeout: float = 31.0
    max_batch_items: int = 512
    max_batch_bytes: int = 512 << 20
    probe_threads: int = 4
    max_outstanding: int = 256
    backoff_first: float = 0.2
    backoff_most: float = 10.0
    log_level: str = "WARNING"
    log_dir: str | None = None
    cluster_id: str = ""

    def __post_init__(self) -> None:
        """Refuse what Mooncake would accept silently and fail on later."""
        if fault := address_fault(self.master_address):
            raise StoreMisuse(f"master_address {fault}")
        if not self.local_host or "unspecified" in _kind_of(self.local_host):
            raise StoreMisuse(f"local_host {self.local_host!r}: name an address that peers can reach")
        if self.segment_size and self.segment_size < SMALLEST_SEGMENT:
            raise StoreMisuse(f"segment_size {self.segment_size}: 0, or at least {SMALLEST_SEGMENT} bytes")
        if self.devices and self.protocol is not Transport.RDMA:
            raise StoreMisuse(f"devices {self.devices}: only with protocol rdma, this is {self.protocol}")


def _kind_of(host: str) -> str:
    try:
        return "unspecified" if ipaddress.ip_address(host).is_unspecified else "address"
    except ValueError:
        return "name"


def environment(config: StoreConfig) -> dict[str, str]:
    """Environment variables of a worker. Each was tried, or is documented by Mooncake.

    The two FORCE variables keep `protocol` honest: without them RDMA falls back to TCP with only a log line, and TCP
    may install RDMA on a host with HCAs. The queue limit is raised since 1,024 lets one batch wedge a peer for good.
    """
    milliseconds = {
        "MC_RPC_TIMEOUT_MS": config.rpc_timeout,
        "MC_RPC_CONNECT_TIMEOUT_MS": config.connect_timeout,
    }
    seconds = {
        "MC_HANDSHAKE_CONNECT_TIMEOUT": config.connect_timeout,
        "MC_TCP_PROGRESS_TIMEOUT_SEC": config.peer_timeout,
        "MC_TCP_STATUS_TIMEOUT_SEC": config.peer_timeout,
    }
    variables = {
        "MC_FORCE_TCP" if config.protocol is Transport.TCP else "MC_FORCE_HCA": "1",
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
        "MC_LOG_LEVEL": config.log_level,
        **{name: str(max(1, round(value * 1000))) for name, value in milliseconds.items()},
        **{name: str(max(1, round(value))) for name, value in seconds.items()},
    }
    if config.cluster_id:
        variables["MC_STORE_CLUSTER_ID"] = config.cluster_id
    return variables


def worker_environment(config: StoreConfig, inherited: Mapping[str, str]) -> dict[str, str]:
    """`environment` over what the agent inherited, without any Mooncake setting of the agent's surroundings.

    A stray `MC_*` could bring back what this layer rules out (another metadata path, a smaller queue, a fallback).
    Device settings of an RDMA fabric (`MC_GID_INDEX` and the like) stay.
    """
    kept = {
        name: value
        for name, value in inherited.items()
        if not name.startswith(("MC_", "MOONCAKE_")) or name in _FABRIC_SETTINGS
    }
    return kept | environment(config)


_FABRIC_SETTINGS: Final = frozenset(
    {
        "MC_CUSTOM_TOPO_JSON",
        "MC_ENABLE_DEST_DEVICE_AFFINITY",
        "MC_GID_INDEX",
        "MC_IB_PORT",
        "MC_IB_SL",
        "MC_IB_TC",
        "MC_MAX_RPC_PORT",
        "MC_MIN_RPC_PORT",
        "MC_MS_FILTERS",
        "MC_MTU",
        "MC_PKEY_INDEX",
        "MC_RDMA_BIND_ADDRESS",
    }
)


def setup_arguments(config: StoreConfig, *, local_port: int) -> dict[str, str | int]:
    """Arguments of Mooncake's `setup`: a client without a segment and without buffers of its own.

    `local_port` is only a name (Mooncake listens elsewhere), but it has to be unique on the node.
    """
    return {
        "local_hostname": f"{config.local_host}:{local_port}",
        "metadata_server": METADATA,
        "global_segment_size": 0,
        "local_buffer_size": 0,
        "protocol": str(config.protocol),
        "rdma_devices": ",".join(config.devices),
        "master_server_addr": config.master_address,
    }
