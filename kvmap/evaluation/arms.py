"""What is compared: the target on its own cache, on a mapped one, on controls; and the source alone.

| arm | what continues | from |
|---|---|---|
| `target` | target | its own cache: the ceiling |
| `source` | source | its own cache: what one had |
| `mapped` | target | the source's cache through the mapper |
| `bias_only`, `raw`, `random` | target | the source's cache through a control's mapper |
| `own_keys`, `own_values` | target | the mapped cache, but all keys, or all values, the target's own |
| `no_context` | target | nothing but the held-back tokens (after BOS, where the tokenizer adds it) |

Any other name may be given with a mapper of its own. The source reads each batch once, whatever the arms.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from kvmap.data import prompt_prefix
from kvmap.errors import KvmapError
from kvmap.evaluation.encoding import left_pad
from kvmap.evaluation.stopwatch import SOURCE_PREFILL, Stopwatch
from kvmap.files import load_tensors, save_tensors
from kvmap.mappers import Mapper
from kvmap.models.cache import KVCache
from kvmap.models.capture import prefill
from kvmap.models.pair import LoadedModel, ModelIdentity, ModelPair
from kvmap.models.storage import load_kv, save_kv
from kvmap.transfer import HandOff, OwnKind, TransferOptions, native, transfer

ARMS = ("target", "source", "mapped", "bias_only", "raw", "random", "own_keys", "own_values", "no_context")
ORACLES: Mapping[str, OwnKind] = {"own_keys": "key", "own_values": "value"}
"""Arms on the run's own map, with what of it is replaced by the target's own."""
MAPPERLESS = ("target", "source", "no_context")

_logger = logging.getLogger(__name__)

CACHE_FILE = "cache.safetensors"

Arms: TypeAlias = Mapping[str, Mapper | KvmapError | None]
"""Arm to its mapper; None for `MAPPERLESS`; an error where the arm cannot be had for this pair."""

Progress: TypeAlias = Callable[[Iterable[Any], int | None, str], Iterable[Any]]


@dataclass(frozen=True, eq=False)
class Batch:
    """Contexts of several items or sequences, padded on the left.

    Attributes:
        index: which items or sequences, in the order of the rows.
        input_ids: (batch, tokens) int64.
        attention_mask: (batch, tokens) bool, True at real tokens.
    """

    index: tuple[int, ...]
    input_ids: Tensor
    attention_mask: Tensor

    def rows(self) -> list[list[int]]:
        """The token ids of each row, without padding."""
        return [ids[mask].tolist() for ids, mask in zip(self.input_ids, self.attention_mask, strict=True)]


@dataclass(frozen=True, eq=False)
class SourcePart:
    """What the source leaves behind for one batch.

    Attributes:
        cache: its cache of the contexts; None where no arm maps it.
        stream: what the source arm is to be compared with the target by, chunk by chunk, made as it is read.
    """

    cache: KVCache | None
    stream: Iterable[dict[str, Tensor]] = ()


def check_arms(arms: Arms) -> None:
    """Refuses an arm that has no mapper and needs one.

    Raises:
        KvmapError: names the arm.
    """
    for arm, mapper in arms.items():
        if mapper is None and arm not in MAPPERLESS:
            raise KvmapError(
                f"arm {arm!r} has no mapper: expected one, or the error that says why there is none. "
                f"Arms without a mapper: {', '.join(MAPPERLESS)}"
            )
        if isinstance(mapper, Mapper) and arm in MAPPERLESS:
            raise KvmapError(f"arm {arm!r} takes no mapper, got {mapper.kind!r}; give the arm another name")


def available(arms: Arms) -> dict[str, Mapper | None]:
    """The arms that can be run."""
    return {arm: mapper for arm, mapper in arms.items() if not isinstance(mapper, KvmapError)}


def unavailable(arms: Arms) -> dict[str, str]:
    """The arms that cannot, each with the reason; they belong into the results too."""
    return {arm: str(mapper) for arm, mapper in arms.items() if isinstance(mapper, KvmapError)}


def batches_of(contexts: Sequence[Sequence[int]], batch_size: int, pad_id: int) -> list[Batch]:
    """Contexts of like length together, the longest first: little is padding, and memory fails early."""
    if batch_size < 1:
        raise KvmapError(f"batch_size={batch_size}: expected at least 1")
    order = sorted(range(len(contexts)), key=lambda index: -len(contexts[index]))
    batches = []
    for start in range(0, len(order), batch_size):
        index = tuple(order[start : start + batch_size])
        batches.append(Batch(index, *left_pad([contexts[row] for row in index], pad_id)))
    return batches


def tokenizer_of(pair: ModelPair) -> Any:
    """The pair's one tokenizer.

    Raises:
        KvmapError: both models were given in memory without one.
    """
    if pair.tokenizer is None:
        raise KvmapError(
            "the pair has no tokenizer: give it to LoadedModel.from_model(model, tokenizer), or name a spec"
        )
    return pair.tokenizer


def pad_id_of(tokenizer: Any) -> int:
    """An id for padded columns; masked everywhere, so any id does where the tokenizer has none for it."""
    for special in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if special is not None:
            return int(special)
    return 0


def placed(arms: Mapping[str, Mapper | None], target: LoadedModel) -> dict[str, Mapper | None]:
    """The arms with their mappers on the target's device."""
    return {
        arm: mapper if mapper is None or mapper.device in (None, target.device) else mapper.to(target.device)
        for arm, mapper in arms.items()
    }


