"""What engines get is what their connectors accept."""

import json
from typing import Any

import pytest

from kvpool_agent.config import EngineMode
from kvpool_engine.vllm.settings import Settings
from kvpool_operator.desired import config, engine
from unit.operator.desired.builders import pool
from unit.operator.desired.cases import CASES, ETCD

# What vLLM 0.32's MooncakeStoreConfig reads (vllm/distributed/mooncake_store.py).
VLLM_KEYS = {
    *("metadata_server", "master_server_address", "protocol", "device_name", "mode", "global_segment_size"),
    *("local_buffer_size", "enable_offload", "tenant_id"),
}


def data(case: str) -> dict[str, str]:
    return dict(engine.config_map(*CASES[case])["data"])


@pytest.mark.parametrize("case", CASES)
def test_our_connector_accepts_its_settings(case: str) -> None:
    one = CASES[case][0]
    tree = json.loads(data(case)["kv-transfer-config"])
    settings = Settings.of(tree["kv_connector_extra_config"], {})
    assert str(settings.socket_dir) == config.SOCKET_DIRECTORY
    assert settings.mode.name.lower() == str(one.spec.engines.mode).lower()
    assert settings.load_timeout * 1000 == one.spec.cache.load_timeout
    assert settings.lookup_timeout * 1000 == one.spec.engines.kv_transfer_config.lookup_timeout


@pytest.mark.parametrize("case", CASES)
def test_a_chunk_that_was_evicted_never_fails_a_users_request(case: str) -> None:
    tree = json.loads(data(case)["kv-transfer-config"])
    # vLLM's own default is `fail`, under which our connector refuses to start.
    assert tree["kv_load_failure_policy"] == "recompute"
    assert tree["kv_role"] == "kv_both"
    assert (tree["kv_connector"], tree["kv_connector_module_path"]) == (
        "KVPoolConnector",
        "kvpool_engine.vllm",
    )


@pytest.mark.parametrize("mode", EngineMode)
def test_every_mode_of_the_agent_is_one_of_the_connector(mode: EngineMode) -> None:
    tree = engine.kv_transfer_config(pool({"engines": {"mode": str(mode)}}))
    assert Settings.of(tree["kv_connector_extra_config"], {}).mode.name == mode.name


@pytest.mark.parametrize("case", CASES)
def test_vllms_own_connector_finds_every_key_and_lends_no_memory(case: str) -> None:
    tree: dict[str, Any] = json.loads(data(case)["mooncake.json"])
    assert set(tree) <= VLLM_KEYS
    assert tree["protocol"] in ("tcp", "rdma")
    assert tree["metadata_server"] == "P2PHANDSHAKE"
    # vLLM refuses standalone-store with a segment, and a buffer of nothing.
    assert (tree["mode"], tree["global_segment_size"]) == ("standalone-store", 0)
    assert tree["local_buffer_size"] > 0


def test_masters_in_etcd_are_found_by_the_name_of_their_cluster() -> None:
    one = pool(ETCD)
    variables = engine.mooncake_variables(one)
    assert variables["MOONCAKE_MASTER"] == "etcd://etcd-0.etcd:2379;etcd-1.etcd:2379"
    assert variables["MC_STORE_CLUSTER_ID"] == config.agent_config(one)["store"]["clusterId"]


def test_rdma_never_becomes_tcp_unseen() -> None:
    assert engine.mooncake_variables(CASES["rdma"][0])["MC_FORCE_HCA"] == "1"
    assert engine.mooncake_variables(CASES["tcp"][0])["MC_FORCE_TCP"] == "1"


def test_the_retention_interval_reaches_vllm() -> None:
    arguments = data("everything")["vllm-args"].splitlines()
    assert arguments[0].startswith("--kv-transfer-config={")
    assert arguments[1:] == ["--prefix-cache-retention-interval=4096"]
    assert len(engine.vllm_arguments(pool())) == 1
