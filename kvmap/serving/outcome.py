"""What an engine answers about a hand-off: `applied`, `fell_back` or `unsupported`, why, and how often."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvmap.causes import CAUSES as GATE_CAUSES
from kvmap.causes import Status, Tally

#: why nothing mapped was used, and which status that is: those of `kvmap.causes`, and serving's own
CAUSES: dict[str, Status] = {
    **GATE_CAUSES,
    "request": "unsupported",
    "layout": "unsupported",
    "not_found": "fell_back",
    "partial": "fell_back",
    "timeout": "fell_back",
    "storage": "fell_back",
    "too_short": "fell_back",
}

#: the key of kvmap's object within vLLM's `kv_transfer_params`
FIELD = "kvmap"


@dataclass(frozen=True)
class Outcome:
    """What became of one request to a target. Token counts are of the prompt.

    Attributes:
        outcome: "applied": mapped tokens were used; "unsupported": these parts do not belong together, or
            cannot be served; "fell_back": something was missing or not to be trusted. In the last two cases
            the engine has read the whole prompt itself.
        cause: one of `CAUSES`; None where applied.
        reason: the same in one line for people.
        n_prompt: tokens of the prompt.
        n_mapped: tokens whose cache was mapped.
        n_native_head: first tokens that the target's own layers computed beside the map.
        n_own_prefix: tokens that the engine found in its own prefix cache.
        n_held_back: last tokens, which the engine read itself on top of the rest.
        bytes: read from the source's cache.
        load_seconds: reading and checking it.
        map_seconds: native tokens and layers, map, and writing the pages.
        wait_seconds: for parts that the source had not written yet; earlier ones were read and mapped
            meanwhile.
    """

    outcome: Status
    cause: str | None
    reason: str
    n_prompt: int = 0
    n_mapped: int = 0
    n_native_head: int = 0
    n_own_prefix: int = 0
    n_held_back: int = 0
    bytes: int = 0
    load_seconds: float = 0.0
    map_seconds: float = 0.0
    wait_seconds: float = 0.0

    def record(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)


@dataclass(frozen=True)
class Published:
    """What became of one request to publish the cache of a prompt.

    Attributes:
        published: prompt tokens whose cache lies complete on the storage; 0 where none does.
        bytes: of keys and values that were written; 0 where they lay there already.
        seconds: from the first page copied to the manifest.
        reason: one line, where nothing was published.
        pending: the storage is slow, and the cache may still appear.
        output_pending: prompt and output tokens whose cache is written after this answer.
    """

    published: int
    bytes: int = 0
    seconds: float = 0.0
    reason: str | None = None
    pending: bool = False
    output_pending: int = 0

    def record(self) -> dict[str, Any]:
        """As JSON can hold it; what says nothing is left out."""
        record = asdict(self)
        for name in ("reason", "pending", "output_pending"):
            if not record[name]:
                del record[name]
        return record


def refused(cause: str, reason: object, **counts: Any) -> Outcome:
    """The outcome of a request that was not served by a mapped cache.

    Args:
        cause: one of `CAUSES`.
        reason: for people; put on one line.
        counts: other fields of `Outcome`.
    """
    return Outcome(CAUSES[cause], cause, " ".join(str(reason).split()), **counts)


def read_outcome(body: Mapping[str, Any]) -> Outcome | None:
    """The outcome in a response body, or in the extra event of a stream; None where there is none."""
    record = _object(body)
    if record is None or record.get("outcome") not in ("applied", "fell_back", "unsupported"):
        return None
    known = {name: record[name] for name in Outcome.__dataclass_fields__ if name in record}
    return Outcome(**{"cause": None, "reason": "", **known})


def read_published(body: Mapping[str, Any]) -> Published | None:
    """What a response body says of a publication; None where it says nothing."""
    record = _object(body)
    if record is None or not isinstance(record.get("published"), int):
        return None
    return Published(**{name: record[name] for name in Published.__dataclass_fields__ if name in record})


def _object(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    outer = body.get("kv_transfer_params")
    inner = outer.get(FIELD) if isinstance(outer, Mapping) else None
    return inner if isinstance(inner, Mapping) else None


@dataclass
class OutcomeCounts(Tally):
    """What was answered so far, by a target and by a source; may be shared by threads.

    Attributes:
        mapped_tokens: of the requests that were applied.
        published: requests whose cache was published.
        published_tokens: tokens of theirs.
    """

    mapped_tokens: int = 0
    published: int = 0
    published_tokens: int = 0

    def add(self, outcome: Outcome) -> None:
        """Count one answer of a target."""
        with self._lock:
            self._count(outcome.outcome, outcome.cause)
            self.mapped_tokens += outcome.n_mapped

    def add_published(self, published: Published) -> None:
        """Count one answer of a source."""
        with self._lock:
            self.published += published.published > 0
            self.published_tokens += published.published

    def record(self) -> dict[str, Any]:
        """As JSON can hold it."""
        with self._lock:
            return {
                **self._counted(),
                "mapped_tokens": self.mapped_tokens,
                "published": self.published,
                "published_tokens": self.published_tokens,
            }
