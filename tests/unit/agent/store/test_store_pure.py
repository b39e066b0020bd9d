"""Backoff, blocked keys, reach and configuration: the store's pure parts."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool_agent.store.backoff import pause
from kvpool_agent.store.blocked import BlockedKeys
from kvpool_agent.store.config import StoreConfig, environment, setup_arguments, worker_environment
from kvpool_agent.store.errors import StoreMisuse
from kvpool_agent.store.protocol import ReplicaLocation, SegmentInfo, Transport
from kvpool_agent.store.reach import MasterReach

GOOD = StoreConfig("10.0.0.9:50051", "10.0.0.1")


@given(st.integers(1, 1000), st.floats(0, 1))
def test_pauses_stay_between_half_the_first_and_the_most(failures: int, chance: float) -> None:
    seconds = pause(failures, first=0.2, most=10.0, random=lambda: chance)
    assert 0.1 <= seconds <= 10.0


def test_pauses_double_up_to_the_most() -> None:
    pauses = [pause(failures, first=0.5, most=3.0, random=lambda: 1.0) for failures in range(1, 6)]
    assert pauses == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_a_blocked_key_is_free_when_its_time_has_come() -> None:
    blocked = BlockedKeys()
    blocked.block([b"a", b"b"], until=30.0, now=0.0)
    assert blocked.until(b"a", now=29.9) == 30.0
    assert blocked.until(b"a", now=30.0) is None
    assert blocked.until(b"c", now=0.0) is None
    blocked.block([b"a"], until=70.0, now=40.0)
    assert blocked.until(b"a", now=41.0) == 70.0
    assert len(blocked) == 1  # what had lapsed is forgotten


def test_blocked_keys_are_bounded_and_the_oldest_goes_first_bounded() -> None:
    blocked = BlockedKeys(most=3)
    for number in range(5):
        blocked.block([bytes([number])], until=30.0 + number, now=0.0)
    assert len(blocked) == 3
    assert [blocked.until(bytes([number]), now=0.0) is not None for number in range(5)] == [
        False,
        False,
        True,
        True,
        True,
    ]


def test_reach_is_down_only_from_a_failed_probe_to_the_next_answer() -> None:
    clock = [0.0]
    reach = MasterReach(lambda: clock[0])
    assert (reach.known_down, reach.age) == (False, None)
    reach.answered()
    clock[0] = 5.0
    assert (reach.known_down, reach.age) == (False, 5.0)
    reach.failed("no answer")
    assert (reach.known_down, reach.why, reach.age) == (True, "no answer", 5.0)
    reach.answered()
    assert (reach.known_down, reach.why, reach.age) == (False, "", 0.0)


def test_metadata_is_peer_to_peer_and_the_client_has_neither_segment_nor_buffer() -> None:
    assert setup_arguments(GOOD, local_port=4711) == {
        "local_hostname": "10.0.0.1:4711",
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": 0,
        "local_buffer_size": 0,
        "protocol": "tcp",
        "rdma_devices": "",
        "master_server_addr": "10.0.0.9:50051",
    }


def test_the_environment_forces_the_transport_and_bounds_every_wait() -> None:
    assert environment(GOOD) == {
        "MC_FORCE_TCP": "1",
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
        "MC_LOG_LEVEL": "WARNING",
        "MC_RPC_TIMEOUT_MS": "3000",
        "MC_RPC_CONNECT_TIMEOUT_MS": "2000",
        "MC_HANDSHAKE_CONNECT_TIMEOUT": "2",
        "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",
        "MC_TCP_STATUS_TIMEOUT_SEC": "5",
    }
    rdma = environment(
        StoreConfig("m:1", "10.0.0.1", protocol=Transport.RDMA, devices=("mlx5_0",), cluster_id="c1")
    )
    assert rdma["MC_FORCE_HCA"] == "1"
    assert "MC_FORCE_TCP" not in rdma
    assert rdma["MC_STORE_CLUSTER_ID"] == "c1"


def test_a_stray_mooncake_setting_of_the_surroundings_does_not_reach_a_worker() -> None:
    inherited = {
        "PATH": os.defpath,
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "1",
        "MC_FORCE_HCA": "1",
        "MC_DISABLE_METACACHE": "1",
        "MOONCAKE_SNAPSHOT_LOCAL_PATH": "/x",
        "MC_GID_INDEX": "5",
    }
    made = worker_environment(GOOD, inherited)
    assert made == {"PATH": os.defpath, "MC_GID_INDEX": "5", **environment(GOOD)}


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"master_address": ""}, "master_address"),
        ({"master_address": "host"}, "master_address"),
        ({"master_address": "host:port"}, "master_address"),
        ({"master_address": "host:0"}, "master_address"),
        ({"master_address": "etcd://"}, "master_address"),
        ({"master_address": "etcd://10.0.0.9:2379;"}, "master_address"),
        ({"master_address": "redis://10.0.0.9:6379"}, "not compiled into"),
        ({"local_host": ""}, "local_host"),
        ({"local_host": "0.0.0.0"}, "local_host"),
        ({"local_host": "::"}, "local_host"),
        ({"segment_size": 1024}, "segment_size"),
        ({"devices": ("mlx5_0",)}, "devices"),
    ],
)
def test_what_mooncake_would_accept_and_fail_on_later_is_refused(
    settings: dict[str, object], word: str
) -> None:
    with pytest.raises(StoreMisuse, match=word):
        StoreConfig(**{"master_address": "m:1", "local_host": "10.0.0.1", **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize("address", ["m:1", "10.0.0.9:50051", "etcd://10.0.0.9:2379", "etcd://a:1;b:2"])
def test_good_addresses_pass(address: str) -> None:
    assert StoreConfig(address, "10.0.0.1").master_address == address


@pytest.mark.parametrize(
    ("location", "offset"),
    [
        (ReplicaLocation("n:1", 1000, 10), 0),
        (ReplicaLocation("n:1", 1090, 10), 90),
        (ReplicaLocation("n:1", 1091, 10), None),
        (ReplicaLocation("n:1", 999, 10), None),
        (ReplicaLocation("n:2", 1000, 10), None),
    ],
)
def test_an_offset_is_given_only_for_what_lies_in_the_own_segment(
    location: ReplicaLocation, offset: int | None
) -> None:
    segment = SegmentInfo(fd=-1, name="n:9", size=100, base=1000, endpoint="n:1", generation=1)
    assert segment.offset_of(location) == offset
