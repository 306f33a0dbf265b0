"""One model's cache mapped for another: the answers are those of the hand-off in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kvmap.fit.features import Layout, Recipe, geometry_shape
from kvmap.fit.linear import Penalty, fit_linear
from kvmap.fit.pair_moments import PairMoments, calibration_rows, full_tables
from kvmap.fit.selection import rank_layers
from kvmap.fit.view import calibration_view
from kvmap.mappers import LinearMapper, Mapper, load_mapper
from kvmap.mappers.store import identity_record, save_mapper
from kvmap.models.capture import prefill
from kvmap.models.load import load_model
from kvmap.models.loaded import LoadedModel
from kvmap.models.spec import ModelSpec
from kvmap.transfer import transfer
from kvmap.transfer.continuation import continue_greedy
from kvmap.zoo import weights_folder
from tests.serving.engine.engines import Engine, Prompt, running
from tests.serving.engine.prompts import zoo_prompts

SOURCE, TARGET = "tiny-small", "tiny-large"
TAKE = {"take": True}
N = 24


def loaded(name: str) -> LoadedModel:
    return load_model(ModelSpec(f"zoo:{name}", dtype="float32", device="cpu"))


def fitted(source: LoadedModel, target: LoadedModel, native_layers: int) -> Mapper:
    layout = Layout(geometry_shape(source.geometry), geometry_shape(target.geometry), native_layers)
    sums = PairMoments.zeros(layout, full_tables(layout, "both_kinds"))
    for seed, split in ((60, "fit"), (61, "held_out")):
        ids = torch.tensor(zoo_prompts(12, lengths=(128,), seed=seed))
        views = calibration_view(prefill(source, ids), prefill(target, ids), "strip")
        sums.update(split, *views, calibration_rows(torch.ones_like(ids).bool(), native_head=1))
    shapes = sums.source_shape, sums.target_shape
    recipe = Recipe(*shapes, "full_head", rank_layers(sums, "r2", 2), "own_kind", native_layers)
    return LinearMapper(fit_linear(sums, recipe, Penalty(0.01)))


@dataclass(frozen=True)
class Pair:
    """Both models in memory, what the source engine has published, and the prompts."""

    source: LoadedModel
    target: LoadedModel
    storage: Path
    folder: Path
    prompts: list[list[int]]

    def mapper(self, native_layers: int, native_head: int) -> Path:
        folder = self.folder / f"mapper-{native_layers}"
        made = fitted(self.source, self.target, native_layers)
        identities = {
            "source": identity_record(self.source.identity),
            "target": identity_record(self.target.identity),
        }
        save_mapper(made, folder, {**identities, "rope": "strip", "native_head": native_head})
        return folder

    def expected(self, mapper: Mapper, prompt: Prompt, hold_back: int, native_head: int) -> tuple[int, ...]:
        ids = torch.tensor([list(prompt)])
        kv = prefill(self.source, ids)
        handed = transfer(kv, mapper, self.target, ids, hold_back=hold_back, native_head=native_head)
        return tuple(continue_greedy(self.target, handed, N)[0])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    prompts = zoo_prompts(12, seed=5)
    with running(weights_folder(SOURCE), "kv_producer", {"storage": folder / "storage"}) as engine:
        engine.publish(prompts)
        (answer,) = engine.run(prompts[:1], 4, TAKE)
        assert (answer.record["outcome"], answer.cause) == ("unsupported", "request")
    return Pair(loaded(SOURCE), loaded(TARGET), folder / "storage", folder, prompts)


@dataclass(frozen=True)
class Target:
    engine: Engine
    mapper: Mapper
    hold_back: int
    native_head: int


@pytest.fixture(
    scope="module", params=[(0, 1, 1), (2, 3, 4)], ids=["every layer mapped", "native layers, head and tail"]
)
def target(request: pytest.FixtureRequest, pair: Pair) -> Iterator[Target]:
    native_layers, native_head, hold_back = request.param
    folder = pair.mapper(native_layers, native_head)
    settings = {"storage": pair.storage, "mapper": folder, "hold_back": hold_back}
    with running(weights_folder(TARGET), "kv_consumer", settings, enable_prefix_caching=True) as engine:
        yield Target(engine, load_mapper(folder)[0], hold_back, native_head)


@pytest.fixture(autouse=True)
def _forgetful(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "target" in request.fixturenames:
        request.getfixturevalue("target").engine.forget()


def test_answers_are_those_of_the_hand_off_in_memory(pair: Pair, target: Target) -> None:
    answers = target.engine.run(pair.prompts, N, TAKE)
    # the second time, first tokens are known
    again = target.engine.run(pair.prompts, N, TAKE)
    assert [answer.tokens for answer in again] == [answer.tokens for answer in answers]
    for answer, prompt in zip(answers, pair.prompts, strict=True):
        assert answer.tokens == pair.expected(target.mapper, prompt, target.hold_back, target.native_head)
        assert answer.record["n_native_head"] == target.native_head
        assert answer.record["n_held_back"] == target.hold_back
        assert answer.record["n_mapped"] == len(prompt) - target.native_head - target.hold_back


def test_a_mapped_answer_leaves_nothing_behind(pair: Pair, target: Target) -> None:
    plain = target.engine.run(pair.prompts, N)
    target.engine.forget()
    mapped = target.engine.run(pair.prompts, N, TAKE)
    again = target.engine.run(pair.prompts, N)
    assert all(answer.is_applied for answer in mapped)
    assert [a.tokens for a in mapped] != [a.tokens for a in plain]
    assert [a.tokens for a in again] == [a.tokens for a in plain]
    assert [a.n_cached for a in again] == [0] * len(again)


def test_a_prefix_of_the_targets_own_stays_as_it_is(pair: Pair, target: Target) -> None:
    prompt = max(pair.prompts, key=len)
    ids = torch.tensor([prompt])
    own = prefill(pair.target, ids[:, :96])
    kv = prefill(pair.source, ids)
    handed = transfer(
        kv, target.mapper, pair.target, ids, hold_back=target.hold_back, native_head=0, native_prefix=own
    )
    expected = tuple(continue_greedy(pair.target, handed, N)[0])
    target.engine.run([prompt[:100]], 1)
    (answer,) = target.engine.run([prompt], N, TAKE)
    assert answer.record["n_own_prefix"] == 96
    assert answer.record["n_native_head"] == 0
    assert answer.tokens == expected


def test_a_target_publishes_nothing(pair: Pair, target: Target) -> None:
    (answer,) = target.engine.run(pair.prompts[:1], 1, {"publish": True})
    assert answer.record["published"] == 0
    assert "target" in answer.record["reason"]
