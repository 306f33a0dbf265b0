"""Models whose weights rest elsewhere than where they compute give what they give in memory, bit for bit."""

from __future__ import annotations

import importlib.util
import multiprocessing
import re
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from accelerate.utils import OffloadedWeightsLoader
from torch import Tensor

from kvmap.models import layerwise
from kvmap.models.cache import KVCache
from kvmap.models.capture import forward, prefill
from kvmap.models.geometry import UnsupportedModel
from kvmap.models.layerwise import prefill_by_layers
from kvmap.models.load import load_model
from kvmap.models.loaded import LoadedModel
from kvmap.models.placement import execution_device, is_offloaded, weights_in_memory
from kvmap.models.rope import same_rotations
from kvmap.models.spec import InvalidSpec, ModelSpec
from tests.models.tiny_tokenizers import byte_level_tokenizer
from tests.tiny_random_models import FAMILIES, build, left_padding, random_ids

N_LAYERS = 4
ON_DISK = {"device_map": "disk"}
PARTS = {"lm_head": "cpu", "model.embed_tokens": "cpu", "model.norm": "disk", "model.rotary_emb": "cpu"}
HALF = {"device_map": PARTS | {f"model.layers.{i}": ("disk", "cpu")[i % 2] for i in range(N_LAYERS)}}
MAPS = [ON_DISK, HALF, {"device_map": "auto", "max_memory": {"cpu": "120KB"}}]
MAP_NAMES = ["all on disk", "every other layer on disk", "what 120 KB have no room for on disk"]
IDS = random_ids(3, 14)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "qwen3"
    build("qwen3", seed=3, n_layers=N_LAYERS, vocab_size=272).save_pretrained(path)
    byte_level_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def whole(folder) -> LoadedModel:
    return load_model(ModelSpec(str(folder), device="cpu"))


@pytest.fixture(scope="module", params=MAPS, ids=MAP_NAMES)
def placed(request, folder) -> LoadedModel:
    return load_model(ModelSpec(str(folder), **request.param))


def assert_same(found: KVCache, expected: KVCache) -> None:
    pairs = zip((*found.keys, *found.values), (*expected.keys, *expected.values), strict=True)
    assert all(torch.equal(mine.cpu(), theirs) for mine, theirs in pairs)
    assert torch.equal(found.positions, expected.positions)
    assert torch.equal(found.mask, expected.mask)
    assert same_rotations(found.rotations, expected.rotations)


def by_layers(loaded: LoadedModel, batches: dict[str, Tensor], folder: Path) -> dict[str, KVCache]:
    found: dict[str, KVCache] = {}
    prefill_by_layers(loaded, batches, folder, found.__setitem__)
    return found


def test_prefill_forward_and_first_layers_do_not_depend_on_the_placement(whole, placed) -> None:
    mask = left_padding(3, 14)
    expected, found = (prefill(model, IDS, mask) for model in (whole, placed))
    assert_same(found, expected)
    assert_same(prefill(placed, IDS, mask, n_layers=2), expected.first_layers(2))
    logits, grown = forward(placed, IDS[:, :3], found)
    wanted, wanted_kv = forward(whole, IDS[:, :3], expected)
    assert torch.equal(logits, wanted)
    assert_same(grown, wanted_kv)


def test_layers_and_inputs_are_where_weights_compute_and_not_where_they_rest(whole, placed) -> None:
    assert is_offloaded(placed.body)
    assert not is_offloaded(whole.body)
    assert {parameter.device.type for parameter in placed.body.parameters()} >= {"meta"}
    assert placed.device == whole.device == torch.device("cpu")
    assert placed.layer_devices == whole.layer_devices
    assert (placed.dtype, placed.identity) == (whole.dtype, whole.identity)


def test_a_module_without_weights_is_on_the_cpu() -> None:
    assert execution_device(torch.nn.ReLU()) == torch.device("cpu")


def test_weights_stay_within_the_context_and_rest_again_after_it(placed) -> None:
    resting = [parameter.device.type for parameter in placed.model.parameters()]
    with weights_in_memory(placed.body):
        assert not is_offloaded(placed.body)
        assert {parameter.device.type for parameter in placed.body.parameters()} == {"cpu"}
    assert [parameter.device.type for parameter in placed.model.parameters()] == resting


def test_experts_that_are_joined_at_loading_need_an_offload_folder(tmp_path) -> None:
    model = build("mixtral", seed=5, vocab_size=272)
    model.save_pretrained(tmp_path / "model")
    byte_level_tokenizer().save_pretrained(tmp_path / "model")
    with pytest.raises(InvalidSpec, match="offload_folder"):
        load_model(ModelSpec(str(tmp_path / "model"), **ON_DISK))
    spec = ModelSpec(str(tmp_path / "model"), **ON_DISK, offload_folder=str(tmp_path / "offload"))
    expected = prefill(LoadedModel.from_model(model), IDS)
    assert_same(prefill(load_model(spec), IDS), expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device_map": "cuda:0"}, "device_map 'cuda:0'; expected auto, balanced"),
        ({"max_memory": {"cpu": "1GiB"}}, "max_memory=.* without a device_map"),
        ({"offload_folder": "there"}, "offload_folder='there' without a device_map"),
    ],
)
def test_settings_that_cannot_be_are_named(folder, settings, message) -> None:
    with pytest.raises(InvalidSpec, match=message):
        load_model(ModelSpec(str(folder), **settings))


def test_a_device_map_without_accelerate_says_how_to_install_it(folder, monkeypatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "accelerate" else find(name)
    )
    with pytest.raises(InvalidSpec, match="pip install accelerate"):
        load_model(ModelSpec(str(folder), device_map="auto"))
    assert load_model(ModelSpec(str(folder), device="cpu")).geometry.n_layers == N_LAYERS


