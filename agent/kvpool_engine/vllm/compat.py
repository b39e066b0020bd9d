"""The surface of vLLM that the connector uses, all of it, and the versions that it was tested with.

Promises: importing this module on a vLLM that was not tested, or that lacks a name below, fails with one sentence that
says which version is there and which are served. Refuses to work around differences: a new version gets a new test run.
No other module of kvpool imports vLLM.
"""

from collections.abc import Callable
from typing import Any, Final

import vllm

TESTED: Final = ((0, 32),)
"""Minor versions that the tests in `tests/engine` were run with."""

VERSION: Final[str] = vllm.__version__


def _release(version: str) -> tuple[int, ...]:
    numbers = version.split("+", maxsplit=1)[0].split(".")[:2]
    return tuple(int(number) for number in numbers if number.isdigit())


def check_version(version: str) -> None:
    """Refuse a vLLM that this connector was not tested with.

    Raises:
        ImportError: naming the version found and the versions served.
    """
    if _release(version) not in TESTED:
        served = ", ".join(".".join(map(str, release)) for release in TESTED)
        raise ImportError(
            f"kvpool's connector serves vLLM {served}; this is {version}."
            " Install one of those, or a kvpool that knows this one"
        )


check_version(VERSION)

try:
    from vllm.config import VllmConfig
    from vllm.distributed import get_tensor_model_parallel_rank
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorTransferResults,
        KVConnectorWorkerMetadata,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes, resolve_none_hash_seed
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheSpec,
        UniformTypeKVCacheSpecs,
        group_kernel_blocks,
    )
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request
except ImportError as error:
    raise ImportError(
        f"vLLM {VERSION} lacks what kvpool's connector uses ({error});"
        " it is not the release of that version that kvpool was tested with"
    ) from error

__all__ = [
    "VERSION",
    "BlockPool",
    "FullAttentionSpec",
    "KVCacheBlocks",
    "KVCacheConfig",
    "KVCacheGroupSpec",
    "KVCacheSpec",
    "KVConnectorBase_V1",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorOutput",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "Request",
    "SchedulerOutput",
    "UniformTypeKVCacheSpecs",
    "VllmConfig",
    "attention_layer",
    "get_tensor_model_parallel_rank",
    "group_kernel_blocks",
    "layer_specs",
    "none_hash",
    "resolve_kv_cache_block_sizes",
]

HOOKS: Final = (
    "bind_gpu_block_pool",
    "build_connector_meta",
    "build_connector_worker_meta",
    "build_kv_connector_stats",
    "get_block_ids_with_load_errors",
    "get_finished",
    "get_handshake_metadata",
    "get_kv_connector_stats",
    "get_num_new_matched_tokens",
    "get_transfer_results",
    "handle_preemptions",
    "has_pending_push_work",
    "register_kv_caches",
    "request_finished",
    "requires_kv_delivery",
    "reset_cache",
    "save_kv_layer",
    "set_xfer_handshake_metadata",
    "shutdown",
    "start_load_kv",
    "update_connector_output",
    "update_state_after_alloc",
    "wait_for_layer_load",
    "wait_for_save",
)
"""Methods of `KVConnectorBase_V1` that the connector overrides; vLLM must know each of them."""


def none_hash(algorithm: str) -> bytes:
    """The hash that every request's chain starts from, as this engine computes it (PYTHONHASHSEED counts)."""
    hash_fn: Callable[[Any], bytes] = get_hash_fn_by_name(algorithm)
    return bytes(hash_fn(resolve_none_hash_seed(hash_fn)))


def layer_specs(group: KVCacheGroupSpec) -> list[KVCacheSpec]:
    """The spec of every layer of a group, or the one that all share."""
    spec = group.kv_cache_spec
    return list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]


def attention_layer(config: VllmConfig, name: str) -> Any:
    """The model's attention module whose KV a layer name means; None where there is none."""
    return config.compilation_config.static_forward_context.get(name)
