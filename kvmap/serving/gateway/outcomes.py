"""What engines say of hand-offs, read from their answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvmap.serving.gateway.case import Case
from kvmap.serving.outcome import Outcome, Published, read_outcome, read_published

#: the field they stand in, of a request and of an answer
TRANSFER = "kv_transfer_params"


def note_outcome(body: Mapping[str, Any], case: Case) -> None:
    """Put what an answer, or a stream's event, says of a hand-off where it belongs."""
    note_published(body, case)
    outcome = _sound(read_outcome, body)
    if isinstance(outcome, Outcome):
        case.report.outcome = outcome


def note_published(body: Mapping[str, Any], case: Case) -> Published | None:
    """The same of a publication alone, and what that is; None where nothing is said of one."""
    published = _sound(read_published, body)
    if not isinstance(published, Published):
        return None
    case.report.published = published
    n_tokens = max(published.published, published.output_pending)
    case.session.published(n_tokens, published.bytes, case.asked.mark(), case.report.started)
    return published


def _sound(read: Any, body: Mapping[str, Any]) -> Any:
    """None for an object whose values are not of the kinds they should be: an engine of another version."""
    try:
        said = read(body)
    except TypeError:
        return None
    numbers = (
        [value for name, value in vars(said).items() if name.startswith(("n_", "bytes"))] if said else []
    )
    return said if all(isinstance(number, int) for number in numbers) else None
