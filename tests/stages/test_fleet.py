"""Stage `fleet` on three shipped models: each read once and alone, every pair as a run of its own has it."""

from __future__ import annotations

import json
import shutil
import weakref
from itertools import permutations
from pathlib import Path

import pytest

from kvmap.config import ConfigError
from kvmap.fit import reading
from kvmap.mappers import load_mapper
from kvmap.models import pair as pair_module
from kvmap.models.tokenization import TokenizerMismatch
from kvmap.stages.fleet import names_of
from kvmap.zoo import weights_folder
from tests.stages.conftest import Finished, Runner, configured

NAMES = ("tiny-small", "tiny-medium", "tiny-wide")
FLEET = (
    "stages=[fleet,report] fleet=[zoo:tiny-small,zoo:tiny-medium,zoo:tiny-wide] mapper=head_local study=fleet"
)


@pytest.fixture(scope="module")
def watched(run: Runner) -> tuple[Finished, list[tuple[str, int]], list[str]]:
    """The run, what was read for traces, and which models were loaded, of which no two at once."""
    read: list[tuple[str, int]] = []
    loaded: list[str] = []
    alive: weakref.WeakSet[object] = weakref.WeakSet()
    load, prefill = pair_module.load_model, reading.prefill

    def load_alone(spec):
        assert not alive, "a second model is loaded while one is in memory"
        model = load(spec)
        alive.add(model.body)
        loaded.append(spec.id)
        return model

    def counted(model, ids, *rest):
        read.append((model.identity.name, len(ids)))
        return prefill(model, ids, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair_module, "load_model", load_alone)
        patch.setattr(reading, "prefill", counted)
        finished = run(FLEET)
    return finished, read, loaded


@pytest.fixture(scope="module")
def fleet(watched) -> Finished:
    return watched[0]


@pytest.mark.slow
def test_every_model_reads_the_text_once(watched) -> None:
    _, read, loaded = watched
    by_model: dict[str, int] = {}
    for name, n_sequences in read:
        by_model[name] = by_model.get(name, 0) + n_sequences
    assert sorted(by_model.values()) == [15, 15, 15]
    # once to be traced, once to judge what it is handed
    assert sorted(loaded) == sorted(2 * [f"zoo:{name}" for name in NAMES])


@pytest.mark.slow
def test_every_ordered_pair_and_every_way_round_has_a_row(fleet: Finished) -> None:
    mappers = {(row["source"], row["target"]) for row in fleet.table("fleet_mappers")}
    assert mappers == set(permutations(NAMES, 2))
    routes = [(row["source"], row["via"], row["target"]) for row in fleet.table("fleet_routes")]
    assert set(routes) == {(a, "", b) for a, b in mappers} | set(permutations(NAMES, 3))
    assert routes == sorted(routes, key=lambda r: (NAMES.index(r[0]), NAMES.index(r[2])))
    assert [row["hub"] for row in fleet.table("fleet_hubs")] == ["", *NAMES]
    assert len(fleet.table("fleet_best_relays")) == 6


@pytest.mark.slow
def test_bytes_of_all_mappers_are_those_of_their_files(fleet: Finished) -> None:
    tensors = list((fleet.outputs / "artifacts" / "mapper").glob("*/mapper.safetensors"))
    assert len(tensors) == 6
    sizes = sorted(
        sum(t.numel() * t.element_size() for t in load_mapper(path.parent)[0].tensors().values())
        for path in tensors
    )
    assert sorted(int(row["weights_bytes"]) for row in fleet.table("fleet_mappers")) == sizes
    assert fleet.metric("fleet/mappers/all/weights_bytes") == sum(sizes)


@pytest.mark.slow
def test_a_run_of_one_pair_finds_its_mapper(fleet: Finished, run: Runner) -> None:
    """And measures the same KL with it, on the same text; there the source reads it anew."""
    alone = run("stages=[fit] pair=tiny_small_medium mapper=head_local")
    assert alone.metric("fit/mapper/all/reused") == 1.0
    row = next(r for r in fleet.table("fleet_mappers") if (r["source"], r["target"]) == NAMES[:2])
    assert int(row["n_weights"]) == alone.metric("fit/mapper/all/n_weights")


