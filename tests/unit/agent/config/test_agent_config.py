"""The agent's configuration: what is accepted, and what a person reads when it is not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvpool_agent.config import AgentConfig, EngineMode
from kvpool_agent.config_load import default_config, load_config
from kvpool_agent.config_types import parse_duration, parse_size, print_duration, print_size
from kvpool_agent.errors import ConfigFault
from kvpool_agent.main import command, main
from kvpool_agent.server.agent import store_config
from kvpool_agent.store.config import environment, setup_arguments

ROOT = Path(__file__).parents[4]


def least(**changes: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "pool": {"namespace": "default", "name": "pool"},
        "node": {"name": "n", "ip": "10.0.0.1"},
        "socket": {"directory": "/run/kvpool"},
        "store": {"masterAddress": "master:50051"},
    }
    for section, fields in changes.items():
        tree.setdefault(section, {}).update(fields)
    return tree


def load(tmp_path: Path, tree: object, environment: dict[str, str] | None = None) -> AgentConfig:
    path = tmp_path / "agent.yaml"
    path.write_text(tree if isinstance(tree, str) else json.dumps(tree))
    return load_config(path, environment or {})


def problems(tmp_path: Path, tree: object, environment: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigFault) as caught:
        load(tmp_path, tree, environment)
    return "\n".join([str(caught.value.source), *caught.value.problems])


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1", 1),
        ("64Gi", 64 << 30),
        ("1.5Gi", 3 << 29),
        ("2G", 2_000_000_000),
        ("1k", 1000),
        (" 5Mi ", 5 << 20),
    ],
)
def test_sizes_are_kubernetes_quantities(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "-1", "1GiB", "1 Gi", "ten", "0.3", "1e3", None, True, 1.5, -1, [1]])
def test_what_is_no_size_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r"size|whole number"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("10s", 10), ("500ms", 0.5), ("1m30s", 90), ("2h", 7200), ("1.5s", 1.5), ("1m1ms", 60.001)],
)
def test_durations_carry_their_unit(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "10", 10, 1.5, None, "s", "-1s", "1s1m", "1d", "1.2345s"])
def test_what_is_no_duration_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="duration"):
        parse_duration(text)


@given(st.integers(0, 1 << 60))
def test_a_printed_size_reads_back(size: int) -> None:
    assert parse_size(print_size(size)) == size


@given(st.integers(0, 10**10))
def test_a_printed_duration_reads_back(milliseconds: int) -> None:
    assert parse_duration(print_duration(milliseconds / 1000)) == pytest.approx(milliseconds / 1000, abs=1e-6)


def test_the_least_configuration_has_the_defaults(tmp_path: Path) -> None:
    config = load(tmp_path, least())
    assert config.pool.full_name == "default.pool"
    assert (config.segment.size, config.segment.ring_size) == (1 << 30, 256 << 20)
    assert config.engines.mode is EngineMode.AUTO
    assert config.cache.lookup_timeout == 0.5


def test_the_environment_wins_whatever_its_spelling(tmp_path: Path) -> None:
    environment = {
        "KVPOOL_AGENT__STORE__MASTER_ADDRESS": "other:1",
        "KVPOOL_AGENT__CACHE__LEASETTL": "7s",
        "kvpool_agent__segment__ringsize": "1Gi",
        "KVPOOL_AGENT__TELEMETRY__OTLP__SAMPLING": "0.5",
        "KVPOOL_AGENT__STORE__DEVICES": "[mlx5_0, mlx5_1]",
        "KVPOOL_OTHER": "ignored",
    }
    config = load(tmp_path, least(), environment)
    assert config.store.master_address == "other:1"
    assert config.cache.lease_ttl == 7
    assert config.segment.ring_size == 1 << 30
    assert config.telemetry.otlp.sampling == 0.5
    assert config.store.devices == ("mlx5_0", "mlx5_1")


def test_the_environment_alone_can_be_enough(tmp_path: Path) -> None:
    tree = least()
    del tree["store"]
    assert load(tmp_path, tree, {"KVPOOL_AGENT__STORE__MASTERADDRESS": "m:1"}).store.master_address == "m:1"


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"KVPOOL_AGENT__STORE__MASTERADRESS": "x"}, "did you mean 'masterAddress'"),
        ({"KVPOOL_AGENT__QQQ__X": "x"}, "known are pool"),
        ({"KVPOOL_AGENT__POOL__NAME__X": "x"}, "pool.name has no field 'X'"),
        ({"KVPOOL_AGENT__STORE__DEVICES": "[a"}, "not YAML"),
        ({"KVPOOL_AGENT__DRAIN__TIMEOUT": "soon"}, "drain.timeout (from the environment"),
    ],
)
def test_a_wrong_variable_is_named(tmp_path: Path, environment: dict[str, str], text: str) -> None:
    assert text in problems(tmp_path, least(), environment)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"pool": {"name": "Upper"}}, "pool: pool name 'default.Upper'"),
        ({"node": {"ip": "0.0.0.0"}}, "node.ip: 0.0.0.0 is a wildcard"),
        ({"node": {"ip": "node-a"}}, "node.ip: 'node-a' is not an IP address"),
        ({"store": {"masterAddress": "master"}}, "store.masterAddress: 'master' is not host:port"),
        ({"store": {"masterAddress": "m:99999"}}, "host:port"),
        ({"store": {"masterAddress": "etcd://"}}, "store.masterAddress: 'etcd://' is not host:port"),
        ({"store": {"masterAddress": "etcd://e:2379;f"}}, "etcd://host:port"),
        ({"store": {"masterAddress": "etcd://e:2379;"}}, "etcd://host:port"),
        ({"store": {"masterAddress": "etcd://http://e:2379"}}, "etcd://host:port"),
        ({"store": {"masterAddress": "e:2379;f:2379"}}, "etcd://host:port"),
        ({"store": {"masterAddress": "k8s://ns/lease"}}, "not compiled into"),
        ({"store": {"clusterId": "c1"}}, "store: clusterId 'c1' is read only with a masterAddress etcd://"),
        ({"store": {"protocol": "tcp"}}, "store.protocol: Input should be 'RDMA' or 'TCP', found 'tcp'"),
        ({"segment": {"size": "1Mi"}}, "16Mi"),
        ({"segment": {"ringSize": "4Ki"}}, "segment.ringSize"),
        ({"cache": {"lookupTimeout": "0s"}}, "cache.lookupTimeout: more than 0s"),
        ({"cache": {"loadTimeout": "1h"}}, "cache.loadTimeout"),
        ({"cache": {"loadTimeout": 10}}, "10 is not a duration"),
        ({"cache": {"loadTimeouts": "1s"}}, "did you mean 'loadTimeout'"),
        ({"telemetry": {"port": 70000}}, "telemetry.port"),
        ({"telemetry": {"otlp": {"sampling": 2}}}, "telemetry.otlp.sampling"),
        ({"engines": {"maxSessions": 0}}, "engines.maxSessions"),
        ({"sokcet": {"directory": "/x"}}, "sokcet: is not a known field; did you mean 'socket'"),
    ],
)
def test_a_wrong_field_is_named_with_its_remedy(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    assert text in problems(tmp_path, least(**change))


@pytest.mark.parametrize(
    "address",
    [
        "m:1",
        "10.0.0.9:50051",
        "[fd00::1]:50051",
        "etcd://e:2379",
        "etcd://e-0.e:2379;10.0.0.2:2379;[fd00::1]:1",
    ],
)
def test_masters_are_named_or_found_through_etcd(tmp_path: Path, address: str) -> None:
    cluster = "kvpool-1" if address.startswith("etcd://") else ""
    config = load(tmp_path, least(store={"masterAddress": address, "clusterId": cluster}))
    made = store_config(config)
    assert setup_arguments(made, local_port=1)["master_server_addr"] == address
    assert environment(made).get("MC_STORE_CLUSTER_ID", "") == cluster


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    found = problems(tmp_path, {"node": {"name": "n", "ip": "x"}, "sgment": {}})
    for text in ("pool: is missing", "node.ip", "socket: is missing", "store: is missing", "sgment"):
        assert text in found


@pytest.mark.parametrize(
    ("text", "fault"), [("a: [", "not YAML"), ("- a", "no sections"), ("", "no sections")]
)
def test_a_file_that_is_none_is_named(tmp_path: Path, text: str, fault: str) -> None:
    found = problems(tmp_path, text)
    assert fault in found
    assert "agent.yaml" in found


def test_a_missing_or_binary_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigFault, match="cannot be read: No such file"):
        load_config(tmp_path / "absent", {})
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigFault, match="not UTF-8"):
        load_config(tmp_path / "binary", {})


def test_a_configuration_cannot_be_changed(tmp_path: Path) -> None:
    config = load(tmp_path, least())
    with pytest.raises(ValidationError):
        config.segment.size = 1


def test_the_printed_default_is_complete_and_reads_back(tmp_path: Path) -> None:
    text = default_config()
    config = load(tmp_path, text)
    assert config.model_dump(mode="json", by_alias=True) == yaml.safe_load(text)


def test_every_field_is_explained() -> None:
    for line, after in zip(default_config().splitlines(), default_config().splitlines()[1:], strict=False):
        if after.strip() and not after.strip().startswith("#"):
            assert line.strip().startswith("#") or line.strip() == "", after


def test_reference_pages_are_what_the_code_says() -> None:
    tool = [sys.executable, str(ROOT / "tools" / "gen_reference.py"), "--check"]
    done = subprocess.run(tool, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr


def test_the_command_checks_prints_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "agent.yaml"
    path.write_text(json.dumps(least()))
    assert main(["--config", str(path), "--check-config"]) == 0
    assert capsys.readouterr().out == f"{path}: ok\n"
    assert main([]) == 2
    assert "--config FILE is missing" in capsys.readouterr().err
    path.write_text("pool: 1")
    assert main(["--config", str(path)]) == 2
    assert "pool" in capsys.readouterr().err
    assert main(["--print-default-config"]) == 0
    assert "masterAddress" in capsys.readouterr().out


def test_kvpool_agent_is_the_same_command(capsys: pytest.CaptureFixture[str]) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    command(parser.add_subparsers())
    arguments = parser.parse_args(["agent", "--print-default-config"])
    assert arguments.run(arguments) == 0
    assert "masterAddress" in capsys.readouterr().out
