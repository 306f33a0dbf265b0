"""The model that lm-eval knows as `kvmap`: a subclass of its Hugging Face model, answering from a pool."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from kvmap.errors import KvmapError
from kvmap.evaluation.answers import Answers, canonical_hash
from kvmap.evaluation.choices import cut_at
from kvmap.harness.arguments import pool_from_arguments, usable_device, whole_number
from kvmap.harness.facts import Facts, Origin, check_tasks_map
from kvmap.harness.pool import Pool
from kvmap.harness.requests import Generate, Score, generation_settings
from kvmap.harness.windows import rolling_windows
from kvmap.models.geometry import Geometry
from kvmap.models.pair import ModelPair

CACHE_MARK = "kvmap conditions"

_logger = logging.getLogger(__name__)


class _ModelCard:
    """What lm-eval's Hugging Face model asks of a model that it does not run itself: no weights are read."""

    def __init__(self, geometry: Geometry, name: str) -> None:
        self.config = SimpleNamespace(model_type=geometry.model_type, _name_or_path=name)
        self.name_or_path, self.device = name, torch.device("cpu")


@register_model("kvmap")
class KvmapLM(HFLM):
    """One arm of a pool: `lm_eval --model kvmap --model_args mapper=<folder>,arm=mapped,...`.

    Requests with one context, in whatever order they come, share one prefill of the source and one map. Both
    models read the same ids, cut on the left to what both take; how many requests that concerned is logged,
    and stands in the results' `config`.

    Attributes:
        pool: the models and what was answered so far.
        arm: what this one is.
        facts: per task and document, what was read, cut off and mapped.
    """

    def __init__(
        self,
        pool: Pool | None = None,
        arm: str = "mapped",
        *,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        rolling_context: int = 1,
        answers: str | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        chat_template_args: dict[str, Any] | None = None,
        enable_thinking: bool | None = None,
        think_end_token: str | int | None = None,
        trust_remote_code: bool | None = None,
        device: str | None = None,
        **arguments: Any,
    ) -> None:
        """Args:
            pool: shared with other arms; None: made of `arguments`.
            arm: one of `kvmap.evaluation.arms.ARMS`.
            batch_size: contexts at a time; None: 1. A pool that is given has its own, as it has its own
                `max_length` and `device`.
            max_batch_size: lm-eval's, of `batch_size=auto`, which there is not.
            max_length: tokens of context and continuation at most; None: what both models take.
            rolling_context: tokens that are read, and mapped, before each rolling window.
            answers: folder in which answers are kept, so that an interrupted evaluation goes on.
            add_bos_token, prefix_token_id, chat_template_args, enable_thinking, think_end_token: as for `hf`.
            trust_remote_code: of data sets; no model's code is ever run.
            device: of both models; None: a GPU if there is one.
            arguments: see `kvmap.harness.arguments.pool_from_arguments`.

        Raises:
            KvmapError: naming the argument, its value, what is expected and the remedy.
        """
        if pool is None:
            size = 1 if batch_size is None else whole_number("batch_size", batch_size)
            limit = None if max_length is None else whole_number("max_length", max_length, 2)
            arguments["device"] = usable_device(device)
            pool = pool_from_arguments(arm, batch_size=size, max_tokens=limit, **arguments)
        else:
            _check_none_given(arguments, batch_size=batch_size, max_length=max_length, device=device)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise KvmapError(
                f"WORLD_SIZE={os.environ['WORLD_SIZE']}: kvmap answers in one process; start it without a "
                "launcher, and spread a large model over several GPUs with device_map=auto"
            )
        if arm not in pool.arms:
            raise KvmapError(f"arm={arm!r}: expected one of those in the pool, {', '.join(pool.arms)}")
        self.pool, self.arm, self.facts = pool, arm, dict[Origin, Facts]()
        self.rolling_context = whole_number("rolling_context", rolling_context)
        if self.rolling_context >= pool.limit:
            raise KvmapError(f"rolling_context={rolling_context}: expected less than max_length={pool.limit}")
        self._asked: Sequence[Instance] | None = None
        self._truncated: Counter[str] = Counter()
        if answers is not None:
            pool.keep_answers(arm, Answers.open(Path(answers), pool.conditions(arm)))
        with _quiet("lm_eval.models.huggingface"):
            super().__init__(
                pretrained=_card(pool.pair, arm),
                backend="causal",
                tokenizer=pool.tokenizer,
                max_length=pool.limit,
                batch_size=pool.batch_size,
                add_bos_token=add_bos_token,
                prefix_token_id=prefix_token_id,
                chat_template_args=chat_template_args,
                enable_thinking=enable_thinking,
                think_end_token=think_end_token,
            )

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether greedy decoding would write it."""
        with self._answering(requests):
            answers: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
            return answers

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """The same of (texts, context ids, continuation ids); lm-eval has encoded them jointly.

        As in lm-eval, the last token is scored and not read: of context and continuation together, the last
        `max_length` + 1 are kept.
        """
        asked, cut = [], []
        for texts, context, continuation in requests:
            if not continuation:
                raise KvmapError(f"a continuation without a token: {texts}; leave the task or this item out")
            kept, n_cut = self._cut(context, self.max_length + 1 - len(continuation), len(continuation))
            asked.append(Score(kept, tuple(continuation)))
            cut.append(n_cut)
        if self._asked is not None and len(self._asked) == len(asked):
            self._check_maps(self._asked, asked)
        rows = self.pool.scores(self.arm, asked)
        self._record(asked, cut, rows)
        answers = [(row["loglikelihood"], row["greedy"]) for row in rows]
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts; each token is scored once, in windows of `max_length`.

        With `rolling_context` = 1, lm-eval's own windows, a window follows a single token, and there is
        nothing to map but before the last one: the mapped arm is then all but the target's own. With c > 1
        every window but the first, of c tokens, is scored from the cache of the c tokens before it.
        """
        asked: list[Score] = []
        of_text: list[int] = []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            windows = rolling_windows(ids, self.prefix_token_id, self.max_length, self.rolling_context)
            asked += [Score(tuple(context), tuple(scored)) for context, scored in windows]
            of_text += [number] * (len(asked) - len(of_text))
        rows = self.pool.scores(self.arm, asked)
        sums = [0.0] * len(requests)
        for number, window, row in zip(of_text, asked, rows, strict=True):
            sums[number] += row["loglikelihood"]
            self._facts(requests[number]).add_window(len(window.context), row["n_mapped"])
        if self.pool.arms[self.arm] is not None and not any(row["n_mapped"] for row in rows):
            _logger.warning(
                "arm %s: no rolling window has a context to map, so these numbers are the target's own; set "
                "rolling_context above native_head + hold_back",
                self.arm,
            )
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy answers, each cut at its own stops, as if it had been asked alone."""
        asked, cut = [], []
        eos = self.tok_decode([self.eot_token_id], skip_special_tokens=False)
        for request in requests:
            text, settings = request.args
            stops, n_new, penalty = generation_settings(settings, request.task_name)
            ids = self.tok_batch_encode([text], truncation=self.truncation)[0][0].tolist()
            kept, n_cut = self._cut(ids or [self.prefix_token_id], self.max_length - n_new, n_new)
            asked.append(Generate(kept, (*stops, eos), n_new, penalty))
            cut.append(n_cut)
        self._check_maps(requests, asked)
        rows = self.pool.generations(self.arm, asked)
        with self._answering(requests):
            self._record(asked, cut, rows)
        answers = [self._text(row["ids"], question.stop) for row, question in zip(rows, asked, strict=True)]
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, answer)
        return answers

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Take lm-eval's response cache (`--use_cache`) if it is this model's own.

        lm-eval looks answers up by the request alone. The first `kvmap` that uses a file leaves in it what
        determines its answers; a file of other models, another mapper, arm or options is refused.

        Raises:
            KvmapError: such a file.
        """
        if cache_hook.dbdict is not None:
            own = canonical_hash(self.pool.conditions(self.arm) | {"texts": self._text_conditions()})
            mark = cache_hook.dbdict.get(CACHE_MARK)
            if mark is None and len(cache_hook.dbdict) == 0:
                cache_hook.dbdict[CACHE_MARK] = own
            elif mark != own:
                raise KvmapError(
                    f"--use_cache: {cache_hook.dbdict.filename} holds answers of other models, or of another "
                    f"mapper, arm or options than arm={self.arm}; name another file"
                )
        super().set_cache_hook(cache_hook)

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval's results say of the model: who answered, from what, and what was cut off."""
        mapper = self.pool.arms[self.arm]
        conditions = self.pool.conditions(self.arm)
        return {
            "model_dtype": self.pool.pair.target_identity.dtype,
            "kvmap": {
                "arm": self.arm,
                "source": self.pool.pair.source_identity.name,
                "target": self.pool.pair.target_identity.name,
                "mapper": None if mapper is None else mapper.kind,
                "conditions": conditions,
                "max_length": self.max_length,
                "rolling_context": self.rolling_context,
                "n_truncated_requests": dict(self._truncated),
                "n_contexts": self.pool.reading.n_contexts,
                "n_source_prefills": self.pool.reading.n_source,
            },
        }

    def _text_conditions(self) -> dict[str, Any]:
        """How texts become ids and ids texts, which the pool does not know."""
        names = ("max_length", "rolling_context", "add_bos_token", "prefix_token_id", "think_end_token")
        return {name: getattr(self, name) for name in names}

    def _cut(self, ids: Sequence[int], room: int, n_after: int) -> tuple[tuple[int, ...], int]:
        """The last ids that there is room for, and how many had to go."""
        if room < 1:
            raise KvmapError(
                f"a continuation of {n_after} tokens leaves no room for a context in max_length="
                f"{self.max_length}, which is what both models take: ask for fewer, or leave the task out"
            )
        n_cut = max(0, len(ids) - room)
        return tuple(ids[n_cut:]), n_cut

    @contextmanager
    def _answering(self, requests: Sequence[Instance]) -> Iterator[None]:
        """Knows for a while which documents requests belong to, which lm-eval does not pass on."""
        self._asked = requests
        try:
            yield
        finally:
            self._asked = None

    def _check_maps(self, requests: Sequence[Instance], asked: Sequence[Score | Generate]) -> None:
        """Refuse tasks that would map nothing. lm-eval's response cache may hold answers of their longer
        contexts, which are then not among these: beside one that holds any it is only said.
        """
        try:
            check_tasks_map(requests, asked, self.pool.arms, self.pool.options)
        except KvmapError as error:
            kept = self.cache_hook.dbdict
            if kept is None or len(kept) < 2:  # the first entry is `CACHE_MARK`
                raise
            _logger.warning("%s", error)

    def _record(
        self, asked: Sequence[Score | Generate], cut: Sequence[int], rows: Sequence[Mapping[str, Any]]
    ) -> None:
        """Note what was read, cut and mapped, and say what was cut."""
        if self._asked is None or len(self._asked) != len(asked):
            return
        before = self._truncated.copy()
        for request, question, n_cut, row in zip(self._asked, asked, cut, rows, strict=True):
            self._facts(request).add_request(len(question.context), n_cut, row["n_mapped"])
            self._truncated[str(request.task_name)] += n_cut > 0
        for task, n in self._truncated.items():
            if n > before[task]:
                _logger.warning(
                    "%s: %d requests are longer than the %d tokens both models take, and were cut on the "
                    "left, the same for every arm",
                    task,
                    n - before[task],
                    self.max_length,
                )

    def _facts(self, request: Instance) -> Facts:
        """Of the document that a request belongs to; of nobody's where it stands alone."""
        if request.task_name is None or request.doc_id is None:
            return Facts()
        return self.facts.setdefault((request.task_name, request.doc_id), Facts())

    def _text(self, ids: list[int], stops: Sequence[str]) -> str:
        """Generated ids as text: after the end of thinking where one is set, and up to the first stop."""
        end = self.think_end_token
        if isinstance(end, int) and end in ids:
            text = self.tok_decode(ids[len(ids) - ids[::-1].index(end) :]).lstrip()
        else:
            text = self.tok_decode(ids)
        if isinstance(end, str) and end:
            text = text.split(end)[-1].lstrip()
        return cut_at(text, stops)


def _check_none_given(arguments: Mapping[str, Any], **named: Any) -> None:
    """Refuse what a pool has settled, and would otherwise be passed over in silence."""
    given = [*arguments, *(name for name, value in named.items() if value is not None)]
    if given:
        raise KvmapError(
            f"{', '.join(given)}: a pool is given, which has its models and options; set them on the "
            "pool, or give no pool"
        )


def _card(pair: ModelPair, arm: str) -> _ModelCard:
    if arm == "source":
        return _ModelCard(pair.source_geometry, pair.source_identity.name)
    return _ModelCard(pair.target_geometry, pair.target_identity.name)


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Without the warnings of a logger: that a model is given ready-made is no news here."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
