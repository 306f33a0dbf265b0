"""The connector that vLLM loads: hands what vLLM calls on to the scheduler's or the worker's side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from kvmap.serving.vllm.messages import Messages, Report
from kvmap.serving.vllm.scheduler_side import SchedulerSide
from kvmap.serving.vllm.settings import read_settings
from kvmap.serving.vllm.worker_side import WorkerSide

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class KvmapConnector(KVConnectorBase_V1):
    """Publishes a source's caches and takes them mapped into a target.

    Caches are taken asynchronously: a request waits beside the running ones while its cache is read, and is
    scheduled when its pages are filled, or when they are given up.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Args: as vLLM gives them."""
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        settings = read_settings(transfer.kv_connector_extra_config, takes=transfer.is_kv_consumer)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(
                vllm_config,
                kv_cache_config,
                settings,
                publishes=transfer.is_kv_producer,
                takes=transfer.is_kv_consumer,
            )
        else:
            self._worker = WorkerSide(vllm_config, kv_cache_config, settings)

    @property
    def requires_kv_delivery(self) -> bool:
        """A publication that a preemption undoes is begun anew; no request is run again for it."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Pages are copied as the forward reaches each layer, which one captured graph would leave out."""
        return True

    @property
    def on_scheduler(self) -> SchedulerSide:
        """The scheduler's side."""
        assert self._scheduler is not None
        return self._scheduler

    @property
    def on_worker(self) -> WorkerSide:
        """The worker's side."""
        assert self._worker is not None
        return self._worker

    @property
    def _messages(self) -> Messages:
        """Of the scheduler side, for this step."""
        messages = self._get_connector_metadata()
        assert isinstance(messages, Messages)
        return messages

    def on_new_request(self, request: Request) -> None:
        """See `SchedulerSide.new_request`."""
        self.on_scheduler.new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See `SchedulerSide.matched`."""
        return self.on_scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """See `SchedulerSide.allocated`."""
        self.on_scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """See `SchedulerSide.messages`."""
        return self.on_scheduler.messages(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """See `SchedulerSide.learn`."""
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, Report):
            self.on_scheduler.learn(report)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See `SchedulerSide.finished`."""
        return self.on_scheduler.finished(request, block_ids)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """See `WorkerSide.start_step`."""
        self.on_worker.start_step(self._messages)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: pages are full before a request is scheduled."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """See `WorkerSide.save_layer`."""
        self.on_worker.save_layer(self._messages, layer_name)

    def wait_for_save(self) -> None:
        """See `WorkerSide.end_step`."""
        self.on_worker.end_step(self._messages)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """See `WorkerSide.finished`."""
        return self.on_worker.finished()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See `WorkerSide.invalid_blocks`."""
        return self.on_worker.invalid_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """See `WorkerSide.report`."""
        return self.on_worker.report()

    def shutdown(self) -> None:
        """Let threads end."""
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()
