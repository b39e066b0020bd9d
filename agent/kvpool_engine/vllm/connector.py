"""`KVPoolConnector`: vLLM's connector interface, each hook handed to the side that it belongs to."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from kvpool_engine.vllm.compat import (
    BlockPool,
    KVCacheBlocks,
    KVCacheConfig,
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
    KVConnectorStats,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    Request,
    SchedulerOutput,
    VllmConfig,
    get_tensor_model_parallel_rank,
    resolve_kv_cache_block_sizes,
)
from kvpool_engine.vllm.messages import Handshake, StepMetadata
from kvpool_engine.vllm.scheduler import SchedulerSide
from kvpool_engine.vllm.settings import Settings
from kvpool_engine.vllm.stats import KVPoolStats
from kvpool_engine.vllm.support import check_engine
from kvpool_engine.vllm.worker import WorkerSide

if TYPE_CHECKING:
    import torch


class KVPoolConnector(KVConnectorBase_V1):
    """One shared KV cache for the engines of a pool. See `docs/how-to/vllm.md`.

    Raises:
        UnsupportedEngineError: an engine that is not served yet; the message says what to change.
        SettingsError: a setting in `kv_connector_extra_config` that cannot be used.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        check_engine(vllm_config, kv_cache_config)
        super().__init__(vllm_config, role, kv_cache_config)
        settings = Settings.of(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._invalid: set[int] = set()
        if role is KVConnectorRole.SCHEDULER:
            speculative = vllm_config.speculative_config
            self._scheduler = SchedulerSide(
                settings,
                block_size=resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[0],
                eagle=speculative is not None and bool(speculative.use_eagle_block_drop()),
                ranks=vllm_config.parallel_config.world_size,
            )
        else:
            rank = get_tensor_model_parallel_rank()
            self._worker = WorkerSide(settings, vllm_config, kv_cache_config, rank=rank)

    @property
    def scheduler(self) -> SchedulerSide:
        """The side in the scheduler's process."""
        if self._scheduler is None:
            raise RuntimeError("a scheduler's hook was called on a worker's connector")
        return self._scheduler

    @property
    def worker(self) -> WorkerSide:
        """The side on a rank."""
        if self._worker is None:
            raise RuntimeError("a worker's hook was called on the scheduler's connector")
        return self._worker

    @property
    @override
    def requires_kv_delivery(self) -> bool:
        """A cache delivers nothing that anybody has to have."""
        return False

    # ---------------------------------------------------------------------------------------------- scheduler

    @override
    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Where blocks are pinned."""
        self.scheduler.bind(gpu_block_pool)

    @override
    def set_xfer_handshake_metadata(self, metadata: Mapping[int, KVConnectorHandshakeMetadata]) -> None:
        """The identity, as the workers found it."""
        found = {rank: hand for rank, hand in metadata.items() if isinstance(hand, Handshake)}
        self.scheduler.attach(found)

    @override
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens of the prompt that the pool has beyond the local ones; None while the answer is on its way."""
        return self.scheduler.matched(request, num_computed_tokens)

    @override
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """The blocks to load into have been allocated."""
        self.scheduler.allocated(request, blocks, num_external_tokens)

    @override
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """The work of one step."""
        return self.scheduler.step(scheduler_output)

    @override
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What has ended on the workers."""
        self.scheduler.reported(connector_output)

    @override
    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Nothing is delayed: a save that still reads blocks keeps them by a reference of its own."""
        return False, None

    @override
    def has_pending_push_work(self) -> bool:
        """An idle engine goes on stepping until its saves are over."""
        return self.scheduler.busy

    @override
    def reset_cache(self) -> bool | None:
        """The engine forgets what it cached: so it does of the pool."""
        return None if self._scheduler is None else self._scheduler.reset()

    # ------------------------------------------------------------------------------------------------- worker

    @override
    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        """Where this rank's KV lies."""
        self.worker.register(kv_caches)

    @override
    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """The identity, for the scheduler."""
        return None if self._worker is None else self._worker.handshake()

    @override
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Before the step runs."""
        if isinstance(kv_connector_metadata, StepMetadata):
            self.worker.begin(kv_connector_metadata)

    @override
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin this step's loads; they run beside the following steps."""
        metadata = self._get_connector_metadata()
        if isinstance(metadata, StepMetadata):
            self.worker.load(metadata.loads)

    @override
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: no request runs before its load has ended."""

    @override
    def save_kv_layer(
        self, layer_name: str, kv_layer: "torch.Tensor", attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Blocks are saved whole, after the step."""

    @override
    def wait_for_save(self) -> None:
        """Begin this step's saves, after the target's and the drafter's forward pass; nothing is waited for."""
        metadata = self._connector_metadata
        if isinstance(metadata, StepMetadata):
            self.worker.save(metadata.saves)

    @override
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Loads that have ended."""
        results = self.get_transfer_results(finished_req_ids)
        return None, results.finished_recving or None

    @override
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads that have ended, and those whose request has to begin anew."""
        outcome = self.worker.outcome()
        self._invalid |= outcome.invalid
        return KVConnectorTransferResults(finished_recving=outcome.finished, failed_recving=outcome.failed)

    @override
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of which vLLM computes the tokens again."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    @override
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What the scheduler's side has to hear."""
        return self.worker.report()

    # --------------------------------------------------------------------------------------------------- both

    @override
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What was counted since the last call."""
        side = self._scheduler or self._worker
        return None if side is None else side.counts.take()

    @classmethod
    @override
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Counts that came from another process."""
        return KVPoolStats(data or {})

    @override
    def shutdown(self) -> None:
        """Detach."""
        side = self._scheduler or self._worker
        if side is not None:
            side.close()