def check_something_maps(
    arms: Mapping[str, Mapper | None], context_lengths: Iterable[int], options: TransferOptions
) -> None:
    """Refuses arms that would map not one token of any context, and so silently equal the target.

    Contexts of which some are that short are fine: results say how many tokens were mapped of each.

    Args:
        arms: the arms that can be run.
        context_lengths: tokens of every context.
        options: how a cache is transferred.

    Raises:
        KvmapError: names the arms, the options and the longest context.
    """
    mapped = [arm for arm, mapper in arms.items() if mapper is not None]
    longest = max(context_lengths, default=0)
    kept = options.native_head + options.hold_back
    if mapped and longest <= kept:
        raise KvmapError(
            f"native_head={options.native_head} and hold_back={options.hold_back} cover every context (the "
            f"longest has {longest} tokens): {', '.join(mapped)} would map nothing and equal the target. "
            "Lower them, or give longer contexts"
        )


def read_source(
    source: LoadedModel,
    batch: Batch,
    arms: Mapping[str, Mapper | None],
    options: TransferOptions,
    watch: Stopwatch | None = None,
) -> tuple[KVCache | None, HandOff | None]:
    """One prefill of the source, whatever the arms.

    Args:
        source: the model.
        batch: what it reads.
        arms: the arms that are asked.
        options: how a cache is transferred.
        watch: takes the time of the prefill, and apart from it that of the arm `source`.

    Returns:
        Its cache, shared by all arms that map it; None where none does. And the source alone on that same
        cache; None without the arm `source`.
    """
    watch = watch or Stopwatch()
    with watch.lap(SOURCE_PREFILL, source, batch.index):
        cache = prefill(source, batch.input_ids, batch.attention_mask)
    own = None
    if "source" in arms:
        with watch.lap("source", source, batch.index):
            own = native(
                source, batch.input_ids, batch.attention_mask, hold_back=options.hold_back, cache=cache
            )
    maps = any(mapper is not None for mapper in arms.values())
    return (cache if maps else None), own


def target_hand_offs(
    target: LoadedModel,
    tokenizer: Any,
    batch: Batch,
    arms: Mapping[str, Mapper | None],
    cache: KVCache | None,
    options: TransferOptions,
) -> Iterator[tuple[str, HandOff]]:
    """The target's hand-off for each arm but `source`, made one by one as they are asked for."""
    for arm, mapper in arms.items():
        if arm == "source":
            continue
        if mapper is not None:
            yield arm, _transferred(target, batch, arm, mapper, cache, options)
            continue
        seen = without_context(batch, tokenizer, options.hold_back) if arm == "no_context" else batch
        yield arm, native(target, seen.input_ids, seen.attention_mask, hold_back=options.hold_back)


