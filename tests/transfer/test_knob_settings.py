"""The hand-back knobs as settings: judged, passed on whole, and costed by the stage `evaluate`."""

from __future__ import annotations

from dataclasses import asdict, fields

import pytest

from kvmap.config import schema, validate
from kvmap.evaluation.arms import batches_of, target_hand_offs
from kvmap.models.capture import prefill
from kvmap.transfer import RECOMPUTE_RULES, TransferOptions
from kvmap.transfer.recompute import RULES
from tests.stages.conftest import Finished, Runner, outputs, run  # noqa: F401
from tests.test_config import with_settings
from tests.transfer.noisy_map import NoisyMap, source_model, target_model

MISTAKES = {
    "transfer.recompute_share=-0.1": ("transfer.recompute_share=-0.1", "a share of tokens, 0 to 1"),
    "transfer.recompute_share=1.01": ("transfer.recompute_share=1.01", "a share of tokens, 0 to 1"),
    "transfer.recompute_share=nan": ("transfer.recompute_share=nan", "a share of tokens, 0 to 1"),
    "transfer.recompute_rule=atention": ("transfer.recompute_rule=atention", "did you mean 'attention'?"),
    "evaluation.cost.repeats=0": ("evaluation.cost.repeats=0", "at least 1"),
    "evaluation.cost.batch_size=0": ("evaluation.cost.batch_size=0", "at least 1"),
    "evaluation.cost.warmup=-1": ("evaluation.cost.warmup=-1", "at least 0"),
    "evaluation.cost.lengths=[64,5] transfer.hold_back=4": (
        "evaluation.cost.lengths=[64, 5]",
        "transfer.native_head + transfer.hold_back = 5 covers the shortest; expected more than 5",
    ),
    "evaluation.cost.lengths=[64] evaluation.sequential=true stages=[evaluate]": (
        "evaluation.cost.lengths=[64]",
        "leave the one empty or the other false",
    ),
}


@pytest.mark.parametrize("overrides", MISTAKES)
def test_a_mistake_gets_one_line_with_its_remedy(overrides: str) -> None:
    setting, remedy = MISTAKES[overrides]
    (mistake,) = validate(with_settings(overrides))
    assert mistake.startswith(f"{setting}: ")
    assert remedy in mistake


@pytest.mark.parametrize(
    "overrides",
    [
        "transfer.recompute_share=1 transfer.recompute_rule=random",
        "transfer.recompute_share=0 evaluation.cost.lengths=[3]",
        "experiment=frontier",
    ],
)
def test_settings_at_their_bounds_are_right(overrides: str) -> None:
    assert validate(with_settings(overrides)) == []


def test_the_configuration_holds_every_option_of_a_transfer() -> None:
    defaults = asdict(schema.TransferConfig()) | {"rope": schema.RopeConfig().strategy}
    assert asdict(TransferOptions()) == defaults
    assert asdict(with_settings("study=a").transfer) | {"rope": "strip"} == defaults
    assert schema.RECOMPUTE_RULES == RECOMPUTE_RULES == tuple(RULES)


def test_controls_are_recomputed_like_the_map() -> None:
    target = target_model()
    [batch] = batches_of([[*range(5, 25)], [*range(30, 45)]], batch_size=2, pad_id=0)
    cache = prefill(source_model(), batch.input_ids, batch.attention_mask)
    arms = {"target": None, "mapped": NoisyMap(target), "bias_only": NoisyMap(target, scale=0.0)}
    options = TransferOptions(recompute_share=0.5, recompute_rule="map_error", hold_back=2)
    found = dict(target_hand_offs(target, None, batch, arms, cache, options))
    assert found["target"].n_recomputed == 0
    for arm in ("mapped", "bias_only"):
        assert found[arm].n_recomputed_of_row == (9, 6)


@pytest.fixture(scope="module")
def costed(run: Runner) -> Finished:  # noqa: F811
    """One run of the part, without the world's questions and with as little perplexity as there can be."""
    return run(
        "stages=[evaluate] transfer.recompute_share=0.25 transfer.recompute_rule=random "
        "transfer.recompute_seed=3 transfer.hold_back=2 mapper.native_layers=1 evaluation.world.n_per_kind=0 "
        "evaluation.perplexity.n_sequences=2 evaluation.cost.lengths=[32,48] evaluation.cost.repeats=1 "
        "evaluation.cost.warmup=0 evaluation.arms=[target,mapped,no_context]"
    )


def test_the_stage_evaluate_counts_and_times_the_runs_own_hand_off(costed: Finished) -> None:
    rows = costed.table("hand_back")
    assert [row["length"] for row in rows] == ["32", "48"]
    for row, n_recomputed in zip(rows, (7, 11), strict=True):
        assert row["recompute_rule"] == "random"
        assert (row["recompute_share"], row["recompute_seed"], row["hold_back"]) == ("0.25", "3", "2")
        assert (row["native_layers"], row["n_recomputed"]) == ("1", str(n_recomputed))
        for share in ("layer_token_share", "flop_share", "time_share"):
            metric = f"evaluate/hand_back_{row['length']}/mapped/{share}"
            assert costed.metric(metric) == pytest.approx(float(row[share]))
    summary = {(row["task"], row["metric"]) for row in costed.table("arms") if row["arm"] == "mapped"}
    assert {("hand_back_32", "flop_share"), ("hand_back_48", "time_share")} <= summary


def test_the_seed_of_the_random_rule_is_recorded(costed: Finished) -> None:
    assert costed.json("run")["seeds"]["recompute"] == 3
    assert {field.name for field in fields(TransferOptions)} <= {*costed.table("hand_back")[0]}
