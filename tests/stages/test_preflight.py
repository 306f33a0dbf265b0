"""Stage `preflight` on the shipped family: what it leaves, and that planted failures do not pass."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kvmap.diagnostics.token_kinds import TokenKinds
from kvmap.mappers import VERDICTS, LinearMapper, MapperMismatch, load_mapper, read_verdict
from kvmap.models.identity import ModelIdentity
from kvmap.preflight import Rules, judge, measure
from kvmap.preflight.__main__ import main
from kvmap.preflight.evidence import CONTROL, read_evidence
from kvmap.preflight.measures import check_identity, window_quantile
from kvmap.preflight.rules import rejections
from kvmap.stages.context import Context
from kvmap.stages.preflight.contexts import contexts_of
from kvmap.transfer import TransferOptions
from tests.preflight.planted_cases import cases
from tests.stages.conftest import Finished, Runner, configured

PROMPT = "the tower of the old harbour is painted red and the harbour is"
PREFLIGHT = "stages=[preflight] preflight.n_sequences=10 calibration.batch_size=5"


def decisions(finished: Finished) -> dict[str, str]:
    return {row["mapper"]: row["decision"] for row in finished.table("preflight")}


def verdict(finished: Finished) -> str:
    return str(finished.json("run")["facts"]["preflight"]["verdict"])


@pytest.fixture(scope="module")
def evidence(tmp_path_factory):
    """Cases that say of any pair of quality 0.6 or more that it passes at 0.5."""
    file = tmp_path_factory.mktemp("evidence") / "cases.csv"
    table = cases(n_pairs=4).table.drop(columns="true")
    names = {name: name.replace("head_local/", "banded/") for name in table if "/" in name}
    table.assign(**{new: table[old] for old, new in names.items()}).to_csv(file, index=False)
    return file


@pytest.fixture(scope="module")
def planned(run: Runner, evidence) -> Finished:
    return run(f"{PREFLIGHT} preflight.min_retention=0.3 preflight.evidence=[{evidence}]")


def test_it_leaves_judgements_measures_rates_and_a_verdict(planned: Finished):
    assert {"preflight", "preflight_measures", "preflight_rates"} <= planned.tables
    assert set(decisions(planned)) >= {"head_local", "banded", "mlp"}
    measures = {row["mapper"]: row for row in planned.table("preflight_measures")}
    assert list(measures) == ["head_local", "banded", CONTROL]
    for name in ("kl_nats", "r2_key", "gap_value", "attention_cosine", "tail_growth_key", "kl_window_nats"):
        assert planned.metric(f"preflight/held_out/banded/{name}") == float(measures["banded"][name])
    rates = {row["rate"]: row for row in planned.table("preflight_rates")}
    assert int(rates["false accepts"]["n"]) + int(rates["false rejects"]["n"]) >= 16
    facts = planned.json("run")["facts"]["preflight"]
    assert facts["lines"][0].startswith("Preflight: ")
    assert verdict(planned) in ("go", "try_mlp")


def test_the_verdict_lies_beside_the_mappers_it_fitted(planned: Finished):
    for name in ("head_local", "banded"):
        mapper, _ = load_mapper(planned.directory / "preflight" / name)
        assert isinstance(mapper, LinearMapper)
        assert mapper.verdict is not None
        assert mapper.verdict.verdict in VERDICTS
        assert mapper.verdict.canary is not None
        assert mapper.verdict.measured["kl_nats"] == planned.metric(f"preflight/held_out/{name}/kl_nats")


def test_the_control_says_nothing_of_a_context(planned: Finished):
    assert planned.metric(f"preflight/held_out/{CONTROL}/kl_share") == 1
    assert planned.metric(f"preflight/held_out/{CONTROL}/r2_key") == pytest.approx(0, abs=0.05)


@pytest.mark.slow
def test_prompts_are_read_and_judged(run: Runner, evidence, tmp_path):
    lines = [{"context": f"{PROMPT} {number}"} for number in range(6)]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    finished = run(
        f"{PREFLIGHT} preflight.mappers=[head_local] preflight.evidence=[{evidence}] "
        f"preflight.prompts.paths=[{file}] preflight.prompts.n=4"
    )
    share = finished.metric("preflight/prompts/head_local/kl_share")
    assert share == pytest.approx(
        finished.metric("preflight/prompts/head_local/kl_nats")
        / finished.metric(f"preflight/prompts/{CONTROL}/kl_nats")
    )
    assert finished.metric(f"preflight/prompts/{CONTROL}/kl_share") == 1
    assert finished.metric("preflight/prompts/head_local/n") == 4
    agreed = finished.metric("preflight/prompts/head_local/top1_agreement")
    row = finished.table("preflight")[0]
    assert row["mapper"] == "head_local"
    if row["probe"] == "prompts":
        assert float(row["predicted"]) == agreed


@pytest.mark.slow
def test_without_cases_there_is_not_enough_evidence(run: Runner):
    # no table has cases of so many pairs
    finished = run(f"{PREFLIGHT} preflight.min_pairs=999")
    assert verdict(finished) == "not_enough_evidence"
    assert set(decisions(finished).values()) == {"unknown"}


@pytest.mark.slow
def test_a_pair_is_not_judged_by_cases_of_its_own(run: Runner):
    known = read_evidence()
    own = "tiny-small → tiny-large"
    assert own in known.pairs
    counts = {row["mapper"]: row["n_pairs"] for row in run(PREFLIGHT).table("preflight")}
    assert int(counts["banded"]) == known.without(own).of("banded")["pair"].nunique()


@pytest.mark.slow
def test_what_was_measured_is_found_again(run: Runner, planned: Finished):
    kept = planned.outputs / "artifacts" / "preflight"
    before = {folder.name for folder in kept.iterdir() if folder.is_dir()}
    again = run(f"{PREFLIGHT} preflight.min_retention=0.31")
    assert again.table("preflight_measures") == planned.table("preflight_measures")
    assert again.outputs == planned.outputs
    assert {folder.name for folder in kept.iterdir() if folder.is_dir()} == before
    assert len(before) >= 3


@pytest.mark.parametrize("mapper", ["identity", pytest.param("head_local", marks=pytest.mark.slow)])
def test_a_model_that_goes_on_from_its_own_cache_is_a_go(run: Runner, mapper: str):
    finished = run(f"{PREFLIGHT} pair=tiny_self mapper={mapper}")
    assert verdict(finished) == "go"
    row = finished.table("preflight")[0]
    assert (float(row["predicted"]), float(row["low"])) == (1, 1)
    assert row["reason"].startswith("exact")


@pytest.mark.parametrize("mapper", ["random", pytest.param("bias_only", marks=pytest.mark.slow)])
def test_a_control_is_no_go(run: Runner, mapper: str):
    finished = run(f"{PREFLIGHT} mapper={mapper}")
    assert decisions(finished) == {mapper: "fail"}
    assert verdict(finished) == "no_go"


def test_keys_that_are_left_unrotated_are_no_go(run: Runner):
    finished = run(f"{PREFLIGHT} rope=no_rerotate")
    assert verdict(finished) == "no_go"
    assert "does not go on from its own cache" in finished.table("preflight")[0]["reason"]


def test_a_map_with_fewer_rows_than_features_is_not_fitted(run: Runner):
    small = "preflight.n_sequences=2 calibration.sequence_length=33 calibration.packing=document"
    finished = run(
        f"stages=[preflight] {small} preflight.mappers=[banded] evaluation.perplexity.n_sequences=0"
    )
    assert verdict(finished) in ("not_enough_evidence", "no_go")
    reasons = {row["mapper"]: row["reason"] for row in finished.table("preflight")}
    assert "preflight.n_sequences" in reasons["banded"]


class Laboratory:
    """What the stage fits and measures, with the means to spoil it."""

    def __init__(self, overrides: str, outputs) -> None:
        run = SimpleNamespace(note=lambda **facts: None)
        self.contexts = contexts_of(Context(configured(f"{PREFLIGHT} {overrides}", outputs), run))
        self.own = self.contexts["head_local"]
        self.control = self.measured(self.contexts[CONTROL].mapper)["kl_nats"]

    def measured(self, mapper, options=None):
        own = self.own
        held_out = own.tokens.input_ids[own.calibrated.splits["held_out"]]
        kinds = TokenKinds(own.pair.tokenizer, own.tokens.input_ids, 0.05)
        options = options or own.options
        return measure(own.pair, {"": mapper}, {"": own.moments}, held_out, kinds, options)[""]

    def shared(self, mapper, **settings):
        values = self.measured(mapper, **settings)
        return values | {"kl_share": values["kl_nats"] / self.control}


@pytest.fixture(scope="module")
def laboratory(outputs) -> Laboratory:
    return Laboratory("pair=tiny_medium_large", outputs)


def permuted_heads(mapper: LinearMapper) -> LinearMapper:
    """What target head h reads is given to head h + 1."""
    found = mapper.linear_weights()
    weight = {kind: tuple(layer.roll(1, 0) for layer in layers) for kind, layers in found.weight.items()}
    return LinearMapper(replace(found, weight=weight))


def test_rotated_heads_are_refused(laboratory: Laboratory):
    good = laboratory.shared(laboratory.own.mapper)
    spoiled = laboratory.shared(permuted_heads(laboratory.own.mapper))
    assert rejections(good) == []
    assert rejections(spoiled)
    assert judge("head_local", {"head_local": spoiled}, cases(), Rules()).decision == "fail"


def test_a_wrong_rotation_is_refused(laboratory: Laboratory):
    """The map was fitted on content keys, and the hand-off puts no rotation on them."""
    options = TransferOptions(rope="no_rerotate")
    spoiled = laboratory.shared(laboratory.own.mapper, options=options)
    # R² is of content keys and does not see it
    assert spoiled["r2_key"] > 0.3
    assert judge("head_local", {"head_local": spoiled}, cases(), Rules()).decision == "fail"


def test_an_overfitted_map_is_refused(outputs):
    few = Laboratory(
        "pair=tiny_medium_large preflight.n_sequences=3 calibration.sequence_length=66 "
        "calibration.packing=document evaluation.perplexity.n_sequences=0",
        outputs,
    )
    spoiled = few.shared(few.own.mapper)
    assert spoiled["rows_per_feature"] < 2
    assert any("over-fitted" in reason or "worse than their mean" in reason for reason in rejections(spoiled))


def test_another_checkpoint_is_refused_by_name_and_by_its_cache(laboratory: Laboratory):
    own, mapper = laboratory.own, laboratory.own.mapper
    other = replace(own.pair.source_identity, weights="0" * 64)
    assert isinstance(other, ModelIdentity)
    with pytest.raises(MapperMismatch, match="source weights"):
        mapper.check_models(other, own.pair.target_identity, "strip")
    # a mapper that knows nothing of its models, on a model whose layers have moved on
    nameless = LinearMapper(mapper.linear_weights())
    model = own.pair.source.model
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for tensor in model.parameters():
                if tensor.dim() == 2:
                    tensor += tensor.std() * torch.randn(tensor.shape, generator=generator)
        spoiled = laboratory.shared(nameless)
    finally:
        model.load_state_dict(kept)
    assert judge("head_local", {"head_local": spoiled}, cases(), Rules()).decision == "fail"


def test_a_cache_of_other_frequencies_does_not_come_back(laboratory: Laboratory):
    own = laboratory.own
    ids = own.tokens.input_ids[:2, :40]
    assert check_identity(own.pair.target, ids, own.options) < 1e-6
    unrotated = replace(own.options, rope="no_rerotate")
    assert check_identity(own.pair.target, ids, unrotated) > 1e-3


def test_windows_of_a_canary_are_means_of_runs():
    kl = torch.arange(20, dtype=torch.float64).reshape(1, 20)
    predicted = [SimpleNamespace(kl=kl)]
    assert window_quantile(predicted, 8, 1.0) == kl[0, 8:16].mean()
    assert window_quantile(predicted, 8, 0.0) == kl[0, :8].mean()
    assert window_quantile(predicted, 40, 0.5) == kl.mean()
    assert window_quantile([], 8) != window_quantile([], 8)


@pytest.mark.slow
def test_a_verdict_goes_to_a_fit_of_the_same_mapper(planned: Finished, tmp_path, capsys):
    kept = planned.directory / "preflight" / "head_local"
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("mapper.safetensors", "manifest.json"):
        (copy / name).write_bytes((kept / name).read_bytes())
    assert main(["attach", str(planned.directory), "head_local", str(copy)]) == 0
    found = read_verdict(copy)
    assert found.verdict == read_verdict(kept).verdict
    assert "smaller calibration" in found.reasons[-1]
    in_store = planned.outputs / "artifacts" / "mapper"
    store = next(path.parent for path in in_store.glob("*/artifact.json"))
    assert main(["attach", str(planned.directory), "head_local", str(store)]) == 1
    assert "lies in the store" in capsys.readouterr().err