@pytest.mark.slow
def test_an_own_run_without_the_fleet_fits_the_same_mapper(
    fleet: Finished, run: Runner, tmp_path: Path
) -> None:
    own = run("stages=[fit,diagnose] pair=tiny_small_medium mapper=head_local diagnostics.texts=[]", tmp_path)
    mine = own.mapper.tensors()
    row = next(r for r in fleet.table("fleet_mappers") if (r["source"], r["target"]) == NAMES[:2])
    key = own.json("run")["facts"]["artifacts"]["mapper"]
    fitted = load_mapper(fleet.outputs / "artifacts" / "mapper" / key)[0].tensors()
    for name, tensor in mine.items():
        # moments of other batches: float64 sums in another order
        assert tensor.numpy() == pytest.approx(fitted[name].numpy(), rel=1e-3, abs=1e-4)
    r2 = [float(r["r2"]) for r in own.table("r2") if (r["split"], r["kind"]) == ("held_out", "key")]
    assert float(row["held_out_key_r2"]) == pytest.approx(sum(r2) / len(r2), abs=1e-5)


@pytest.mark.slow
def test_a_second_run_reads_and_fits_nothing(fleet: Finished, run: Runner, monkeypatch) -> None:
    monkeypatch.setattr(reading, "prefill", lambda *_: pytest.fail("a trace that is there is read again"))
    again = run(f"{FLEET} pair.target.id=no/such-model", again=True)  # the run's own pair has no part in it
    assert {row["reused"] for row in again.table("fleet_models")} == {"1.0"}
    assert {row["reused"] for row in again.table("fleet_mappers")} == {"1.0"}
    for name in ("fleet_routes", "fleet_hubs", "fleet_best_relays"):
        assert again.table(name) == fleet.table(name)


@pytest.mark.slow
def test_headline_numbers_and_pages_say_it(fleet: Finished) -> None:
    task = "fleet/tiny-small_to_tiny-medium"
    row = next(
        r for r in fleet.table("fleet_routes") if (r["source"], r["target"], r["via"]) == (*NAMES[:2], "")
    )
    assert fleet.metric(f"{task}/direct/kl_nats") == pytest.approx(float(row["kl_nats"]))
    assert fleet.metric("fleet/all_pairs/hub_tiny-wide/weights_bytes") < fleet.metric(
        "fleet/all_pairs/direct/weights_bytes"
    )
    page = (fleet.directory / "report.md").read_text()
    assert "A fleet, every model from the cache of every other: zoo:tiny-small" in page
    for words in ("Every ordered pair, by its own mapper", "The best way round", "All through one model"):
        assert words in page
    assert (fleet.directory / "figures" / "fleet.png").stat().st_size > 1000


def test_models_of_other_tokenizers_are_refused_by_name(tmp_path: Path, run: Runner) -> None:
    other = tmp_path / "other"
    shutil.copytree(weights_folder("tiny-medium"), other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(
        TokenizerMismatch, match=r"fleet\[0\]=zoo:tiny-small and fleet\[1\]=.*other do not read"
    ):
        run(f"stages=[fleet] fleet=[zoo:tiny-small,{other}] mapper=head_local")


def test_what_shapes_contradict_is_said_of_every_model_at_once(run: Runner) -> None:
    with pytest.raises(ConfigError) as caught:
        run(f"{FLEET} mapper.top_k=4 calibration.sequence_length=64")
    assert caught.value.mistakes == [
        "mapper.top_k=4: the source has 3 layers; expected 1 to 3, 'all' or 'auto'"
    ]


@pytest.mark.slow
def test_networks_and_rotated_keys_go_through_a_fleet_too(run: Runner) -> None:
    networks = run(
        f"{FLEET} mapper=mlp mapper.mlp.epochs=1 mapper.mlp.hidden=[8]".replace("mapper=head_local ", "")
    )
    assert {row["folded_bytes"] for row in networks.table("fleet_routes")} == {""}
    assert "held_out_key_r2" not in networks.table("fleet_mappers")[0]
    coupled = run(f"{FLEET} rope=coupled")
    assert len(coupled.table("fleet_routes")) == 12


def test_names_are_short_and_told_apart() -> None:
    ids = ["zoo:tiny-small", "Org/Model-1B", "other/Model-1B", "/data/models/local/"]
    assert names_of(ids) == ["tiny-small", "Model-1B-1", "Model-1B-2", "local"]
    assert configured("fleet=[zoo:tiny-small]", Path("outputs")).fleet == ["zoo:tiny-small"]
