"""The ConfigMap for engines: a ready `--kv-transfer-config`, and what the engines' own Mooncake connectors read.

Promises: the connector's JSON is complete and safe as it stands (`kv_load_failure_policy: recompute`; under vLLM's own
default a chunk that was evicted fails a user's request). `mooncake.json` lends no memory of the engine to the pool.
Refuses to hold secrets.

SGLang takes its own address from the environment alone: with `mooncake.json` it would call itself `localhost` on every
node. The MOONCAKE_* keys are the same settings as variables, to which a pod adds MOONCAKE_LOCAL_HOSTNAME from its IP.
"""

import json
from typing import Any, Final

from kvpool_operator.api.pool import KVStorePool, Protocol
from kvpool_operator.desired import config, master, names
from kvpool_operator.desired.facts import Facts
from kvpool_operator.desired.meta import Manifest, metadata
from kvpool_operator.desired.names import Component

METADATA: Final = "P2PHANDSHAKE"
"""An HTTP metadata server lets a restarted owner serve zeros as a success."""

LOCAL_BUFFER_BYTES: Final = 128 << 20


def kv_transfer_config(pool: KVStorePool) -> dict[str, Any]:
    """VLLM's `--kv-transfer-config` for kvpool's connector; times in seconds."""
    connector = pool.spec.engines.kv_transfer_config
    return {
        "kv_connector": "KVPoolConnector",
        "kv_connector_module_path": "kvpool_engine.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "socket_dir": config.SOCKET_DIRECTORY,
            "mode": str(pool.spec.engines.mode).lower(),
            "lookup_timeout": connector.lookup_timeout / 1000,
            "load_timeout": pool.spec.cache.load_timeout / 1000,
            "save_timeout": connector.save_timeout / 1000,
        },
    }


def mooncake_json(pool: KVStorePool) -> dict[str, Any]:
    """The file of `MOONCAKE_CONFIG_PATH`, for vLLM's MooncakeStoreConnector."""
    transport = pool.spec.transport
    return {
        "metadata_server": METADATA,
        "master_server_address": master.address(pool),
        # Mooncake compares names of transports letter by letter, in lower case.
        "protocol": str(transport.protocol).lower(),
        "device_name": ",".join(transport.devices),
        "mode": "standalone-store",
        "global_segment_size": 0,
        "local_buffer_size": LOCAL_BUFFER_BYTES,
    }


def mooncake_variables(pool: KVStorePool) -> dict[str, str]:
    """The same as environment variables, for SGLang's HiCache, with what keeps Mooncake from falling back unseen."""
    file = mooncake_json(pool)
    variables = {
        "MOONCAKE_MASTER": file["master_server_address"],
        "MOONCAKE_TE_META_DATA_SERVER": METADATA,
        "MOONCAKE_PROTOCOL": file["protocol"],
        "MOONCAKE_DEVICE": file["device_name"],
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": "0",
        "MC_FORCE_HCA" if pool.spec.transport.protocol is Protocol.RDMA else "MC_FORCE_TCP": "1",
    }
    if cluster := master.cluster_id(pool):
        variables["MC_STORE_CLUSTER_ID"] = cluster
    return variables


def vllm_arguments(pool: KVStorePool) -> list[str]:
    """Arguments of `vllm serve`, ready to be passed on."""
    arguments = [f"--kv-transfer-config={_json(kv_transfer_config(pool))}"]
    if pool.spec.cache.retention_interval is not None:
        arguments.append(f"--prefix-cache-retention-interval={pool.spec.cache.retention_interval}")
    return arguments


def config_map(pool: KVStorePool, _: Facts) -> Manifest:
    """The ConfigMap for engines."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(pool, names.engine(pool), Component.ENGINE),
        "data": {
            "kv-transfer-config": _json(kv_transfer_config(pool)),
            "vllm-args": "".join(f"{argument}\n" for argument in vllm_arguments(pool)),
            "mooncake.json": json.dumps(mooncake_json(pool), indent=2) + "\n",
            **mooncake_variables(pool),
        },
    }


def _json(tree: dict[str, Any]) -> str:
    return json.dumps(tree, separators=(",", ":"))
