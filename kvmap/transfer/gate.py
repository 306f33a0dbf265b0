"""A hand-off that is checked before it is used, and the target's own prefill wherever it does not pass.

`gated_transfer` answers `applied`, `fell_back` or `unsupported`, with the reason. Nothing that is wrong
with a source cache or a mapper raises: what comes back is always a context the target is ready to continue.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvmap.causes import CAUSES, Status
from kvmap.errors import KvmapError, UnknownName
from kvmap.files import ArtifactCorrupt, ArtifactMissing
from kvmap.mappers import VERDICTS, Canary, Mapper, MapperMismatch, load_mapper
from kvmap.models.alignment import AlignmentError
from kvmap.models.cache import InvalidCache, KVCache
from kvmap.models.capture import CacheMismatch, prefill
from kvmap.models.geometry import UnsupportedModel
from kvmap.models.pair import LoadedModel
from kvmap.models.storage import load_kv
from kvmap.transfer.canary import canary_kl, is_sampled, n_compared, request_key
from kvmap.transfer.context import Context, TransferError, check_parts, read_context
from kvmap.transfer.gated import Gated
from kvmap.transfer.handoff import HandOff, TransferOptions, native, transfer

_log = logging.getLogger(__name__)

_MISMATCHES = (MapperMismatch, UnsupportedModel, AlignmentError, InvalidCache, CacheMismatch)


@dataclass(frozen=True)
class Gate:
    """What a hand-off must pass to be used.

    Attributes:
        require_verdict: refuse a mapper that no preflight has judged, or that it had not enough evidence of.
        allow: verdicts beside "go" that are let through all the same. A mapper whose verdict is "no_go" or
            "try_mlp" is refused unless that stands here; "not_enough_evidence" is like no verdict.
        canary: what to watch by; None: what the mapper's verdict says, if it says anything. A share of 0
            compares nothing.
        seed: of the draw of requests that are compared.
        max_clamped: mapped numbers beyond the target's dtype (float16) at which a hand-off is still used,
            with these set to the largest that fits. None: any number.
        require_identity: refuse a source cache whose model is not known, or a mapper that does not know which
            models it was fitted for. Shapes alone tell no two checkpoints apart.
    """

    require_verdict: bool = False
    allow: tuple[str, ...] = ()
    canary: Canary | None = None
    seed: int = 0
    max_clamped: int | None = 0
    require_identity: bool = False

    def __post_init__(self) -> None:
        """Refuse what no gate can follow.

        Raises:
            TransferError, UnknownName: naming the option, its value and what is expected.
        """
        if isinstance(self.allow, str):
            raise TransferError(f"allow={self.allow!r}: expected a tuple of verdicts, ({self.allow!r},)")
        for name in self.allow:
            if name not in VERDICTS:
                raise UnknownName("verdict", name, VERDICTS)
        if self.max_clamped is not None and self.max_clamped < 0:
            raise TransferError(f"max_clamped={self.max_clamped}: expected 0 or more, or None for any number")


def gated_transfer(
    source_kv: KVCache | Path,
    mapper: Mapper | Path,
    target: LoadedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    options: TransferOptions | None = None,
    gate: Gate | None = None,
    request: str | None = None,
) -> Gated:
    """Hand a context over if it passes the gate; let the target read it itself if not.

    In this order: both files are whole; verdict; models, shapes and strategy fit; no layer of the source's
    cache is empty; the map is finite and within the target's dtype; on a share of the requests the canary.
    The rows of a batch are one request: they pass together.

    Args:
        source_kv: the source's cache over all columns of `input_ids`, or the file `save_kv` wrote it to.
        mapper: of this pair and strategy, or its folder. A mapper that serves many requests is loaded once.
        target: the model that goes on.
        input_ids: (batch, tokens) the context; attention_mask: (batch, tokens), left padding only, or None.
        options: see `TransferOptions`; None: its defaults.
        gate: what is to be passed; None: its defaults.
        request: a key of this request, by which it is drawn for the canary; None: `request_key` of its ids,
            by which equal contexts are drawn alike.

    Raises:
        TransferError: ids or a mask that are no context.
        UnsupportedModel: a context that the target cannot read itself.
    """
    options, gate = options or TransferOptions(), gate or Gate()
    context = read_context(target, input_ids, attention_mask, options.hold_back)
    attempt = _Attempt(target, context, options, gate, request)
    try:
        hand_off = attempt.mapped(source_kv, mapper)
    except _Refused as refused:
        _log.info("%s: %s", CAUSES[refused.cause], refused)
        return attempt.answer(CAUSES[refused.cause], refused.cause, str(refused), attempt.native())
    return attempt.answer("applied", None, attempt.passed(hand_off), hand_off)


class _Refused(Exception):
    """Why nothing mapped is handed on. It becomes an answer, and is never seen from outside."""

    def __init__(self, cause: str, reason: object) -> None:
        super().__init__(" ".join(str(reason).split()))
        self.cause = cause


@dataclass(eq=False)
class _Attempt:
    """One request on its way through the gate, and what is known of it so far."""

    target: LoadedModel
    context: Context
    options: TransferOptions
    gate: Gate
    request: str | None
    kl: float | None = None
    n_compared: int = 0
    native_seconds: float | None = None
    canary_seconds: float | None = None
    _own: KVCache | None = None

    def __post_init__(self) -> None:
        self._begun = self._now()

    def mapped(self, source_kv: KVCache | Path, mapper: Mapper | Path) -> HandOff:
        """The hand-off that has passed.

        Raises:
            _Refused: for whatever is wrong with the source's cache or the mapper.
        """
        try:
            source_kv, mapper = self._opened(source_kv, mapper)
            self._judge_verdict(mapper)
            self._judge_parts(source_kv, mapper)
            canary = self._canary(mapper)
            hand_off = transfer(
                source_kv,
                mapper,
                self.target,
                self.context.ids,
                self.context.mask,
                every_column=canary is not None,
                **asdict(self.options),
            )
            self._judge_numbers(hand_off)
            if canary is not None:
                self._judge_canary(hand_off, canary)
        except _Refused:
            raise
        except _MISMATCHES as error:
            raise _Refused("mismatch", error) from error
        except TransferError as error:
            raise _Refused("not_finite", error) from error
        except Exception as error:
            # whatever a damaged mapper or cache provokes in torch or a kernel, the request is answered
            _log.warning("a hand-off failed, and the target reads the context itself", exc_info=True)
            raise _Refused("failure", f"{type(error).__name__}: {error}") from error
        return hand_off

    def _opened(self, source_kv: KVCache | Path, mapper: Mapper | Path) -> tuple[KVCache, Mapper]:
        try:
            if isinstance(mapper, Path):
                mapper = load_mapper(mapper, str(self.target.device))[0]
        except (KvmapError, OSError) as error:
            raise _Refused("mapper_file", error) from error
        try:
            if isinstance(source_kv, Path):
                source_kv = load_kv(source_kv)
        except (ArtifactCorrupt, ArtifactMissing, InvalidCache, OSError) as error:
            raise _Refused("cache_file", error) from error
        return source_kv, mapper

    def _judge_verdict(self, mapper: Mapper) -> None:
        verdict = mapper.verdict
        name = "not_enough_evidence" if verdict is None else verdict.verdict
        if name == "go" or name in self.gate.allow:
            return
        if name == "not_enough_evidence" and not self.gate.require_verdict:
            return
        if verdict is None:
            raise _Refused("verdict", "no preflight has judged this mapper, and the gate requires a verdict")
        because = f": {verdict.reasons[0]}" if verdict.reasons else ""
        raise _Refused("verdict", f"the preflight's verdict on this mapper is {verdict.words}{because}")

    def _judge_parts(self, source_kv: KVCache, mapper: Mapper) -> None:
        if self.gate.require_identity and (mapper.fitted_for is None or source_kv.owner is None):
            what = (
                "which models the mapper was fitted for"
                if mapper.fitted_for is None
                else ("which model filled the source cache")
            )
            raise _Refused("unknown_origin", f"it is not known {what}, and the gate requires it")
        try:
            check_parts(source_kv, mapper, self.target, self.context, self.options.rope)
        except TransferError as error:
            raise _Refused("mismatch", error) from error
        if empty := _empty_layers(source_kv):
            raise _Refused(
                "empty_layer",
                f"the source cache holds nothing but zeros at the last token of {', '.join(empty)}: damaged",
            )

    def _judge_numbers(self, hand_off: HandOff) -> None:
        limit = self.gate.max_clamped
        if limit is not None and hand_off.n_clamped > limit:
            raise _Refused(
                "clamped",
                f"{hand_off.n_clamped} mapped numbers do not fit {self.target.dtype}, more than the "
                f"{limit} allowed: run the target in bfloat16",
            )
        if not bool(torch.isfinite(hand_off.logits).all()):
            raise _Refused("not_finite", "the logits after the mapped context are not finite")

    def _canary(self, mapper: Mapper) -> Canary | None:
        """What this request is compared by, if it is."""
        canary = self.gate.canary
        if canary is None and mapper.verdict is not None:
            canary = mapper.verdict.canary
        if canary is None or canary.share == 0:
            return None
        key = self.request if self.request is not None else request_key(self.context)
        return canary if is_sampled(key, canary.share, self.gate.seed) else None

    def _judge_canary(self, hand_off: HandOff, canary: Canary) -> None:
        n_tokens = n_compared(hand_off, self.options.hold_back, canary.n_tokens)
        if n_tokens == 0:
            return
        own = self._own_cache()
        start = self._now()
        self.kl = float(canary_kl(self.target, self.context, hand_off, own, n_tokens).max())
        self.n_compared, self.canary_seconds = n_tokens, self._now() - start
        if not self.kl <= canary.max_kl_nats:
            raise _Refused("canary", f"{self._compared()}, more than the {canary.max_kl_nats:.4g} allowed")

    def native(self) -> HandOff:
        """What the target reads itself, of which a canary has had it read the most already."""
        own = self._own_cache()
        start = self._now()
        context = self.context
        back = native(self.target, context.ids, context.mask, self.options.hold_back, cache=own)
        self.native_seconds = (self.native_seconds or 0.0) + self._now() - start
        return back

    def _own_cache(self) -> KVCache:
        """The target's own prefill, made once."""
        if self._own is None:
            start = self._now()
            self._own = prefill(self.target, self.context.ids, self.context.mask)
            self.native_seconds = self._now() - start
        return self._own

    def passed(self, hand_off: HandOff) -> str:
        """The reason of a hand-off that is applied."""
        if hand_off.n_mapped == 0:
            return "nothing to map: the target reads the context itself"
        told = f"{hand_off.n_mapped} tokens mapped"
        return told if self.kl is None else f"{told}; {self._compared()}"

    def _compared(self) -> str:
        return f"canary: KL {self.kl:.4g} nats from the target's own over the last {self.n_compared} tokens"

    def answer(self, status: Status, cause: str | None, reason: str, hand_off: HandOff) -> Gated:
        """All that is known."""
        others = (self.native_seconds or 0.0) + (self.canary_seconds or 0.0)
        return Gated(
            status,
            cause,
            reason,
            hand_off,
            canary_kl_nats=self.kl,
            n_compared=self.n_compared,
            transfer_seconds=max(self._now() - self._begun - others, 0.0),
            native_seconds=self.native_seconds,
            canary_seconds=self.canary_seconds,
        )

    def _now(self) -> float:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()


def _empty_layers(kv: KVCache) -> list[str]:
    """Layers whose keys or values are 0 throughout in some row's last token, which no model caches.

    One column is read, so that the check costs nothing beside the map. Left padding: the last is no pad.
    """
    names = [f"{kind} of layer {layer}" for kind in ("keys", "values") for layer in range(kv.n_layers)]
    filled = [part[:, :, -1].ne(0).flatten(1).any(-1).all() for part in (*kv.keys, *kv.values)]
    found = torch.stack([one.to(filled[0].device) for one in filled]).tolist()
    return [name for name, is_filled in zip(names, found, strict=True) if not is_filled]
