"""What a hand-off is said to cost, against what the target really runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kvmap.benchmark import handback
from kvmap.benchmark.handback import handback_rows
from kvmap.errors import KvmapError, UnknownName
from kvmap.models.capture import prefill
from kvmap.models.loaded import LoadedModel
from kvmap.models.pair import ModelPair
from kvmap.transfer import (
    RECOMPUTE_RULES,
    TransferError,
    TransferOptions,
    handoff_flops,
    native_share,
    transfer,
)
from kvmap.transfer.cost import decoder_work
from kvmap.transfer.recompute import count_recomputed
from tests.tiny_random_models import build, random_ids
from tests.transfer.noisy_map import N_LAYERS, NoisyMap, source_model, target_model

LINEAR = ("aten.mm", "aten.addmm")
every_rule = pytest.mark.parametrize("rule", RECOMPUTE_RULES)


@contextmanager
def layers_run(target: LoadedModel) -> Iterator[list[int]]:
    """Tokens of each run of a decoder layer to its end."""
    finished: list[int] = []
    body: Any = target.body
    hooks = [
        layer.register_forward_hook(lambda _module, inputs, _output: finished.append(inputs[0].shape[1]))
        for layer in body.layers
    ]
    yield finished
    for hook in hooks:
        hook.remove()


def products(call: Any) -> tuple[float, float]:
    """FLOPs of matrix products that are weights' and those that are attention's."""
    with FlopCounterMode(display=False) as counter:
        call()
    counts = {str(name): n for name, n in counter.get_flop_counts()["Global"].items()}
    linear = sum(n for name, n in counts.items() if name.startswith(LINEAR))
    return linear, sum(counts.values()) - linear


@every_rule
@pytest.mark.parametrize("m", [0, 1, 2])
@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_the_target_runs_the_layers_that_the_share_counts(share: float, m: int, rule: str) -> None:
    target, ids = target_model(), random_ids(1, 24)
    source = prefill(source_model(), ids)
    options = TransferOptions(hold_back=3, native_head=1, recompute_share=share, recompute_rule=rule)
    with layers_run(target) as finished:
        transfer(source, NoisyMap(target, m), target, ids, **asdict(options))
    counted = native_share(target.geometry, 24, m, 1, 3, share, rule)
    run_twice = max(m - 1, 0)  # the native head, by itself and with the native layers, counts once
    assert counted == pytest.approx((sum(finished) - run_twice) / (N_LAYERS * 24))


@every_rule
@pytest.mark.parametrize("m", [0, 1, 2])
@pytest.mark.parametrize("family", ["llama_llama3", "llama_wide_heads", "qwen3", "phi3_partial", "gpt_neox"])
def test_products_with_weights_are_those_that_torch_counts(family: str, m: int, rule: str) -> None:
    target, ids = target_model(family), random_ids(1, 24)
    mapper, source = NoisyMap(target, m), prefill(source_model(), ids)
    options = TransferOptions(hold_back=3, native_head=2, recompute_share=0.3, recompute_rule=rule)
    linear, _ = products(lambda: transfer(source, mapper, target, ids, **asdict(options)))
    work, flops = decoder_work(target), handoff_flops(target, mapper, 24, options)
    # attention's own products, counted over what is visible, are left out here
    weights = sum(work.weights)
    own = 3 + 2 + count_recomputed(19, 0.3) + (3 if rule == "attention" else 0)
    expected = 2 * own * weights + 2 * 3 * work.logits * (2 if rule == "attention" else 1)
    for n_layers in ([m] if m else []) + ([m + 1] if rule == "map_error" else []):
        expected += 2 * 21 * (sum(work.weights[: n_layers - 1]) + work.projections[n_layers - 1])
    assert linear == expected + flops.map
    pairs = 4 * sum(work.channels)
    tail = 3 * 21 + 6
    attention = tail * pairs + 3 * pairs + count_recomputed(19, 0.3) * 12 * pairs
    attention += {"attention": 1.5 * tail * pairs, "map_error": 0.0, "random": 0.0}[rule]
    for n_layers in ([m] if m else []) + ([m + 1] if rule == "map_error" else []):
        attention += 4 * (21 * 22 / 2) * sum(work.channels[: n_layers - 1])
    assert flops.total - flops.map == pytest.approx(expected + attention)


def test_re_prefill_is_what_torch_counts_but_for_hidden_pairs() -> None:
    target, ids = target_model("llama_llama3", "eager"), random_ids(1, 40)
    flops = handoff_flops(target, NoisyMap(target), 40, TransferOptions())
    linear, attention = products(lambda: target.body(input_ids=ids))
    work = decoder_work(target)
    # eager attention multiplies all pairs; some transformers multiply positions by frequencies as a matrix
    rotary = 2 * 40 * (target.geometry.head_dim // 2)
    assert attention - 4 * 40 * 40 * sum(work.channels) in (0, rotary)
    assert work.logits == target.model.lm_head.weight.numel()
    assert flops.re_prefill == linear + 4 * (40 * 41 / 2) * sum(work.channels) + 2 * work.logits


def test_of_experts_those_count_that_a_token_goes_through() -> None:
    work = {
        n: decoder_work(LoadedModel.from_model(build("mixtral", num_experts_per_tok=n))) for n in (1, 2, 4)
    }
    experts = 48 * 32 * 3  # gate, up and down of one
    assert [work[n].weights[0] - work[1].weights[0] for n in (1, 2, 4)] == [0, experts, 3 * experts]


def test_a_context_with_nothing_to_map_costs_what_reading_it_does() -> None:
    target = target_model()
    for mapper, n_tokens in ((NoisyMap(target), 2), (NoisyMap(target, N_LAYERS), 30)):
        flops = handoff_flops(target, mapper, n_tokens, TransferOptions(recompute_share=0.5))
        assert flops.share == 1.0
        assert flops.native_layers == flops.re_prefill


def test_all_recomputed_costs_more_than_reading_again() -> None:
    """By the map and by the logits of more than one token; by no rule, as there is nothing to choose."""
    target = target_model()
    flops = handoff_flops(target, NoisyMap(target), 50, TransferOptions(hold_back=4, recompute_share=1.0))
    assert flops.rule == 0
    excess = flops.map + 2 * 3 * decoder_work(target).logits
    assert flops.total == pytest.approx(flops.re_prefill + excess)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"recompute_share": 0.1, "recompute_rule": "random"}, (2 + 10) / 100),
        ({"recompute_share": 0.1, "recompute_rule": "attention"}, (2 + 10 + 1) / 100),
        ({"recompute_share": 0.1, "recompute_rule": "map_error"}, (2 + 10) / 100),
        (
            {"recompute_share": 0.1, "recompute_rule": "map_error", "native_layers": 2},
            (100 + 2 * 2 + 3 * 10 + 2 * 99) / 300,
        ),
        ({"recompute_share": 1.0}, 1.0),
        ({"recompute_share": 1.0, "native_layers": 2}, (100 + 2 * 2 + 3 * 98) / 300),
    ],
)
def test_the_share_of_a_re_prefill(settings: dict[str, Any], expected: float) -> None:
    assert native_share(target_model().geometry, 100, **settings) == pytest.approx(expected)


def test_costs_that_cannot_be_are_refused() -> None:
    target = target_model()
    with pytest.raises(TransferError, match=r"recompute_share=1.5"):
        native_share(target.geometry, 9, recompute_share=1.5)
    with pytest.raises(UnknownName, match="recompute_rule"):
        native_share(target.geometry, 9, recompute_rule="best")
    with pytest.raises(TransferError, match="n_tokens=0: expected at least 1"):
        handoff_flops(target, NoisyMap(target), 0, TransferOptions())


def quiet(iterable: Any, total: int | None = None, description: str = "") -> Any:
    return iterable


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return ModelPair(source_model(), target_model())


def test_a_hand_off_is_counted_and_timed_beside_re_prefill(pair: ModelPair) -> None:
    options = TransferOptions(hold_back=2, recompute_share=0.5, recompute_rule="random", recompute_seed=4)
    mapper = NoisyMap(target_model(), 1)
    rows = handback_rows(pair, mapper, [10, 20], options, batch_size=2, repeats=2, warmup=0, progress=quiet)
    assert [row["length"] for row in rows] == [10, 20]
    for row in rows:
        flops = handoff_flops(target_model(), mapper, row["length"], options)
        assert {key: row[key] for key in asdict(options)} == asdict(options)
        assert row["n_mapped"] == row["length"] - 3
        assert row["n_recomputed"] == count_recomputed(row["n_mapped"], 0.5)
        assert row["native_layers"] == 1
        assert row["flop_share"] == flops.share
        parts = [row[f"{part}_flops"] for part in asdict(flops) if part != "re_prefill"]
        assert sum(parts) == pytest.approx(row["flop_share"] * row["re_prefill_flops"])
        assert row["layer_token_share"] == native_share(
            target_model().geometry, row["length"], 1, 1, 2, 0.5, "random"
        )
        for call in ("hand_off", "re_prefill"):
            assert 0 < row[f"{call}_p20_ms"] <= row[f"{call}_p50_ms"] <= row[f"{call}_p80_ms"]
        assert row["time_share"] > 0
        assert (row["batch_size"], row["n_repeats"], row["device"], row["dtype"]) == (2, 2, "cpu", "float32")
        assert row["threads"] == torch.get_num_threads()


def test_what_slows_a_whole_turn_down_does_not_show_in_the_share_of_time(
    pair: ModelPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {"hand_off": [1.0, 10.0, 1.2], "re_prefill": [2.0, 20.0, 4.0]}
    monkeypatch.setattr(handback, "time_interleaved", lambda *_: seconds)
    options = TransferOptions()
    [row] = handback_rows(pair, NoisyMap(target_model()), [9], options, repeats=3, progress=quiet)
    assert row["time_share"] == 0.5
    assert (row["hand_off_p50_ms"], row["re_prefill_p50_ms"]) == pytest.approx((1200.0, 4000.0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"repeats": 0}, "repeats=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"warmup": -1}, "warmup=-1"),
        ({"lengths": [9, 2]}, "length 2: expected more than the 2 tokens of hold_back=1 and native_head=1"),
        ({"lengths": [129]}, "no more than 128"),
    ],
)
def test_what_cannot_be_timed_is_refused(pair: ModelPair, settings: dict[str, Any], message: str) -> None:
    lengths = settings.pop("lengths", [9])
    with pytest.raises(KvmapError, match=message):
        handback_rows(pair, NoisyMap(target_model()), lengths, TransferOptions(), progress=quiet, **settings)
