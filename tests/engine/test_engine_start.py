"""What vLLM has to offer, and which engines are refused at start, with words that say what to change."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from engine.rig.engines import ENVIRONMENT, ROOT, Engine, EngineError, engine_python, options, transfer_config

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def inside(work: Path) -> dict[str, Any]:
    """The answers of the engine's own environment."""
    path = f"{ROOT / 'agent'}:{ROOT / 'tests'}"
    done = subprocess.run(
        [engine_python(), "-m", "engine.rig.inside"],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "HOME": str(work), **ENVIRONMENT, "PYTHONPATH": path},
        cwd=work,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def test_the_surface_of_vllm_is_the_one_listed(inside: dict[str, Any]) -> None:
    """A hook that vLLM renames or drops would silently never be called."""
    assert inside["hooks unknown to vLLM"] == [], f"vLLM {inside['version']} no longer has these hooks"
    assert inside["hooks not overridden"] == []
    assert inside["hooks not listed"] == [], "list them in kvpool_engine.vllm.compat.HOOKS"
    assert inside["abstract"] == []


def test_another_version_of_vllm_is_refused_with_a_clear_sentence(inside: dict[str, Any]) -> None:
    versions = inside["versions"]
    assert versions["0.32.0"] == versions["0.32.1+cpu"] == ""
    for other in ("0.31.4", "1.0"):
        assert other in versions[other]
        assert "0.32" in versions[other]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("policy", 'set "kv_load_failure_policy": "recompute"'),
        ("role", 'set "kv_both"'),
        ("hash", "set one of sha256, sha256_cbor"),
        ("dummy", "load_format is dummy"),
        ("stages", "pipeline_parallel_size is 2"),
        ("data", "data_parallel_size is 2"),
        ("decode context", "decode_context_parallel_size is 2"),
        ("prefill context", "prefill_context_parallel_size is 2"),
        ("mamba", "MambaSpec"),
        ("groups", "2 KV-cache groups"),
        ("window", "SlidingWindowSpec"),
        ("mla", "MLAAttentionSpec"),
        ("non-causal", "non-causal"),
    ],
)
def test_engines_that_are_not_served_are_refused(inside: dict[str, Any], case: str, words: str) -> None:
    assert inside["refusals"]["served"] == ""
    assert words in inside["refusals"][case]


def test_all_reasons_are_named_at_once(inside: dict[str, Any]) -> None:
    text = inside["refusals"]["several"]
    assert all(word in text for word in ("kv_load_failure_policy", "kv_role", "MLAAttentionSpec"))


def test_a_real_engine_with_the_default_policy_does_not_start(work: Path) -> None:
    """vLLM's default, "fail", would fail a user's request whenever a chunk was evicted."""
    folder = work / "refused"
    folder.mkdir()
    made = options(folder, eagle=False, socket_dir=work)
    made["kv_transfer_config"] = transfer_config(work)
    del made["kv_transfer_config"]["kv_load_failure_policy"]
    engine = Engine("refused", made, folder)
    try:
        with pytest.raises(EngineError, match="ended"):
            engine.ready()
        assert '"kv_load_failure_policy": "recompute"' in engine.log.read_text(errors="replace")
    finally:
        engine.close()
