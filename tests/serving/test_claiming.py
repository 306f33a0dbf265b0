"""Which of what is published, what is being written and what is about to be, a request takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvmap.mappers.base import FittedFor
from kvmap.mappers.identity import IdentityMapper
from kvmap.models.identity import ModelIdentity
from kvmap.serving.asking import Asked
from kvmap.serving.compatibility import EngineFacts, Incompatible
from kvmap.serving.keys import BLOCK_TOKENS
from kvmap.serving.manifest import Manifest
from kvmap.serving.parts import part_name
from kvmap.serving.store import SharedFolder
from kvmap.serving.vllm.claiming import Claim, Claims, Search
from kvmap.serving.vllm.looking import Looker
from kvmap.serving.vllm.mapper_files import EngineMapper
from kvmap.serving.vllm.settings import Settings
from tests.serving.published_caches import ROTATIONS, SHAPE, SOURCE, announce, publish

IDS = list(range(100, 100 + 5 * BLOCK_TOKENS))
N_MOST = len(IDS) - 1
LARGE = ModelIdentity("large", "x" * 64, "c" * 64, "t" * 64, "r" * 64, "float32")


@pytest.fixture
def store(tmp_path: Path) -> SharedFolder:
    return SharedFolder(tmp_path / "storage")


@pytest.fixture
def claims(store: SharedFolder) -> Iterator[Claims]:
    mapper = IdentityMapper(SHAPE)
    mapper.fitted_for = FittedFor(SOURCE, LARGE, "strip")
    rope_types = tuple(None if rotation is None else "default" for rotation in ROTATIONS)
    facts = EngineFacts(LARGE, SHAPE, rope_types, ROTATIONS, "float32", 32)
    looker = Looker(store)
    yield Claims(EngineMapper(mapper, "strip", 1), facts, looker, Settings(store.root))
    looker.close()


def search(wait: float = 0.0, grace: float = 0.0, min_tokens: int | None = None) -> Search:
    request = SimpleNamespace(
        prompt_token_ids=IDS,
        num_prompt_tokens=len(IDS),
        num_output_tokens=0,
        cache_salt=None,
        lora_request=None,
        mm_features=(),
        prompt_embeds=None,
        skip_reading_prefix_cache=False,
        resumable=False,
    )
    return Search(request, Asked(take=True, wait_seconds=wait, grace_seconds=grace, min_tokens=min_tokens))


def claimed(claims: Claims, search: Search, seconds: float = 5.0) -> Claim:
    """The claim, asked for again and again as a scheduler does."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if (claim := claims.claim(search, 0)) is not None:
            return claim
        time.sleep(0.005)
    raise AssertionError("it is still being looked for")


def cause_of(claims: Claims, search: Search) -> str:
    with pytest.raises(Incompatible) as found:
        claimed(claims, search)
    return found.value.cause


def damage(store: SharedFolder, manifest: Manifest) -> None:
    (store.root / "parts" / manifest.group / part_name(0, 1)).unlink()


def test_what_is_published_is_taken_at_once(store: SharedFolder, claims: Claims) -> None:
    manifest = publish(store, IDS)
    claim = claimed(claims, search(wait=60, grace=60))
    assert (claim.match.manifest.key, claim.n_end, claim.wait_seconds) == (manifest.key, N_MOST, 0)


def test_the_longer_one_is_taken_whether_it_is_written_or_not(store: SharedFolder, claims: Claims) -> None:
    publish(store, IDS[:64])
    arriving = announce(store, IDS[:100])
    claim = claimed(claims, search(wait=60))
    assert (claim.match.manifest.group, claim.n_end) == (arriving.group, 100)
    assert 59 < claim.wait_seconds <= 60
    assert claimed(claims, search()).n_end == 64
    publish(store, IDS[:128])
    assert claimed(claims, search(wait=60)).n_end == 128


@pytest.mark.parametrize("min_tokens", [None, 100])
def test_another_prompt_that_begins_alike_does_not_end_the_grace(
    store: SharedFolder, claims: Claims, min_tokens: int | None
) -> None:
    publish(store, [*IDS[:40], 1, 2, 3])
    announce(store, [*IDS[:64], 4, 5, 6])
    wanted = search(wait=60, grace=60, min_tokens=min_tokens)
    for _ in range(10):
        assert claims.claim(wanted, 0) is None
        time.sleep(0.01)
    announce(store, IDS)
    assert claimed(claims, wanted).n_end == N_MOST


def test_when_the_grace_is_over_what_is_there_is_taken(store: SharedFolder, claims: Claims) -> None:
    publish(store, IDS[:64])
    begun = time.monotonic()
    assert claimed(claims, search(wait=60, grace=0.2)).n_end == 64
    assert time.monotonic() - begun >= 0.2
    assert cause_of(claims, search(grace=0.05, min_tokens=100)) == "too_short"


def test_a_damaged_cache_does_not_hide_the_same_one_written_anew(store: SharedFolder, claims: Claims) -> None:
    damage(store, publish(store, IDS))
    assert cause_of(claims, search(wait=60)) == "partial"
    damage(store, publish(store, IDS))
    arriving = announce(store, IDS)
    assert claimed(claims, search(wait=60)).match.manifest.group == arriving.group


def test_after_one_that_came_to_nothing_only_what_lies_there_will_do(
    store: SharedFolder, claims: Claims
) -> None:
    publish(store, IDS[:64])
    announce(store, IDS)
    second = search(wait=60, grace=60)
    second.only_published = True
    assert claimed(claims, second).n_end == 64


def test_nothing_there_and_nothing_in_time_are_told_apart(store: SharedFolder, claims: Claims) -> None:
    assert cause_of(claims, search(wait=60)) == "not_found"
    announce(store, IDS)
    assert cause_of(claims, search()) == "timeout"
