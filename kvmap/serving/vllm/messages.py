"""What scheduler side and worker side tell one another. All of it can be sent to another process."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvmap.serving.manifest import Manifest


@dataclass(frozen=True, eq=False)
class Take:
    """Map a cache into a request's pages.

    Attributes:
        request_id: whose.
        manifest: of the cache, which may still be being written.
        token_ids: the first tokens of the prompt, as many as are filled in all.
        n_own: of these, tokens that the engine holds itself, full pages.
        block_ids: the request's pages.
        wait_seconds: for parts of it that are not written yet.
    """

    request_id: str
    manifest: Manifest
    token_ids: tuple[int, ...]
    n_own: int
    block_ids: tuple[int, ...]
    wait_seconds: float


@dataclass(frozen=True, eq=False)
class Publish:
    """Write what the pages of a request hold of some tokens.

    Attributes:
        request_id: whose.
        group: of the store, one for each attempt.
        start, stop: tokens; written when this step's forward has cached them.
        block_ids: the request's pages.
        token_ids: of the whole cache, where this is its last run; else None.
        namespace: of the whole cache.
        after_end: the request is over: its pages are read at once, and then given back.
    """

    request_id: str
    group: str
    start: int
    stop: int
    block_ids: tuple[int, ...]
    token_ids: tuple[int, ...] | None
    namespace: str
    after_end: bool = False


@dataclass(eq=False)
class Messages(KVConnectorMetadata):
    """To the worker, once a step.

    Attributes:
        is_idle: nothing is computed in this step.
    """

    is_idle: bool = False
    takes: list[Take] = field(default_factory=list)
    given_up_takes: list[str] = field(default_factory=list)
    publishes: list[Publish] = field(default_factory=list)
    dropped_groups: list[str] = field(default_factory=list)


class Outbox:
    """What the scheduler side has for the worker until the step goes out."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.messages = Messages()

    def taken(self) -> Messages:
        """What there is; then there is nothing."""
        messages, self.messages = self.messages, Messages()
        return messages


@dataclass(frozen=True)
class Taken:
    """What became of one `Take`.

    Attributes:
        cause: one of `kvmap.serving.outcome.CAUSES`; None where the pages are filled.
        reason: one line.
        n_mapped, n_native_head: tokens.
        bytes: read.
        load_seconds, map_seconds, wait_seconds: see `Outcome`.
    """

    cause: str | None
    reason: str
    n_mapped: int = 0
    n_native_head: int = 0
    bytes: int = 0
    load_seconds: float = 0.0
    map_seconds: float = 0.0
    wait_seconds: float = 0.0


@dataclass(eq=False)
class Report(KVConnectorWorkerMetadata):
    """From the worker, once a step.

    Attributes:
        taken: by request.
        failed_groups: of publications that came to nothing, and why.
    """

    taken: dict[str, Taken] = field(default_factory=dict)
    failed_groups: dict[str, str] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """With that of another worker."""
        assert isinstance(other, Report)
        return Report(self.taken | other.taken, self.failed_groups | other.failed_groups)
