"""Questions that only the engine's environment can answer, asked once: prints one JSON object.

What of vLLM's interface exists, which engines `check_engine` refuses and with which words, what a wrong version says.
"""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvpool_engine.vllm import KVPoolConnector, compat
from kvpool_engine.vllm.support import UnsupportedEngineError, check_engine

SPEC = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
WINDOW = SlidingWindowSpec(
    block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=64
)
MAMBA = MambaSpec(block_size=32, shapes=((2, 8),), dtypes=(torch.float32,))
MLA = MLAAttentionSpec(block_size=32, num_kv_heads=1, head_size=32, dtype=torch.float32)


def _config(**changes: Any) -> Any:
    transfer = {"kv_load_failure_policy": "recompute", "kv_role": "kv_both"}
    cache = {"prefix_caching_hash_algo": "sha256"}
    parallel = {
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
    }
    loading = {"load_format": "auto"}
    for part in (transfer, cache, parallel, loading):
        part.update({name: value for name, value in changes.items() if name in part})
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(**transfer),
        cache_config=SimpleNamespace(**cache),
        parallel_config=SimpleNamespace(**parallel),
        load_config=SimpleNamespace(**loading),
        speculative_config=None,
    )


def _cache(*specs: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer{index}"], spec) for index, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def _refusal(config: Any, cache: KVCacheConfig) -> str:
    try:
        check_engine(config, cache)
    except UnsupportedEngineError as error:
        return str(error)
    return ""


def _version(version: str) -> str:
    try:
        compat.check_version(version)
    except ImportError as error:
        return str(error)
    return ""


def main() -> None:
    """Answer everything."""
    base = compat.KVConnectorBase_V1
    answer = {
        "version": compat.VERSION,
        "hooks unknown to vLLM": [name for name in compat.HOOKS if not hasattr(base, name)],
        "hooks not overridden": [name for name in compat.HOOKS if name not in vars(KVPoolConnector)],
        "hooks not listed": [
            name
            for name in vars(KVPoolConnector)
            if hasattr(base, name) and not name.startswith("_") and name not in compat.HOOKS
        ],
        "abstract": sorted(getattr(KVPoolConnector, "__abstractmethods__", ())),
        "versions": {version: _version(version) for version in ("0.32.0", "0.32.1+cpu", "0.31.4", "1.0")},
        "refusals": {
            "served": _refusal(_config(), _cache(SPEC)),
            "policy": _refusal(_config(kv_load_failure_policy="fail"), _cache(SPEC)),
            "role": _refusal(_config(kv_role="kv_producer"), _cache(SPEC)),
            "hash": _refusal(_config(prefix_caching_hash_algo="xxhash"), _cache(SPEC)),
            "dummy": _refusal(_config(load_format="dummy"), _cache(SPEC)),
            "stages": _refusal(_config(pipeline_parallel_size=2), _cache(SPEC)),
            "data": _refusal(_config(data_parallel_size=2), _cache(SPEC)),
            "decode context": _refusal(_config(decode_context_parallel_size=2), _cache(SPEC)),
            "prefill context": _refusal(_config(prefill_context_parallel_size=2), _cache(SPEC)),
            "mamba": _refusal(_config(), _cache(MAMBA)),
            "groups": _refusal(_config(), _cache(SPEC, WINDOW)),
            "window": _refusal(_config(), _cache(WINDOW)),
            "mla": _refusal(_config(), _cache(MLA)),
            "non-causal": _refusal(_config(), _cache(replace(SPEC, non_causal=True))),
            "several": _refusal(_config(kv_load_failure_policy="fail", kv_role="kv_consumer"), _cache(MLA)),
        },
    }
    print("\n" + json.dumps(answer))


if __name__ == "__main__":
    main()
