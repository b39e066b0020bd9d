"""SAME_IDENTITY from vLLM's own configuration: nothing here is typed a second time by a person.

Built on a worker, which knows the tensors; the scheduler gets it from there at start, so that both sessions of an
engine declare the very same identity.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvpool_engine.vllm.compat import (
    VERSION,
    KVCacheConfig,
    VllmConfig,
    attention_layer,
    group_kernel_blocks,
    layer_specs,
    none_hash,
    resolve_kv_cache_block_sizes,
)
from kvpool_engine.vllm.fingerprint import check_pinned, model_fingerprint, model_name
from kvpool_engine.vllm.support import UnsupportedEngineError
from kvpool_wire import agent_pb2 as pb
from kvpool_wire.identity import digest

if TYPE_CHECKING:
    import torch


def block_tensors(cache: KVCacheConfig, caches: Mapping[str, "torch.Tensor"]) -> dict[str, "torch.Tensor"]:
    """Every layer's KV as [block, ...], with vLLM's own block as the first axis.

    Args:
        cache: as the connector was made with.
        caches: what vLLM registers: per layer [kernel block, head, token, content].

    Raises:
        UnsupportedEngineError: a layer without a tensor, or a tensor of another form.
    """
    found: dict[str, torch.Tensor] = {}
    for name in cache.kv_cache_groups[0].layer_names:
        tensor = caches.get(name)
        if tensor is None:
            raise UnsupportedEngineError(f"vLLM registered no KV tensor for layer {name}")
        if tensor.dim() != 4 or tensor.shape[0] % cache.num_blocks:
            raise UnsupportedEngineError(
                f"layer {name}: a KV tensor of shape {tuple(tensor.shape)};"
                f" [blocks, heads, tokens, content] with {cache.num_blocks} blocks is served"
            )
        found[name] = group_kernel_blocks(tensor, cache.num_blocks)
    extra = {caches[name].untyped_storage().data_ptr() for name in caches if name not in found}
    if extra - {tensor.untyped_storage().data_ptr() for tensor in found.values()}:
        names = ", ".join(sorted(set(caches) - set(found)))
        raise UnsupportedEngineError(f"vLLM registered KV of layers outside the group: {names}")
    return found


def build_identity(
    config: VllmConfig, cache: KVCacheConfig, tensors: Mapping[str, "torch.Tensor"], *, given_fingerprint: str
) -> pb.Identity:
    """The identity of this engine; equal on all its ranks."""
    scheduler_block, hash_block = resolve_kv_cache_block_sizes(cache, config)
    speculative = config.speculative_config
    use_eagle = speculative is not None and bool(speculative.use_eagle_block_drop())
    algorithm = str(config.cache_config.prefix_caching_hash_algo)
    identity = pb.Identity(
        model=model_name(config.model_config),
        fingerprint=_fingerprint(config, given_fingerprint),
        engine=f"vllm {VERSION}",
        hash_algorithm=algorithm,
        hash_seed=none_hash(algorithm),
        hash_block_size=hash_block,
        scheduler_block_size=scheduler_block,
        use_eagle=use_eagle,
        retention_interval=cache.prefix_cache_retention_interval,
    )
    for group in cache.kv_cache_groups:
        identity.groups.add(
            kind=pb.FULL_ATTENTION,
            block_size=group.kv_cache_spec.block_size,
            # Where vLLM flags no group the drafter reads all of them.
            eagle=use_eagle,
            variant=_variant(config, cache, group),
            # Ranks that hold copies of one head store a copy each: never wrong, at worst some bytes too many.
            shards_per_stage=config.parallel_config.tensor_parallel_size,
            layers=[_layer(name, tensors[name]) for name in group.layer_names],
        )
    return identity


def _layer(name: str, tensor: "torch.Tensor") -> pb.Layer:
    """One tensor a layer: K and V lie side by side in its last axis, in the backend's own packing (the variant)."""
    axes = ("head", "token", "content") if tensor.dim() == 4 else ("sub-block", "head", "token", "content")
    dtype = str(tensor.dtype).removeprefix("torch.")
    return pb.Layer(name=name, tensors=[pb.TensorFormat(dtype=dtype, axes=axes, shape=tensor.shape[1:])])


def _variant(config: VllmConfig, cache: KVCacheConfig, group: Any) -> str:
    """What gives the bytes of a block their meaning beside type and shape: who wrote them, and how they are packed."""
    packings: set[str] = set()
    for name in group.layer_names:
        layer = attention_layer(config, name)
        backend = layer.attn_backend.get_name() if hasattr(layer, "attn_backend") else "unknown"
        # The CPU backend packs keys for the instruction set that it found.
        packings.add(f"{backend}/{getattr(layer, 'isa', '')}")
    specs = {
        (
            spec.head_size,
            spec.head_size_v,
            spec.kv_quant_mode.name,
            spec.num_head_slots,
            spec.state_content_bytes,
            spec.sliding_window,
            spec.attention_chunk_size,
        )
        for spec in layer_specs(group)
    }
    cache_type = config.cache_config.cache_dtype
    layout = str(cache.kv_cache_layout)
    # The layout decides strides, which a chunk does not keep; blocks split for a kernel show in the shape.
    text = repr((sorted(packings), sorted(map(repr, specs)), str(cache_type)))
    return f"{'+'.join(sorted(packings))} {layout} {digest('kvpool vllm variant 1', text).hex()[:16]}"


def _fingerprint(config: VllmConfig, given: str) -> str:
    models = [config.model_config]
    if config.speculative_config is not None and config.speculative_config.draft_model_config is not None:
        models.append(config.speculative_config.draft_model_config)
    for model in models:
        check_pinned(model, given=given)
    return "+".join(model_fingerprint(model, given=given) for model in models)
