"""What a preflight found of a mapper, and the canary to watch it by: kept beside the mapper's files."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvmap import __version__
from kvmap.errors import KvmapError, UnknownName
from kvmap.files import sha256_file, write_json
from kvmap.mappers.base import TENSORS_NAME, MapperFileError

FORMAT = "kvmap-verdict"
SCHEMA_VERSION = 1
VERDICT_NAME = "verdict.json"

#: by name, as people read it
VERDICTS = {
    "go": "go",
    "try_mlp": "try mlp",
    "no_go": "no-go",
    "not_enough_evidence": "not enough evidence",
}


class InvalidVerdict(KvmapError):
    """A verdict or a canary that says something no preflight can mean."""


@dataclass(frozen=True)
class Canary:
    """What a mapper is watched by when it serves: `D(native ‖ mapped)` on a share of the requests.

    Attributes:
        max_kl_nats: largest mean KL over the last `n_tokens` of a context at which a hand-off is kept, nats.
        n_tokens: m, how many of the last context tokens are compared, at least 1.
        share: of the requests that are compared, 0 to 1.
    """

    max_kl_nats: float
    n_tokens: int = 8
    share: float = 0.05

    def __post_init__(self) -> None:
        """Refuse what cannot be watched.

        Raises:
            InvalidVerdict: naming the field, its value and what is expected.
        """
        if not self.max_kl_nats >= 0:
            raise InvalidVerdict(f"canary max_kl_nats={self.max_kl_nats}: expected a KL in nats, 0 or more")
        if self.n_tokens < 1:
            raise InvalidVerdict(f"canary n_tokens={self.n_tokens}: expected at least 1 token to compare")
        if not 0 <= self.share <= 1:
            raise InvalidVerdict(f"canary share={self.share}: expected a share of the requests, 0 to 1")


@dataclass(frozen=True)
class Verdict:
    """What a preflight found of one mapper.

    Attributes:
        verdict: one of `VERDICTS`.
        predicted_retention: accuracy mapped / accuracy target, as predicted; None where nothing predicts it.
        low: lower end of its interval.
        high: upper end of its interval.
        min_retention: the retention that was asked for.
        reasons: one line each.
        canary: what it is to be watched by; None: nothing was measured to watch by.
        n_cases: (pair, mapper, seed) cases that the prediction rests on.
        n_pairs: pairs among them.
        measured: the diagnostics by name.
    """

    verdict: str
    predicted_retention: float | None
    low: float | None
    high: float | None
    min_retention: float
    reasons: tuple[str, ...] = ()
    canary: Canary | None = None
    n_cases: int = 0
    n_pairs: int = 0
    measured: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse a verdict of no known name.

        Raises:
            UnknownName: with every name that would have done.
        """
        if self.verdict not in VERDICTS:
            raise UnknownName("verdict", self.verdict, VERDICTS)

    @property
    def words(self) -> str:
        """The verdict as people read it."""
        return VERDICTS[self.verdict]


def attach_verdict(folder: Path, verdict: Verdict) -> None:
    """Write `verdict.json` beside a saved mapper, whole or not at all; one that lies there is replaced.

    It names the sha256 of the mapper's tensors, so that it is refused beside any other mapper, and its own.
    The mapper's key and manifest stay as they are.

    Args:
        folder: of a mapper that `save_mapper` wrote to its end.
        verdict: what was found of this very mapper.

    Raises:
        MapperFileError: no mapper lies there.
    """
    folder = Path(folder)
    tensors = folder / TENSORS_NAME
    if not tensors.is_file():
        raise MapperFileError(f"{tensors} is missing: a verdict lies beside a mapper; save that first")
    record = {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "kvmap_version": __version__,
        "mapper_sha256": sha256_file(tensors),
        "verdict": _worded(asdict(verdict)),
    }
    write_json(folder / VERDICT_NAME, {**record, "checksum": _digest(record)})


def read_verdict(folder: Path, *, mapper_sha256: str | None = None) -> Verdict | None:
    """What `attach_verdict` wrote beside a mapper; None where there is none.

    Args:
        folder: of the mapper.
        mapper_sha256: of its tensors, where that is known already; None: read here.

    Raises:
        MapperFileError: the verdict was cut or changed, or is another mapper's.
    """
    folder = Path(folder)
    path = folder / VERDICT_NAME
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise _damaged(path, f"is not JSON ({error})") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise _damaged(path, f"is not a kvmap verdict (format {FORMAT!r} expected)")
    if record.get("schema_version") != SCHEMA_VERSION:
        raise _damaged(path, f"has schema_version {record.get('schema_version')}, not {SCHEMA_VERSION}")
    if record.pop("checksum", None) != _digest(record):
        raise _damaged(path, "was changed after it was written")
    tensors = folder / TENSORS_NAME
    if not tensors.is_file():
        raise MapperFileError(f"{tensors} is missing: {path} is the verdict of no mapper; fit it again")
    if record["mapper_sha256"] != (mapper_sha256 or sha256_file(tensors)):
        raise _damaged(path, "is the verdict of another mapper than lies there")
    try:
        return _from_record(record["verdict"])
    except (KvmapError, KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"holds no whole verdict ({error})") from error


def _damaged(path: Path, what: str) -> MapperFileError:
    return MapperFileError(f"{path} {what}: remove it, or run the preflight again")


def _from_record(record: Mapping[str, Any]) -> Verdict:
    canary = record["canary"]
    if canary is not None:
        canary = Canary(float(canary["max_kl_nats"]), int(canary["n_tokens"]), float(canary["share"]))
    return Verdict(
        verdict=record["verdict"],
        predicted_retention=_number(record["predicted_retention"]),
        low=_number(record["low"]),
        high=_number(record["high"]),
        min_retention=float(record["min_retention"]),
        reasons=tuple(record["reasons"]),
        canary=canary,
        n_cases=int(record["n_cases"]),
        n_pairs=int(record["n_pairs"]),
        measured={name: float(value) for name, value in record["measured"].items()},
    )


def _number(value: float | str | None) -> float | None:
    return None if value is None else float(value)


def _worded(value: Any) -> Any:
    """As strict JSON can hold it: NaN and infinities as the words that `float` reads back."""
    if isinstance(value, Mapping):
        return {str(key): _worded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_worded(item) for item in value]
    if not isinstance(value, bool | int | float | str) and hasattr(value, "item"):
        value = value.item()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _digest(record: Mapping[str, Any]) -> str:
    """Digest of a record without its own checksum."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