class TestLayerByLayer:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_the_caches_are_those_of_a_prefill(self, family, tmp_path) -> None:
        loaded = LoadedModel.from_model(FAMILIES[family](seed=1, n_layers=3))
        # beyond the original length of scaled models; then a last batch that is smaller and shorter
        batches = {"0": random_ids(2, 40), "8": random_ids(1, 20)}
        found = by_layers(loaded, batches, tmp_path / "layers")
        for name, ids in batches.items():
            assert_same(found[name], prefill(loaded, ids))
        assert list((tmp_path / "layers").iterdir()) == []

    def test_of_an_offloaded_model_too(self, whole, placed, tmp_path) -> None:
        batches = {"0": IDS, "1": IDS[:2]}
        for name, kv in by_layers(placed, batches, tmp_path / "layers").items():
            assert_same(kv, prefill(whole, batches[name]))

    def test_each_weight_is_read_once_for_all_batches(self, folder, tmp_path, monkeypatch) -> None:
        placed = load_model(ModelSpec(str(folder), **ON_DISK))
        read: Counter[str] = Counter()
        get = OffloadedWeightsLoader.__getitem__

        def counted(self: OffloadedWeightsLoader, key: str) -> Tensor:
            read[key] += 1
            return get(self, key)

        monkeypatch.setattr(OffloadedWeightsLoader, "__getitem__", counted)
        by_layers(placed, {str(number): IDS[number : number + 1] for number in range(3)}, tmp_path / "layers")
        layers = {key: n for key, n in read.items() if ".layers." in key}
        assert len(layers) == N_LAYERS * 11
        # the first one's once more, for what is refused before anything is computed
        assert {n for key, n in layers.items() if ".layers.0." not in key} == {1}
        read.clear()
        for number in range(3):
            prefill(placed, IDS[number : number + 1])
        assert {n for key, n in read.items() if ".layers." in key} == {3}

    @pytest.mark.parametrize("n_passed", [0, 1, 5, 7, 8, 11])
    def test_what_was_cut_short_is_gone_on_with(self, whole, tmp_path, monkeypatch, n_passed) -> None:
        batches = {"0": IDS, "1": IDS[:2], "2": IDS[1:]}
        done = []
        own = layerwise._pass_layer

        def failing(*args: object) -> object:
            if len(done) == n_passed:
                raise RuntimeError("killed")
            done.append(args)
            return own(*args)

        monkeypatch.setattr(layerwise, "_pass_layer", failing)
        with pytest.raises(RuntimeError, match="killed"):
            by_layers(whole, batches, tmp_path / "layers")
        n_passed = -1
        found = by_layers(whole, batches, tmp_path / "layers")
        assert len(done) == N_LAYERS * len(batches)
        for name, kv in found.items():
            assert_same(kv, prefill(whole, batches[name]))

    def test_layers_that_give_more_than_hidden_states_are_refused(self, tmp_path) -> None:
        loaded = LoadedModel.from_model(FAMILIES["llama"](seed=1))
        layer = loaded.body.layers[0]
        own = layer.forward
        layer.forward = lambda *args, **kwargs: (own(*args, **kwargs), None)
        with pytest.raises(UnsupportedModel, match=r"layer 0 gives more than hidden states.*layerwise=false"):
            by_layers(loaded, {"0": IDS}, tmp_path / "layers")

    def test_the_model_is_as_it_was_afterwards(self, whole, tmp_path) -> None:
        expected = prefill(whole, IDS)
        by_layers(whole, {"0": IDS}, tmp_path / "layers")
        assert all("forward" not in vars(layer) for layer in whole.body.layers)
        assert_same(prefill(whole, IDS), expected)


# memory


def rss(field: str) -> int:
    """Of this process, bytes: VmRSS, what it holds now; VmHWM, the most it has held."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{field}:\s+(\d+) kB", status)[1])


def grown(folder: Path, settings: dict[str, object], into: Path) -> int:
    """By how much, at most, this process grows over a prefill, bytes."""
    torch.set_num_threads(1)
    before = rss("VmRSS")
    loaded = load_model(ModelSpec(str(folder), **settings))
    ids = random_ids(4, 16)
    if is_offloaded(loaded.body):
        prefill_by_layers(loaded, {"0": ids[:2], "1": ids[2:]}, into / "layers", lambda name, kv: None)
    else:
        prefill(loaded, ids)
    return rss("VmHWM") - before


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc")
def test_a_model_on_disk_takes_the_memory_of_one_layer(tmp_path) -> None:
    n_layers, width = 8, 640
    settings = {"hidden_size": width, "intermediate_size": 3 * width, "num_attention_heads": 8}
    model = build("llama", n_layers=n_layers, vocab_size=272, **settings)
    model.save_pretrained(tmp_path)
    byte_level_tokenizer().save_pretrained(tmp_path)
    weights = 4 * sum(parameter.numel() for parameter in model.parameters())
    del model
    # new processes: a forked one inherits memory that was freed, and loads into it without growing
    arms = {"memory": {"device": "cpu"}, "disk": ON_DISK}
    with ProcessPoolExecutor(
        2, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1
    ) as processes:
        growths = processes.map(grown, [tmp_path] * 2, arms.values(), [tmp_path / name for name in arms])
        found = dict(zip(arms, growths, strict=True))
    (tmp_path / "model.safetensors").unlink()
    assert found["memory"] > 0.9 * weights
    # one layer, an eighth, and room for what torch allocates once
    assert found["disk"] < 0.5 * weights
