"""What is being written is found while its writer lives, and no longer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvmap.files import ArtifactCorrupt
from kvmap.serving import index, signs_of_life
from kvmap.serving.index import Announcements
from kvmap.serving.keys import BLOCK_TOKENS, namespace
from kvmap.serving.manifest import manifest_text, read_announcement, read_manifest
from kvmap.serving.signs_of_life import SignsOfLife
from kvmap.serving.store import SharedFolder
from tests.serving.published_caches import SOURCE, announce, publish

IDS = list(range(100, 100 + 5 * BLOCK_TOKENS))
NAME = namespace(SOURCE)


@pytest.fixture
def store(tmp_path: Path) -> SharedFolder:
    return SharedFolder(tmp_path / "storage")


def until(holds: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it does not come to hold"
        time.sleep(0.005)


def test_the_longest_prefix_that_is_being_written_is_found(store: SharedFolder) -> None:
    announced = Announcements(store)
    assert announced.longest(NAME, IDS) is None
    announce(store, IDS[: 2 * BLOCK_TOKENS])
    long = announce(store, [*IDS[: 3 * BLOCK_TOKENS + 5], 7, 7])
    announce(store, IDS, source=replace(SOURCE, weights="other"))
    announce(store, IDS, salt="salt")
    found = announced.longest(NAME, IDS)
    assert found is not None
    assert (found.manifest.group, found.n_tokens) == (long.group, 3 * BLOCK_TOKENS + 5)
    assert announced.longest(NAME, IDS[: BLOCK_TOKENS - 1]) is None
    store.drop_group(long.group)
    found = announced.longest(NAME, IDS)
    assert found is not None
    assert found.n_tokens == 2 * BLOCK_TOKENS


def test_what_is_published_is_no_longer_announced(store: SharedFolder) -> None:
    publish(store, IDS)
    assert Announcements(store).longest(NAME, IDS) is None


def test_an_announcement_is_no_manifest_nor_the_reverse(store: SharedFolder) -> None:
    announced, published = announce(store, IDS), publish(store, IDS)
    assert read_announcement(manifest_text(announced)).token_ids == tuple(IDS)
    with pytest.raises(ArtifactCorrupt):
        read_manifest(manifest_text(announced))
    with pytest.raises(ArtifactCorrupt):
        read_announcement(manifest_text(published))


def test_an_announcement_that_cannot_be_read_is_left_alone(store: SharedFolder) -> None:
    text = manifest_text(announce(store, IDS))
    for number, wrong in enumerate((text[:-9], "{}", "", text.replace("100,", "99,", 1))):
        store.announce(f"{number:032x}", wrong)
    (store.root / "announced" / f"{0:032x}.json").write_bytes(b"\xff" + text.encode())
    found = Announcements(store).longest(NAME, IDS)
    assert found is not None
    assert len(store.announcements()) == 5


def test_a_writer_without_signs_of_life_is_not_waited_for(
    store: SharedFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "ALIVE_SECONDS", 0.1)
    announced, group = Announcements(store), announce(store, IDS).group
    assert announced.longest(NAME, IDS) is not None
    until(lambda: announced.longest(NAME, IDS) is None)
    signs = SignsOfLife(store, interval_seconds=0.01)
    signs.begin(group)
    until(lambda: announced.longest(NAME, IDS) is not None)
    time.sleep(0.15)
    assert announced.longest(NAME, IDS) is not None
    signs.close()
    until(lambda: announced.longest(NAME, IDS) is None)


def test_signs_end_with_the_writing(store: SharedFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signs_of_life, "ENDING_SECONDS", 0.05)
    signs = SignsOfLife(store, interval_seconds=0.01)
    over, ending, dropped = (announce(store, ids) for ids in (IDS, IDS[1:], IDS[2:]))
    for each in (over, ending, dropped):
        signs.begin(each.group)
    store.drop_group(dropped.group)
    signs.end(ending.group)
    until(lambda: signs.groups == {over.group})
    assert {entry.key for entry in store.announcements()} == {over.group, ending.group}
    signs.close()