def _transferred(
    target: LoadedModel,
    batch: Batch,
    arm: str,
    mapper: Mapper,
    cache: KVCache | None,
    options: TransferOptions,
) -> HandOff:
    if cache is None:
        raise KvmapError(f"arm {arm!r} maps the source's cache, and there is none for this batch")
    hand_off = transfer(
        cache,
        mapper,
        target,
        batch.input_ids,
        batch.attention_mask,
        own_kind=ORACLES.get(arm),
        every_column=True,  # what is handed on may be mapped again
        **asdict(options),
    )
    if hand_off.n_clamped:
        _logger.warning(
            "arm %s: %d mapped numbers did not fit %s and were clamped; run the target in bfloat16",
            arm,
            hand_off.n_clamped,
            target.dtype,
        )
    return hand_off


def without_context(batch: Batch, tokenizer: Any, hold_back: int) -> Batch:
    """The last `hold_back` tokens of each context alone, after BOS where the tokenizer adds it.

    These are the tokens that a mapped arm's target reads itself; what is left out is what was mapped.
    """
    prefix = prompt_prefix(tokenizer)
    rows = []
    for ids in batch.rows():
        tail = ids[-hold_back:]
        rows.append(tail if tail[:1] == prefix else prefix + tail)
    return Batch(batch.index, *left_pad(rows, pad_id_of(tokenizer)))


def run_passes(
    pair: ModelPair,
    batches: Sequence[Batch],
    arms: Mapping[str, Mapper | None],
    source_pass: Callable[[Batch], SourcePart],
    target_pass: Callable[[Batch, SourcePart], None],
    *,
    sequential: bool,
    progress: Progress,
    description: str,
) -> None:
    """Runs both models over all batches, side by side or one after the other.

    Side by side, both models are in memory and a batch is done before the next begins. Sequential, the
    source reads all batches first and is released; its caches lie in a temporary folder until the target,
    alone in memory then, asks for them. The numbers are the same.

    Args:
        pair: the models.
        batches: what to read.
        arms: the arms that can be run.
        source_pass: what to do with the source; called only if an arm needs it.
        target_pass: what to do with the target and what the source left.
        sequential: one model in memory at a time.
        progress: wraps the loop.
        description: what is being done.
    """
    needs_source = "source" in arms or any(mapper is not None for mapper in arms.values())
    needs_target = set(arms) != {"source"}
    if not sequential:
        for batch in progress(batches, len(batches), description):
            part = source_pass(batch) if needs_source else SourcePart(None)
            if needs_target:
                target_pass(batch, part)
        return
    with tempfile.TemporaryDirectory(prefix="kvmap-") as folder:
        parts: list[SpilledPart] = []
        if needs_source:
            pair.release("target")
            for number, batch in enumerate(progress(batches, len(batches), f"{description} (source)")):
                parts.append(SpilledPart.write(source_pass(batch), Path(folder) / str(number)))
            pair.release("source")
        if not needs_target:
            return
        for number, batch in enumerate(progress(batches, len(batches), f"{description} (target)")):
            target_pass(batch, parts[number].read() if needs_source else SourcePart(None))


@dataclass(frozen=True, eq=False)
class SpilledPart:
    """A source part on disk.

    Attributes:
        folder: where the files are; each is deleted as it is read.
        has_cache: whether there was a cache.
        owner: whose cache it is, which its file does not say.
        n_stream: chunks of the stream.
    """

    folder: Path
    has_cache: bool
    owner: ModelIdentity | None
    n_stream: int

    @classmethod
    def write(cls, part: SourcePart, folder: Path) -> SpilledPart:
        """Writes a part and lets go of its tensors."""
        folder.mkdir()
        if part.cache is not None:
            save_kv(part.cache, folder / CACHE_FILE)
        n_stream = 0
        for chunk in part.stream:
            save_tensors(folder / f"{n_stream}.safetensors", chunk)
            n_stream += 1
        return cls(folder, part.cache is not None, None if part.cache is None else part.cache.owner, n_stream)

    def read(self) -> SourcePart:
        """The part again, on the CPU; the stream is read as it is consumed."""
        cache = None
        if self.has_cache:
            cache = replace(load_kv(self.folder / CACHE_FILE), owner=self.owner)
            (self.folder / CACHE_FILE).unlink()
        return SourcePart(cache, self._stream())

    def _stream(self) -> Iterator[dict[str, Tensor]]:
        for number in range(self.n_stream):
            file = self.folder / f"{number}.safetensors"
            yield load_tensors(file)
            file.unlink()
