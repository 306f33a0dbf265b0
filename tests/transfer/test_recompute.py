"""Selective recompute: which mapped tokens the target runs again, and what that comes to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvmap.errors import UnknownName
from kvmap.models.cache import InvalidCache, KVCache, cache_argument, to_transformers
from kvmap.models.capture import prefill
from kvmap.models.geometry import UnsupportedModel
from kvmap.models.loaded import LoadedModel
from kvmap.models.recompute_cache import recompute_columns
from kvmap.transfer import (
    RECOMPUTE_RULES,
    HandOff,
    TransferError,
    TransferOptions,
    continue_greedy,
    native,
    transfer,
)
from kvmap.transfer import recompute as rules
from kvmap.transfer.recompute import Handed, count_recomputed
from tests.tiny_random_models import FAMILIES, ORIGINAL_MAX, build, left_padding, random_ids
from tests.transfer.noisy_map import N_LAYERS, NoisyMap, source_model, target_model
from tests.transfer.plain_llama import logits_after, recomputed

# float32 logits of size 1 to 15, computed with other batch shapes and masks
SAME = {"rtol": 0, "atol": 1e-4}
# What can go wrong alone: head sharing, key norms, scaled queries, frequencies by layer type or by length,
# partial and interleaved rotation, layers without any, windows, soft caps, experts, parallel blocks, biases.
some_families = pytest.mark.parametrize(
    "family",
    [
        "llama_llama3",
        "qwen3",
        "qwen2_sliding",
        "ministral3",
        "gemma2",
        "gemma3",
        "gpt_neox",
        "cohere2",
        "smollm3",
        "glm4",
        "mixtral",
        "phi3_longrope",
    ],
)
every_rule = pytest.mark.parametrize("rule", RECOMPUTE_RULES)


def handed_over(
    target: LoadedModel, ids: Tensor, mask: Tensor | None = None, *, native_layers: int = 0, **options: Any
) -> HandOff:
    source = prefill(source_model(), ids, mask)
    return transfer(source, NoisyMap(target, native_layers), target, ids, mask, **options)


def real_columns(kv: KVCache, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values of the real columns, (tokens of all rows, n_kv_heads, head_dim)."""
    return kv.keys[layer].transpose(1, 2)[kv.mask], kv.values[layer].transpose(1, 2)[kv.mask]


def assert_same_cache(got: KVCache, expected: KVCache) -> None:
    for layer in range(expected.n_layers):
        for mine, theirs in zip(real_columns(got, layer), real_columns(expected, layer), strict=True):
            torch.testing.assert_close(mine, theirs, **SAME)


