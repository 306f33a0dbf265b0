"""Whether two tokenizers are the same, judged by the ids they give."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from kvmap.errors import KvmapError

#: Texts whose ids must agree: several scripts, digits, white space, code, punctuation, emoji, odd joins.
PROBES: tuple[str, ...] = (
    "",
    "Hello, world!",
    " leading and trailing space ",
    "The quick brown fox jumps over the lazy dog; it didn't stop.",
    "unbelievable internationalisation antidisestablishmentarianism lowercase UPPERCASE CamelCase",
    "0 1 12 123 1234 12345 3.14159 1,000,000 2026-11-29 0x7fff 1e-05",
    "a\tb\n\n\nc\r\nd    e  f",
    "def f(x):\n    return [i**2 for i in range(x) if i % 2 == 0]  # even\n",
    '{"key": [1, 2.5, null], "other": "va\\"lue"}',
    "https://example.org/path?query=1&other=two#part user@example.org",
    "Zażółć gęślą jaźń; Größe, naïve, Œuvre, İstanbul, ﬁn",
    "Съешь же ещё этих мягких французских булок",
    "Η γρήγορη καφέ αλεπού",
    "敏捷的棕色狐狸跳过懒狗。日本語のテキスト、カタカナ。 한국어 문장",
    "الثعلب البني السريع שועל חום מהיר",
    "तेज़ भूरी लोमड़ी ไทยไม่มีเว้นวรรค",
    "👩‍👩‍👧 🏳️‍🌈 e\u0301 \u00a0nbsp \u200bzero",
    "!!! ??? ... --- ### (((x))) <<>> $$ %% && ||",
    "<s> </s> <|endoftext|> <|im_start|>user\nhi<|im_end|> [INST] <pad>",
)
_SPECIALS = ("bos_token_id", "eos_token_id", "unk_token_id")


class TokenizerMismatch(KvmapError):
    """Two models that do not read the same ids for the same text, so no position of one cache fits the
    other's.
    """


def check_tokenizers(source: Any, target: Any) -> None:
    """Refuse a pair of tokenizers that differ in any id.

    Compared are the vocabulary (token to id), the ids of BOS, EOS and UNK, the ids of every probe with and
    without special tokens (which shows BOS behaviour), and the merges. Padding is not compared, nor the
    padded vocabulary size of the models: rows of an embedding that no token reaches say nothing.

    Args:
        source: the source model's tokenizer.
        target: the target model's.

    Raises:
        TokenizerMismatch: with the first differing token, special id or probe, and what either made of it.
    """
    if source is target:
        return
    _check_vocabulary(source.get_vocab(), target.get_vocab())
    for name in _SPECIALS:
        ours, theirs = getattr(source, name), getattr(target, name)
        if ours != theirs:
            raise TokenizerMismatch(_message(f"{name} is {ours} for the source and {theirs} for the target"))
    _check_probes(source, target, PROBES)
    _check_merges(source, target)


def _message(difference: str) -> str:
    return (
        f"the tokenizers differ: {difference}. A cache can be transferred only between models that read the "
        "same ids; choose two models of one tokenizer, or set pair.alignment=spans, which is experimental "
        "(docs/other_tokenizers.md)"
    )


def _check_vocabulary(source: dict[str, int], target: dict[str, int]) -> None:
    if source == target:
        return
    differing = {token for token, _ in set(source.items()) ^ set(target.items())}
    token = min(differing, key=lambda text: (min(v[text] for v in (source, target) if text in v), text))
    raise TokenizerMismatch(
        _message(
            f"{len(differing)} tokens have different ids, the first is {token!r}: "
            f"{source.get(token, 'absent')} for the source, {target.get(token, 'absent')} for the target"
        )
    )


def _check_probes(source: Any, target: Any, probes: Iterable[str], why: str = "") -> None:
    for probe in probes:
        for special in (True, False):
            ours = source(probe, add_special_tokens=special)["input_ids"]
            theirs = target(probe, add_special_tokens=special)["input_ids"]
            if ours != theirs:
                kind = "with" if special else "without"
                raise TokenizerMismatch(
                    _message(
                        f"{why}{probe!r} {kind} special tokens is {_around(ours, theirs)} for the source and "
                        f"{_around(theirs, ours)} for the target"
                    )
                )


def _around(ids: list[int], other: list[int], shown: int = 6) -> str:
    """The ids from shortly before the first difference on."""
    first = next(
        (i for i, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), min(len(ids), len(other))
    )
    start = max(first - 1, 0)
    dots = "... " if start else ""
    more = ", ..." if len(ids) > start + shown else ""
    return f"[{dots}{', '.join(map(str, ids[start : start + shown]))}{more}]"


def _merges(tokenizer: Any) -> list[tuple[str, str]] | None:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    merges = json.loads(backend.to_str())["model"].get("merges")
    if merges is None:
        return None
    pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in merges)
    return [(left, right) for left, right in pairs]


def _check_merges(source: Any, target: Any) -> None:
    """Merges must agree one by one: fixed probes cannot reach each of a hundred thousand."""
    ours, theirs = _merges(source), _merges(target)
    if ours == theirs:
        return
    if ours is None or theirs is None:
        raise TokenizerMismatch(_message("one has merges, the other has none"))
    pairs = zip(ours, theirs, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    disputed = [merges[first] for merges in (ours, theirs) if first < len(merges)]
    why = f"merge {first} is " + " and ".join(" + ".join(map(repr, merge)) for merge in disputed) + "; "
    # either product alone, and the texts in which the two merges want the same symbol
    joins = ["".join(merge) for merge in disputed]
    joins += ["".join(a) + b[1] for a in disputed for b in disputed]
    joins += [a[0] + "".join(b) for a in disputed for b in disputed]
    texts = [source.convert_tokens_to_string([join]) for join in joins]
    _check_probes(source, target, texts, why)
    raise TokenizerMismatch(_message(f"{why}they have {len(ours)} and {len(theirs)} merges"))
