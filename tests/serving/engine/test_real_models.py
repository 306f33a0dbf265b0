"""Pretrained models through real engines: plain vLLM's answers, and those of the hand-off in memory.

KVMAP_SMOLLM2=FOLDER: a model onto itself. KVMAP_SERVING_SMALL, KVMAP_SERVING_LARGE, KVMAP_SERVING_MAPPER: a
pair and the folder of a mapper that was fitted for it. Skipped where they are not set.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch

from kvmap.fit.features import geometry_shape
from kvmap.mappers import load_mapper
from kvmap.mappers.identity import IdentityMapper
from kvmap.mappers.store import MANIFEST_NAME, identity_record, save_mapper
from kvmap.models.capture import prefill
from kvmap.models.load import load_model, read_geometry, read_identity
from kvmap.models.spec import ModelSpec
from kvmap.transfer import transfer
from kvmap.transfer.continuation import continue_greedy
from tests.serving.engine.engines import running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

TAKE = {"take": True}


def folder(variable: str) -> Path:
    if not os.environ.get(variable):
        pytest.skip(f"{variable} names no folder")
    return Path(os.environ[variable]).expanduser()


def mixed_prompts(model: Path, n: int, longest: int) -> list[list[int]]:
    """Pieces of this repository's pages, of 33 tokens to `longest`."""
    from transformers import AutoTokenizer

    pages = sorted((Path(__file__).parents[3] / "docs").glob("*.md"))
    ids = AutoTokenizer.from_pretrained(model)("\n".join(page.read_text() for page in pages))["input_ids"]
    draw = random.Random(0)
    lengths = [draw.randint(33, longest) for _ in range(n)]
    return [ids[start : start + k] for k in lengths for start in [draw.randrange(len(ids) - k)]]


@pytest.mark.parametrize("prefixes", [True, False], ids=["prefix caching", "no prefix caching"])
def test_a_hundred_answers_of_a_model_onto_itself(prefixes: bool, tmp_path: Path) -> None:
    """Eight at once, prompts of more than one step: the tokens of plain vLLM.

    float32: in 16 bits an engine's own answers to the same prompts change with what shares their batch.
    """
    model = folder("KVMAP_SMOLLM2")
    spec = ModelSpec(str(model), dtype="float32")
    record = identity_record(read_identity(spec))
    identity = IdentityMapper(geometry_shape(read_geometry(spec)))
    save_mapper(identity, tmp_path / "mapper", {"source": record, "target": record, "rope": "strip"})
    settings = {"storage": tmp_path / "storage", "mapper": tmp_path / "mapper"}
    prompts = mixed_prompts(model, 100, 500)
    with running(model, "kv_both", settings, enable_prefix_caching=prefixes) as engine:
        engine.publish(prompts)
        engine.forget()
        plain = engine.run(prompts, 24)
        engine.forget()
        taken = engine.run(prompts, 24, TAKE)
    assert all(answer.is_applied for answer in taken), {answer.cause for answer in taken}
    assert [answer.tokens for answer in taken] == [answer.tokens for answer in plain]


def test_answers_of_a_pair_are_those_of_the_hand_off_in_memory(tmp_path: Path) -> None:
    """float32: in 16 bits batches of other sizes already part near ties, without any hand-off."""
    small, large = folder("KVMAP_SERVING_SMALL"), folder("KVMAP_SERVING_LARGE")
    mapper, manifest = load_mapper(folder("KVMAP_SERVING_MAPPER"))
    source, target = (
        load_model(ModelSpec(str(path), dtype="float32", device="cpu")) for path in (small, large)
    )
    # fitted in 16 bits: the same weights, of models that run in float32 here
    identities = {"source": identity_record(source.identity), "target": identity_record(target.identity)}
    kept = {name: manifest[name] for name in ("rope", "native_head") if name in manifest}
    save_mapper(mapper, tmp_path / "mapper", {**identities, **kept})
    mapper, _ = load_mapper(tmp_path / "mapper")
    assert (tmp_path / "mapper" / MANIFEST_NAME).is_file()
    prompts = mixed_prompts(small, 6, 300)
    native_head = int(kept.get("native_head", 1))
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        handed = transfer(prefill(source, ids), mapper, target, ids, hold_back=1, native_head=native_head)
        expected.append(tuple(continue_greedy(target, handed, 32)[0]))
    del source, target
    storage = tmp_path / "storage"
    with running(small, "kv_producer", {"storage": storage}) as engine:
        engine.publish(prompts)
    with running(large, "kv_consumer", {"storage": storage, "mapper": tmp_path / "mapper"}) as engine:
        answers = engine.run(prompts, 32, TAKE)
    assert all(answer.is_applied for answer in answers), {answer.cause for answer in answers}
    assert [answer.tokens for answer in answers] == expected
