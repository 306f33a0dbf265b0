"""Caches are read part by part, also while they are written; what is missing, late or damaged ends it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from kvmap.serving.keys import BLOCK_TOKENS
from kvmap.serving.manifest import Manifest
from kvmap.serving.store import SharedFolder
from kvmap.serving.vllm import loading as loading_module
from kvmap.serving.vllm.loading import Arrived, Loader, LoadFailed, Loading, Wanted
from tests.serving.published_caches import SHAPE, announce, publish, write_part

IDS = list(range(100, 100 + 3 * BLOCK_TOKENS))
N = len(IDS)
CUTS = [40, 41]


@pytest.fixture
def store(tmp_path: Path) -> SharedFolder:
    return SharedFolder(tmp_path / "storage")


@pytest.fixture
def loader(store: SharedFolder) -> Loader:
    return Loader(store, n_threads=2)


def wanted(manifest: Manifest, start: int = 0, stop: int = N, wait: float = 5.0, load: float = 5.0) -> Wanted:
    return Wanted(manifest, start, stop, wait if not manifest.is_written else 0.0, load)


def next_parts(loading: Loading, n: int, seconds: float = 5.0) -> list[Arrived]:
    """The next n parts; fewer where no more come in time."""
    found: list[Arrived] = []
    until = time.monotonic() + seconds
    while len(found) < n and time.monotonic() < until:
        found += loading.take()
        time.sleep(0.002)
    return found


def failure_of(loading: Loading, seconds: float = 5.0) -> LoadFailed:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            loading.take()
        except LoadFailed as error:
            return error
        time.sleep(0.002)
    raise AssertionError("it did not fail")


def places(parts: list[Arrived]) -> list[tuple[int, int, int]]:
    return [(part.start, part.stop, part.layer) for part in parts]


def of_runs(*runs: tuple[int, int]) -> list[tuple[int, int, int]]:
    return [(start, stop, layer) for start, stop in runs for layer in range(len(SHAPE))]


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [(0, N, [(0, 40), (40, 41), (41, N)]), (40, 41, [(40, 41)]), (39, 41, [(0, 40), (40, 41)])],
)
def test_a_published_cache_comes_part_by_part(
    store: SharedFolder, loader: Loader, start: int, stop: int, expected: list[tuple[int, int]]
) -> None:
    manifest = publish(store, IDS, cuts=CUTS)
    loading = loader.start(wanted(manifest, start, stop))
    parts = next_parts(loading, len(expected) * len(SHAPE))
    assert places(parts) == of_runs(*expected)
    assert loading.is_ended
    assert loading.wait_seconds == 0
    assert loading.n_bytes == sum(
        file.n_bytes for run in manifest.runs for file in run.files if (run.start, run.stop) in expected
    )


def test_parts_come_while_the_cache_is_being_written(store: SharedFolder, loader: Loader) -> None:
    manifest = announce(store, IDS)
    loading = loader.start(wanted(manifest, stop=N - 1))
    assert next_parts(loading, 1, seconds=0.05) == []
    for number, (start, stop) in enumerate([(0, 40), (40, N)]):
        for layer in range(len(SHAPE)):
            write_part(store, manifest, number, layer, start, stop)
            assert places(next_parts(loading, 1)) == [(start, stop, layer)]
    assert next_parts(loading, 1, seconds=0.05) == []
    assert loading.is_ended
    assert loading.wait_seconds > 0.05


def test_of_a_cache_that_is_being_written_no_more_is_taken_than_is_wanted(
    store: SharedFolder, loader: Loader
) -> None:
    manifest = announce(store, IDS)
    for number, (start, stop) in enumerate([(0, 32), (32, 64)]):
        for layer in range(len(SHAPE)):
            write_part(store, manifest, number, layer, start, stop)
    loading = loader.start(wanted(manifest, start=32, stop=60))
    assert places(next_parts(loading, 3)) == of_runs((32, 64))
    assert loading.is_ended


def test_caches_that_are_waited_for_do_not_keep_others_waiting(store: SharedFolder, loader: Loader) -> None:
    waiting = [loader.start(wanted(announce(store, [n, *IDS[1:]]))) for n in range(12)]
    loading = loader.start(wanted(publish(store, IDS)))
    assert len(next_parts(loading, 3, seconds=2.0)) == 3
    assert not any(each.is_over for each in waiting)


def test_a_source_that_gives_up_is_not_waited_for(store: SharedFolder, loader: Loader) -> None:
    manifest = announce(store, IDS)
    loading = loader.start(wanted(manifest, wait=60.0))
    write_part(store, manifest, 0, 0, 0, 40)
    assert len(next_parts(loading, 1)) == 1
    store.drop_group(manifest.group)
    error = failure_of(loading)
    assert (error.cause, str(error)) == ("partial", "the source gave the cache up after 0 tokens")


def test_a_source_that_dies_is_not_waited_for(
    store: SharedFolder, loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading_module, "ALIVE_SECONDS", 0.1)
    loading = loader.start(wanted(announce(store, IDS), wait=60.0))
    error = failure_of(loading)
    assert error.cause == "timeout"
    assert "no sign of life" in str(error)


def test_a_source_that_lives_and_is_slow_is_waited_for_as_long_as_was_said(
    store: SharedFolder, loader: Loader
) -> None:
    begun = time.monotonic()
    error = failure_of(loader.start(wanted(announce(store, IDS), wait=0.2)))
    assert error.cause == "timeout"
    assert "0 of 96 tokens were written after 0.2 s" in str(error)
    assert time.monotonic() - begun >= 0.2


def test_runs_that_do_not_follow_each_other_are_refused(store: SharedFolder, loader: Loader) -> None:
    for second, cause in (((41, N), "cache_file"), ((39, N), "cache_file"), ((0, 40), "cache_file")):
        manifest = announce(store, IDS)
        for number, (start, stop) in enumerate([(0, 40), second]):
            for layer in range(len(SHAPE)):
                write_part(store, manifest, number, layer, start, stop)
        assert failure_of(loader.start(wanted(manifest))).cause == cause


def test_layers_of_different_tokens_are_refused(store: SharedFolder, loader: Loader) -> None:
    manifest = announce(store, IDS)
    write_part(store, manifest, 0, 0, 0, 40)
    write_part(store, manifest, 0, 1, 0, 41)
    assert failure_of(loader.start(wanted(manifest))).cause == "cache_file"


def test_a_part_of_another_cache_is_refused(store: SharedFolder, loader: Loader) -> None:
    """It is sound in itself, and of the same tokens; the manifest knows the difference."""
    manifest = publish(store, IDS)
    write_part(store, manifest, 0, 1, 0, N)
    error = failure_of(loader.start(wanted(manifest)))
    assert error.cause == "cache_file"
    assert "not the part that was published" in str(error)


def test_a_storage_that_hangs_is_given_up(
    store: SharedFolder, loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(store, "get_part", lambda *args: gate.wait(10))
    loading = loader.start(wanted(publish(store, IDS), load=0.05))
    error = failure_of(loading)
    assert (error.cause, "within 0.05 s" in str(error)) == ("timeout", True)
    gate.set()


def test_what_is_given_up_is_read_no_further(store: SharedFolder, loader: Loader) -> None:
    manifest = announce(store, IDS)
    loading = loader.start(wanted(manifest, wait=60.0))
    loading.give_up()
    time.sleep(0.05)
    n_bytes = loading.n_bytes
    for layer in range(len(SHAPE)):
        write_part(store, manifest, 0, layer, 0, N)
    time.sleep(0.05)
    assert loading.n_bytes == n_bytes == 0
    assert failure_of(loading).cause == "failure"