def chooses(scores: Callable[[Handed], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the rule `random` score tokens so."""
    monkeypatch.setitem(rules.RULES, "random", scores)  # type: ignore[arg-type]


@some_families
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_recomputing_everything_is_a_native_run(family: str, attention: str) -> None:
    """A padded batch, longer than what dynamic frequencies were trained on."""
    target = target_model(family, attention)
    ids, mask = random_ids(3, ORIGINAL_MAX + 8, seed=1), left_padding(3, ORIGINAL_MAX + 8)
    truth, expected = prefill(target, ids, mask), native(target, ids, mask)
    for native_head, hold_back in ((0, 1), (2, 4)):
        prefill(target, random_ids(1, 5))  # frequencies of another length must not stick
        handoff = handed_over(
            target, ids, mask, native_head=native_head, hold_back=hold_back, recompute_share=1.0
        )
        torch.testing.assert_close(handoff.logits, expected.logits, **SAME)
        assert_same_cache(handoff.kv, truth)
        assert handoff.n_recomputed == handoff.n_mapped == int(mask.sum()) - 3 * (native_head + hold_back)
        assert handoff.kv.exact
        assert handoff.kv.owner == target.identity
        assert not handoff.kv.mixed
    assert continue_greedy(target, handoff, 3) == continue_greedy(target, expected, 3)


@pytest.mark.parametrize("rope", ["strip", "coupled", "no_rerotate"])
@pytest.mark.parametrize("native_layers", [0, 1, 2])
def test_recomputing_everything_is_native_under_every_strategy(native_layers: int, rope: str) -> None:
    target = target_model()
    ids, mask = random_ids(3, 16, seed=2), left_padding(3, 16)
    handoff = handed_over(
        target, ids, mask, native_layers=native_layers, rope=rope, recompute_share=1.0, hold_back=2
    )
    torch.testing.assert_close(handoff.logits, native(target, ids, mask).logits, **SAME)
    assert_same_cache(handoff.kv, prefill(target, ids, mask))
    assert handoff.kv.exact
    assert not handoff.kv.mixed


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_recomputes_its_own_cache_out_of_noise(family: str) -> None:
    """Block by block, the last shorter than the others."""
    target = target_model(family)
    ids, mask = random_ids(3, ORIGINAL_MAX + 8, seed=3), left_padding(3, ORIGINAL_MAX + 8)
    truth = prefill(target, ids, mask)
    noise = tuple(torch.randn_like(key) for key in truth.keys)
    kv = replace(truth, keys=noise, values=tuple(reversed(noise)))
    assert_same_cache(recompute_columns(target, ids, kv, mask.bool(), block_tokens=7), truth)


@every_rule
@pytest.mark.parametrize("rope", ["strip", "no_rerotate"])
def test_without_a_share_nothing_changes(rule: str, rope: str) -> None:
    target = target_model()
    ids, mask = random_ids(3, 16), left_padding(3, 16)
    expected = handed_over(target, ids, mask, rope=rope)
    handoff = handed_over(target, ids, mask, rope=rope, recompute_rule=rule, recompute_share=0.0)
    assert torch.equal(handoff.logits, expected.logits)
    for layer in range(N_LAYERS):
        assert torch.equal(handoff.kv.keys[layer], expected.kv.keys[layer])
        assert torch.equal(handoff.kv.values[layer], expected.kv.values[layer])
    assert (handoff.n_recomputed, handoff.n_recomputed_of_row) == (0, (0, 0, 0))
    assert not handoff.kv.exact


@pytest.mark.parametrize("native_head", [0, 2])
@pytest.mark.parametrize("hold_back", [1, 3])
@pytest.mark.parametrize("chosen", [[5], [2, 3, 11], [2, 4, 6, 7, 8, 12]])
def test_some_tokens_recomputed_are_what_a_plain_loop_makes_of_them(
    chosen: list[int], hold_back: int, native_head: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_model()
    ids = random_ids(1, 16, seed=4)
    scores = torch.zeros(1, 16 - hold_back)
    scores[0, chosen] = 1.0
    chooses(lambda handed: scores, monkeypatch)
    options = {"native_head": native_head, "hold_back": hold_back}
    before = handed_over(target, ids, **options).kv
    cache = [
        [(before.keys[layer][0, :, p], before.values[layer][0, :, p]) for p in range(16 - hold_back)]
        for layer in range(N_LAYERS)
    ]
    with torch.no_grad():
        repaired = recomputed(target.model, ids[0].tolist(), cache, chosen)
        logits = logits_after(target.model, ids[0].tolist(), repaired, 16 - hold_back)
    share = len(chosen) / (16 - native_head - hold_back)
    handoff = handed_over(target, ids, **options, recompute_share=share, recompute_rule="random")
    assert handoff.n_recomputed == len(chosen)
    torch.testing.assert_close(handoff.logits[0], logits, **SAME)
    for layer in range(N_LAYERS):
        for p, (key, value) in enumerate(repaired[layer]):
            torch.testing.assert_close(handoff.kv.keys[layer][0, :, p], key, **SAME)
            torch.testing.assert_close(handoff.kv.values[layer][0, :, p], value, **SAME)
            if p not in chosen:
                assert torch.equal(handoff.kv.keys[layer][0, :, p], before.keys[layer][0, :, p])
                assert torch.equal(handoff.kv.values[layer][0, :, p], before.values[layer][0, :, p])


@every_rule
@pytest.mark.parametrize("family", ["llama_llama3", "gemma3", "smollm3"])
def test_eager_and_sdpa_agree(family: str, rule: str) -> None:
    ids, mask = random_ids(3, 24, seed=5), left_padding(3, 24)
    options = {"recompute_share": 0.3, "recompute_rule": rule, "hold_back": 2}
    eager, sdpa = (
        handed_over(target_model(family, attention), ids, mask, **options) for attention in ("eager", "sdpa")
    )
    torch.testing.assert_close(eager.logits, sdpa.logits, **SAME)
    assert_same_cache(eager.kv, sdpa.kv)


@every_rule
@pytest.mark.parametrize("native_head", [0, 1, 6])
@pytest.mark.parametrize("family", ["llama_llama3", "qwen3"])
def test_every_row_of_a_padded_batch_equals_its_own_hand_off(
    family: str, native_head: int, rule: str
) -> None:
    lengths = [12, 9, 8, 5, 2, 1]  # shorter than native_head and hold_back, and a single token
    ids = random_ids(len(lengths), 12, seed=6)
    mask = (torch.arange(12) >= 12 - torch.tensor(lengths)[:, None]).long()
    options = {
        "native_head": native_head,
        "hold_back": 2,
        "recompute_share": 0.35,
        "recompute_rule": rule,
        "recompute_seed": 5,
    }
    target = target_model(family)
    batch = handed_over(target, ids, mask, **options)
    for row, length in enumerate(lengths):
        own = ids[row : row + 1, 12 - length :]
        one = handed_over(target, own, **options)
        torch.testing.assert_close(batch.logits[row], one.logits[0], **SAME)
        for layer in range(N_LAYERS):
            key = batch.kv.keys[layer][row, :, 12 - length :]
            torch.testing.assert_close(key, one.kv.keys[layer][0], **SAME)
        n_mapped = max(length - native_head - 2, 0)
        expected = count_recomputed(n_mapped, 0.35)
        assert one.n_recomputed_of_row == (one.n_recomputed,) == (expected,)
        assert batch.n_recomputed_of_row[row] == expected
        assert batch.n_mapped_of_row[row] == n_mapped
    assert batch.n_recomputed == sum(batch.n_recomputed_of_row)
    assert batch.select_rows([2, 0]).n_recomputed_of_row == tuple(
        batch.n_recomputed_of_row[row] for row in (2, 0)
    )


@pytest.mark.parametrize(
    ("n_mapped", "share", "expected"),
    [
        (0, 1.0, 0),
        (10, 0.0, 0),
        (10, 1.0, 10),
        (10, 0.01, 1),
        (10, 0.14, 1),
        (10, 0.15, 2),
        (100, 0.07, 7),
        (1, 0.5, 1),
        (3, 0.999, 3),
    ],
)
def test_a_share_is_of_the_mapped_tokens_to_the_nearest(n_mapped: int, share: float, expected: int) -> None:
    assert count_recomputed(n_mapped, share) == expected


@every_rule
def test_what_the_map_gives_matters_until_all_is_recomputed(rule: str) -> None:
    target, ids = target_model(), random_ids(2, 20, seed=7)
    source = prefill(source_model(), ids)
    for share in (0.3, 0.9, 1.0):
        logits = [
            transfer(
                source, NoisyMap(target, scale=scale), target, ids, recompute_share=share, recompute_rule=rule
            ).logits
            for scale in (1.0, 0.0)
        ]
        difference = float((logits[0] - logits[1]).abs().max())
        assert (difference < SAME["atol"]) == (share == 1.0)


def test_the_random_rule_depends_on_the_seed_and_on_the_row_alone() -> None:
    target, ids = target_model(), random_ids(3, 20, seed=8)

    def picked(ids: Tensor, seed: int) -> list[list[bool]]:
        plain = handed_over(target, ids)
        options = {"recompute_share": 0.4, "recompute_rule": "random", "recompute_seed": seed}
        handoff = handed_over(target, ids, **options)
        changed = (handoff.kv.keys[0] != plain.kv.keys[0]).any(-1).any(1)[:, :-1]
        assert changed.sum(-1).tolist() == list(handoff.n_recomputed_of_row)
        rows: list[list[bool]] = changed.tolist()
        return rows

    first = picked(ids, seed=0)
    assert first == picked(ids, seed=0)
    assert first != picked(ids, seed=1)
    assert picked(ids[[2, 0]], seed=0) == [first[2], first[0]]
    assert len({tuple(row) for row in first}) == 3


def mapped_as(handoff: HandOff, target: LoadedModel, ids: Tensor, mask: Tensor, hold_back: int) -> Handed:
    """What a rule is given in a hand-off of this context."""
    from kvmap.transfer.columns import split_columns
    from kvmap.transfer.context import read_context

    context = read_context(target, ids, mask, hold_back)
    columns = split_columns(context, torch.ones_like(context.n_cut))
    cut = handoff.kv.slice_tokens(0, context.n_columns)
    return Handed(target, columns, cut, native_layers=0, turned=True, seed=0)


@pytest.mark.parametrize("family", ["llama_llama3", "qwen3", "gemma2"])
@pytest.mark.parametrize("hold_back", [1, 3])
def test_attention_received_is_what_transformers_itself_reports(hold_back: int, family: str) -> None:
    target = target_model(family, "eager")
    ids, mask = random_ids(2, 14, seed=9), left_padding(2, 14)
    handoff = handed_over(target, ids, mask, hold_back=hold_back)
    handed = mapped_as(handoff, target, ids, mask, hold_back)
    tail = slice(14 - hold_back, None)
    with torch.no_grad():
        output = target.model(
            input_ids=ids[:, tail],
            attention_mask=mask,
            position_ids=(mask.cumsum(-1) - 1).clamp(min=0)[:, tail],
            output_attentions=True,
            **{cache_argument(target.model): to_transformers(handed.kv)},
        )
    expected = sum(layer.sum((1, 2)) for layer in output.attentions)[:, : 14 - hold_back]
    torch.testing.assert_close(rules.attention_received(handed), expected, rtol=0, atol=1e-5)


def test_held_back_pads_are_not_asked() -> None:
    """A row of two tokens holds back two; its pads among the last three columns look at nothing."""
    target = target_model()
    ids = random_ids(2, 9, seed=10)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    handoff = handed_over(target, ids, mask, hold_back=3)
    received = rules.attention_received(mapped_as(handoff, target, ids, mask, 3))
    assert float(received[0].min()) > 0
    assert not received[1].any()


@pytest.mark.parametrize("rope", ["strip", "coupled", "no_rerotate"])
@pytest.mark.parametrize("native_layers", [0, 1, 2])
def test_the_tokens_that_the_map_misses_most_are_recomputed(native_layers: int, rope: str) -> None:
    target = target_model()
    ids, mask = random_ids(2, 18, seed=11), left_padding(2, 18)
    truth = prefill(target, ids, mask)
    if rope == "no_rerotate":
        truth = truth.strip()
    options = {"native_layers": native_layers, "rope": rope}
    plain = handed_over(target, ids, mask, **options)
    handoff = handed_over(target, ids, mask, **options, recompute_share=0.25, recompute_rule="map_error")
    layer = native_layers
    changed = (handoff.kv.keys[layer] != plain.kv.keys[layer]).any(-1).any(1)
    for row, pads in ((0, 0), (1, 3)):
        columns = slice(pads + 1, 17)  # neither the native head nor the held-back token
        error = torch.zeros(16 - pads)
        for mapped, own in (
            (plain.kv.keys[layer][row, :, columns], truth.keys[layer][row, :, columns]),
            (plain.kv.values[layer][row, :, columns], truth.values[layer][row, :, columns]),
        ):
            off = (mapped - own).square().sum((0, 2))
            error += off / (own - own.mean(1, keepdim=True)).square().sum()
        n = handoff.n_recomputed_of_row[row]
        assert n == count_recomputed(16 - pads, 0.25)
        worst = set((error.argsort(descending=True)[:n] + pads + 1).tolist())
        assert set(changed[row, :17].nonzero().flatten().tolist()) == worst


@every_rule
def test_a_prefix_the_target_has_cached_is_never_recomputed(rule: str) -> None:
    target, ids = target_model(), random_ids(2, 15, seed=12)
    prefix = prefill(target, ids[:, :5])
    options = {"recompute_share": 0.5, "recompute_rule": rule}
    handoff = handed_over(target, ids, native_prefix=prefix, **options)
    expected = handed_over(target, ids, native_head=5, **options)
    torch.testing.assert_close(handoff.logits, expected.logits, **SAME)
    assert handoff.n_recomputed == expected.n_recomputed == 2 * count_recomputed(9, 0.5)
    for layer in range(N_LAYERS):
        assert torch.equal(handoff.kv.keys[layer][:, :, :5], prefix.keys[layer])


@every_rule
def test_short_blocks_turn_by_the_frequencies_of_the_whole_context(rule: str) -> None:
    """The chosen tokens alone would not reach the length at which longrope changes its frequencies."""
    target = target_model("phi3_longrope")
    ids = random_ids(2, ORIGINAL_MAX + 9, seed=13)
    handoff = handed_over(target, ids, recompute_share=0.2, recompute_rule=rule)
    assert not handoff.kv.mixed
    plain = handed_over(target, ids)
    changed = (handoff.kv.keys[0] != plain.kv.keys[0]).any(-1).any(1)
    truth = prefill(target, ids).keys[0].transpose(1, 2)
    torch.testing.assert_close(handoff.kv.keys[0].transpose(1, 2)[changed], truth[changed], **SAME)


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan"), float("inf")])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(TransferError, match=f"recompute_share={share}: expected a share"):
        TransferOptions(recompute_share=share)


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(UnknownName, match=r"recompute_rule 'atention'.* Did you mean 'attention'"):
        TransferOptions(recompute_rule="atention")


def test_an_attention_without_masks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target = LoadedModel.from_model(build("llama", seed=2))
    ids = random_ids(1, 9)
    kv = prefill(target, ids)
    monkeypatch.setattr(target.text_config, "_attn_implementation_internal", "flash_attention_2")
    with pytest.raises(UnsupportedModel, match="flash_attention_2 attention, which takes no mask"):
        recompute_columns(target, ids, kv, torch.ones_like(ids).bool())


def test_columns_that_cannot_be_recomputed_are_refused() -> None:
    target, ids, mask = target_model(), random_ids(2, 9), left_padding(2, 9)
    kv, everything = prefill(target, ids, mask), torch.ones(2, 9, dtype=torch.bool)
    with pytest.raises(InvalidCache, match="are pads"):
        recompute_columns(target, ids, kv, everything)
    with pytest.raises(InvalidCache, match=r"of shape \(2, 9\) expected, .* got \(2, 9\) and \(2, 9\) torch"):
        recompute_columns(target, ids, kv, mask)
    with pytest.raises(InvalidCache, match="stripped keys"):
        recompute_columns(target, ids, kv.strip(), mask.bool())
    with pytest.raises(InvalidCache, match="not the layers"):
        recompute_columns(target, ids, kv.first_layers(2), mask.bool())
    assert recompute_columns(target, ids, kv, torch.zeros_like(everything)) is kv
