"""Which engines the connector serves at this stage; what it does not serve is refused at start, with the reason.

One KV-cache group of plain full attention, with or without an EAGLE drafter, tensor parallelism; everything that would
silently share wrong KV, or let a user's request fail because of the cache, stops the engine before it takes requests.
"""

from collections.abc import Iterator
from typing import Final

from kvpool_engine.vllm.compat import FullAttentionSpec, KVCacheConfig, VllmConfig, layer_specs

HASH_ALGORITHMS: Final = ("sha256", "sha256_cbor")
"""xxhash collides on purpose and starts from a random seed in every process (DESIGN: keys are shared)."""


class UnsupportedEngineError(ValueError):
    """This engine cannot use the pool as it is configured; the message says what to change."""


def check_engine(config: VllmConfig, cache: KVCacheConfig) -> None:
    """Refuse an engine that the connector does not serve.

    Raises:
        UnsupportedEngineError: all reasons at once.
    """
    reasons = [*_configuration(config), *_groups(cache)]
    if reasons:
        raise UnsupportedEngineError("kvpool cannot serve this engine: " + "; ".join(reasons))


def _configuration(config: VllmConfig) -> Iterator[str]:
    transfer = config.kv_transfer_config
    if transfer.kv_load_failure_policy != "recompute":
        yield (
            f'kv_load_failure_policy is "{transfer.kv_load_failure_policy}", with which a chunk that was evicted fails'
            ' the user\'s request: set "kv_load_failure_policy": "recompute" in --kv-transfer-config'
        )
    if transfer.kv_role != "kv_both":
        yield f'kv_role is "{transfer.kv_role}": set "kv_both" (prefill/decode roles are not served yet)'
    algorithm = config.cache_config.prefix_caching_hash_algo
    if algorithm not in HASH_ALGORITHMS:
        yield f"prefix_caching_hash_algo is {algorithm}: set one of {', '.join(HASH_ALGORITHMS)}"
    drafter = config.speculative_config
    for loading in (config.load_config, drafter.draft_load_config if drafter is not None else None):
        if loading is not None and str(loading.load_format).endswith("dummy"):
            yield "load_format is dummy: KV of made-up weights would be shared under the real weights' keys"
    parallel = config.parallel_config
    for name in (
        "pipeline_parallel_size",
        "data_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        if getattr(parallel, name) != 1:
            yield f"{name} is {getattr(parallel, name)}: only 1 is served yet"


def _groups(cache: KVCacheConfig) -> Iterator[str]:
    groups = cache.kv_cache_groups
    if len(groups) != 1:
        yield (
            f"the model has {len(groups)} KV-cache groups: one is served yet; start vLLM with"
            " --disable-hybrid-kv-cache-manager if the model allows it"
        )
        return
    for spec in layer_specs(groups[0]):
        # Subclasses (MLA, sinks, hidden states) hold something else under the same name.
        if type(spec) is not FullAttentionSpec:
            yield f"its layers are {type(spec).__name__}: only full attention is served yet"
            return
        if spec.tokens_per_state != 1 or spec.non_causal:
            yield "its attention stores compressed or non-causal states: only one state a token is served yet"
            return
    if not groups[0].enable_kv_transfer:
        yield "vLLM marks its KV as not transferable"
