"""Two tokenizers through the stages: a model whose words are numbered otherwise is the same model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvmap.models.tokenization import TokenizerMismatch
from kvmap.zoo import weights_folder
from kvmap.zoo.tokenizer import SPECIAL
from tests.stages.conftest import Runner

CHAIN = "stages=[plan,calibrate,fit,diagnose,evaluate] evaluation.arms=[target,mapped,bias_only,no_context]"


@pytest.fixture(scope="module")
def backwards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-small with its words numbered from the other end, and its embedding to match."""
    folder, out = weights_folder("tiny-small"), tmp_path_factory.mktemp("backwards")
    for file in folder.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    content = json.loads((out / "tokenizer.json").read_text())
    vocabulary, n_kept = content["model"]["vocab"], len(SPECIAL)
    last = len(vocabulary) - 1
    content["model"]["vocab"] = {
        word: number if number < n_kept else last + n_kept - number for word, number in vocabulary.items()
    }
    (out / "tokenizer.json").write_text(json.dumps(content))
    weights = load_file(out / "model.safetensors")
    moved = torch.cat((torch.arange(n_kept), torch.arange(last, n_kept - 1, -1)))
    embedding = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = embedding[moved].contiguous()
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    return out


@pytest.mark.slow
def test_the_chain_over_two_numberings_of_one_model_gives_the_numbers_of_one(
    run: Runner, backwards: Path
) -> None:
    one = run(CHAIN)
    two = run(f"{CHAIN} pair.source.id={backwards} pair.alignment=spans")
    for table in ("r2", "selection", "arms"):
        assert one.table(table) == two.table(table)
    ours, theirs = one.mapper.tensors(), two.mapper.tensors()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert one.artifact("mapper") != two.artifact("mapper")
    manifest = json.loads((two.artifact("mapper") / "manifest.json").read_text())
    assert manifest["alignment"] == "spans:last"


def test_two_tokenizers_are_refused_unless_aligning_is_asked_for(run: Runner, backwards: Path) -> None:
    with pytest.raises(TokenizerMismatch, match=r"set pair.alignment=spans"):
        run(f"{CHAIN} pair.source.id={backwards}")


def test_every_rule_has_artifacts_of_its_own(run: Runner, backwards: Path) -> None:
    asked = f"stages=[calibrate] pair.source.id={backwards} pair.alignment=spans pair.alignment_rule="
    assert len({run(asked + rule).artifact("moments") for rule in ("last", "ended", "mean")}) == 3
