"""A mapped cache stays known as one: through disk, cuts, models and further hand-offs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvmap.files import ArtifactCorrupt, ArtifactMissing
from kvmap.models.cache import InvalidCache, KVCache
from kvmap.models.capture import forward, prefill
from kvmap.models.recompute_cache import recompute_columns
from kvmap.models.storage import load_kv, require_exact, save_kv
from kvmap.transfer import TransferError, native, prefill_and_transfer, transfer
from tests.mappers.test_store import every_mapper
from tests.mappers.test_store import mapped as map_by
from tests.tiny_random_models import random_ids
from tests.transfer.fitted_maps import fitted_mapper, source_model, target_model

IDS = random_ids(2, 16, seed=3)


def mapped_cache(**options: Any) -> KVCache:
    kv = prefill(source_model(), IDS)
    return transfer(kv, fitted_mapper("full-head"), target_model(), IDS, **options).kv


def stored(kv: KVCache, folder: Path) -> KVCache:
    save_kv(kv, folder / "cache.safetensors")
    return load_kv(folder / "cache.safetensors")


@pytest.mark.parametrize("index", range(11))
def test_what_any_mapper_maps_is_not_exact(index: int) -> None:
    mapped = map_by(every_mapper()[index])
    assert not mapped.exact
    assert mapped.owner is None


FURTHER: dict[str, Callable[[KVCache], KVCache]] = {
    "cut": lambda kv: kv.slice_tokens(0, 1),
    "rows": lambda kv: kv.select_rows([1, 1]),
    "layers": lambda kv: kv.first_layers(1),
    "cast": lambda kv: kv.to("cpu", torch.bfloat16),
    "stripped": lambda kv: kv.strip(),
    "turned again": lambda kv: kv.strip().rotate(target_model().rotations(16)),
    "decoded on": lambda kv: forward(target_model(), IDS[:, :3], kv)[1],
    "some recomputed": lambda kv: recompute_columns(
        target_model(), IDS, kv, torch.arange(16).expand(2, -1) == 4
    ),
}


@pytest.mark.parametrize("further", FURTHER)
def test_nothing_done_to_a_mapped_cache_makes_it_exact(further: str, tmp_path: Path) -> None:
    for kv in (mapped_cache(), stored(mapped_cache(), tmp_path)):
        assert not FURTHER[further](kv).exact


def test_a_mapped_cache_is_stored_as_one_and_an_exact_one_as_exact(tmp_path: Path) -> None:
    assert not stored(mapped_cache(), tmp_path).exact
    assert stored(prefill(target_model(), IDS), tmp_path).exact
    assert stored(mapped_cache(recompute_share=1.0), tmp_path).exact


@pytest.mark.parametrize("n_tokens", [1, 7, 15, 16])
@pytest.mark.parametrize("native_head", [0, 1, 9])
def test_a_mapped_prefix_makes_every_hand_off_inexact(
    n_tokens: int, native_head: int, tmp_path: Path
) -> None:
    """Whether it covers the whole context, less than the native head, or one token."""
    prefix = stored(mapped_cache(native_head=0), tmp_path).slice_tokens(0, n_tokens)
    kv, mapper, target = prefill(source_model(), IDS), fitted_mapper("full-head"), target_model()
    settings: dict[str, Any] = {"native_head": native_head, "native_prefix": prefix}
    assert not transfer(kv, mapper, target, IDS, **settings).kv.exact
    assert not transfer(kv, mapper, target, IDS, recompute_share=1.0, **settings).kv.exact
    assert not prefill_and_transfer(source_model(), mapper, target, IDS, **settings)[0].kv.exact


def test_an_exact_prefix_that_covers_the_context_stays_exact() -> None:
    prefix = prefill(target_model(), IDS)
    kv = prefill(source_model(), IDS)
    handed = transfer(kv, fitted_mapper("full-head"), target_model(), IDS, native_prefix=prefix)
    assert handed.kv.exact


def test_a_mapped_cache_is_not_taken_for_the_models_own_prefill(tmp_path: Path) -> None:
    for kv in (mapped_cache(), stored(mapped_cache(), tmp_path)):
        with pytest.raises(TransferError, match="stripped or mapped"):
            native(target_model(), IDS, cache=kv)


def test_only_the_models_own_cache_may_serve_other_requests(tmp_path: Path) -> None:
    own = prefill(target_model(), IDS)
    assert require_exact(own) is own
    everything_recomputed = mapped_cache(recompute_share=1.0)
    assert require_exact(everything_recomputed) is everything_recomputed
    for kv in (mapped_cache(), stored(mapped_cache(), tmp_path), mapped_cache(recompute_share=0.5)):
        with pytest.raises(InvalidCache, match=r"mapped columns.*own prefill"):
            require_exact(kv)
    with pytest.raises(InvalidCache, match="stripped keys"):
        require_exact(own.strip())


def test_a_file_that_is_no_cache_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    with pytest.raises(ArtifactMissing, match=r"other\.safetensors"):
        load_kv(path)
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(ArtifactCorrupt, match=r"other\.safetensors is no KV cache"):
        load_kv(path)
    save_file({"weight": torch.zeros(2)}, path, {"kv": "{"})
    with pytest.raises(ArtifactCorrupt, match="no KV cache"):
        load_kv(path)


def test_a_cut_file_is_refused_by_name(tmp_path: Path) -> None:
    stored(replace(mapped_cache(), owner=None), tmp_path)
    path = tmp_path / "cache.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ArtifactCorrupt, match=r"cache\.safetensors"):
        load_kv(path)
