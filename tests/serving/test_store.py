"""The shared folder, and what lies in it: whole or refused, bounded, and closed to paths."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from kvmap.files import ArtifactCorrupt
from kvmap.models.rope import same_rotations
from kvmap.serving import store as store_module
from kvmap.serving.index import PrefixIndex
from kvmap.serving.keys import BLOCK_TOKENS, namespace
from kvmap.serving.manifest import manifest_text, read_manifest
from kvmap.serving.parts import part_bytes, part_name, read_part
from kvmap.serving.store import PartMissing, SharedFolder, StoreError
from tests.serving.published_caches import ROTATIONS, SOURCE, announce, publish, write_part

KEY, GROUP = "0" * 32, "1" * 32
IDS = list(range(100, 100 + 5 * BLOCK_TOKENS))


@pytest.fixture
def store(tmp_path: Path) -> SharedFolder:
    return SharedFolder(tmp_path / "storage")


@pytest.mark.parametrize(
    "bad", ["", "..", "../" + "0" * 29, "0" * 31, "0" * 33, "G" * 32, "0" * 31 + "/", "0" * 32 + "\n"]
)
def test_keys_that_are_not_hex_digits_are_refused(store: SharedFolder, bad: str) -> None:
    calls = [
        lambda: store.put_part(bad, "0000-0000", [b"x"]),
        lambda: store.get_part(bad, "0000-0000", 1),
        lambda: store.part_size(bad, "0000-0000"),
        lambda: store.put_manifest(bad, "{}", group=GROUP, n_bytes=1),
        lambda: store.put_manifest(KEY, "{}", group=bad, n_bytes=1),
        lambda: store.get_manifest(bad),
        lambda: store.announce(bad, "{}"),
        lambda: store.still_writing(bad),
        lambda: store.get_announcement(bad),
        lambda: store.drop_group(bad),
    ]
    for call in calls:
        with pytest.raises(StoreError, match="hex digits"):
            call()


@pytest.mark.parametrize("bad", ["", "../x", "0000-0000/..", "a-b", "00000000", "0000-0000\n"])
def test_part_names_that_are_no_numbers_are_refused(store: SharedFolder, bad: str) -> None:
    with pytest.raises(StoreError, match="four digits"):
        store.put_part(GROUP, bad, [b"x"])


def test_parts_come_back_whole_or_not_at_all(store: SharedFolder) -> None:
    store.put_part(GROUP, "0000-0001", [b"ab", memoryview(b"cde")])
    assert store.get_part(GROUP, "0000-0001", 5) == b"abcde"
    assert store.part_size(GROUP, "0000-0001") == 5
    for n_bytes in (4, 6):
        with pytest.raises(PartMissing):
            store.get_part(GROUP, "0000-0001", n_bytes)
    with pytest.raises(PartMissing):
        store.get_part(GROUP, "0000-0002", 5)
    assert store.part_size(GROUP, "0000-0002") is None


def test_a_part_is_a_safetensors_file_of_keys_and_values() -> None:
    keys, values = torch.randn(1, 2, 5, 8).bfloat16(), torch.randn(1, 2, 5, 8).bfloat16()
    pieces, sha256, n_bytes = part_bytes(keys, values, 7)
    data = bytearray(b"".join(bytes(piece) for piece in pieces))
    assert len(data) == n_bytes
    plain = load(bytes(data))
    assert torch.equal(plain["keys"], keys)
    mine = read_part(data, (2, 8), "bfloat16")
    assert torch.equal(mine.keys, keys)
    assert torch.equal(mine.values, values)
    assert (mine.start, mine.stop, mine.sha256) == (7, 12, sha256)


def test_a_part_that_is_changed_in_any_byte_or_cut_anywhere_is_refused() -> None:
    pieces, _, n_bytes = part_bytes(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4), 64)
    data = b"".join(bytes(piece) for piece in pieces)
    for at in range(n_bytes):
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        with pytest.raises(ArtifactCorrupt):
            read_part(changed, (2, 4), "float32")
    for n in range(n_bytes):
        with pytest.raises(ArtifactCorrupt):
            read_part(bytearray(data[:n]), (2, 4), "float32")
    with pytest.raises(ArtifactCorrupt):
        read_part(bytearray(data + b"x"), (2, 4), "float32")
    for shape, dtype in (((4, 2), "float32"), ((2, 8), "bfloat16"), ((2, 4), "bfloat16")):
        with pytest.raises(ArtifactCorrupt, match="not one of"):
            read_part(bytearray(data), shape, dtype)


def test_a_manifest_comes_back_as_it_was(store: SharedFolder) -> None:
    manifest = publish(store, IDS, cuts=[70, 71])
    text = store.get_manifest(manifest.key)
    assert text is not None
    back = read_manifest(text)
    assert same_rotations(back.rotations, ROTATIONS)
    assert back.rotations[0] is back.rotations[1]
    for name in ("namespace", "source", "group", "token_ids", "shape", "dtype", "runs", "key", "n_bytes"):
        assert getattr(back, name) == getattr(manifest, name)


def test_a_manifest_that_was_cut_or_changed_is_refused(store: SharedFolder) -> None:
    text = manifest_text(publish(store, IDS))
    for wrong in (
        text[:-5],
        "",
        "[]",
        "null",
        text.replace('"float32"', '"float16"'),
        text.replace("100,", "99,", 1),
    ):
        with pytest.raises(ArtifactCorrupt):
            read_manifest(wrong)


def test_runs_with_a_gap_are_refused(store: SharedFolder) -> None:
    manifest = publish(store, IDS, cuts=[64])
    with pytest.raises(ArtifactCorrupt, match="parts for"):
        read_manifest(manifest_text(replace(manifest, runs=manifest.runs[:1])))
    with pytest.raises(ArtifactCorrupt, match="do not follow"):
        read_manifest(manifest_text(replace(manifest, runs=manifest.runs[1:])))


def test_the_longest_published_prefix_is_found(store: SharedFolder) -> None:
    name, index = namespace(SOURCE), PrefixIndex(store)
    assert index.longest(name, IDS) is None
    short = publish(store, IDS[: 2 * BLOCK_TOKENS + 3])
    long = publish(store, [*IDS[: 3 * BLOCK_TOKENS + 9], 7, 7, 7])
    publish(store, IDS, source=replace(SOURCE, weights="other"))
    found = index.longest(name, IDS)
    assert found is not None
    assert (found.manifest.key, found.n_tokens) == (long.key, 3 * BLOCK_TOKENS + 9)
    found = index.longest(name, IDS[: 2 * BLOCK_TOKENS + 3] + [5] * BLOCK_TOKENS)
    assert found is not None
    assert found.n_tokens == 2 * BLOCK_TOKENS + 3
    assert found.manifest.key in (short.key, long.key)
    assert index.longest(name, IDS[: BLOCK_TOKENS - 1]) is None
    assert index.longest(name, [*IDS[:5], 3, *IDS[6:]]) is None


@pytest.mark.parametrize("at", [0, 3, 40, 200])
def test_a_damaged_byte_in_a_manifest_harms_no_other_cache(store: SharedFolder, at: int) -> None:
    name, index = namespace(SOURCE), PrefixIndex(store)
    damaged = publish(store, IDS)
    path = store.root / "published" / f"{damaged.key}.json"
    data = bytearray(path.read_bytes())
    data[at] = 0xFF
    path.write_bytes(data)
    sound = publish(store, [7, *IDS[1:]])
    assert index.longest(name, IDS) is None or at < 33  # the group's line is the folder's own
    found = index.longest(name, [7, *IDS[1:]])
    assert found is not None
    assert found.manifest.key == sound.key


def test_what_is_gone_or_unreadable_is_not_found(store: SharedFolder) -> None:
    name, index = namespace(SOURCE), PrefixIndex(store)
    manifest = publish(store, IDS)
    assert index.longest(name, IDS) is not None
    path = store.root / "published" / f"{manifest.key}.json"
    path.write_text(path.read_text()[:-20])
    os.utime(path, ns=(1, 1))
    assert index.longest(name, IDS) is None
    path.unlink()
    assert index.longest(name, IDS) is None


def test_a_manifest_under_another_key_is_left_alone(store: SharedFolder) -> None:
    manifest = publish(store, IDS)
    store.put_manifest(KEY, manifest_text(manifest), group=GROUP, n_bytes=1)
    (store.root / "published" / f"{manifest.key}.json").unlink()
    assert PrefixIndex(store).longest(namespace(SOURCE), IDS) is None


def test_the_oldest_caches_make_room(tmp_path: Path) -> None:
    n_bytes = publish(SharedFolder(tmp_path / "measure"), IDS).n_bytes
    store = SharedFolder(tmp_path / "storage", max_bytes=3 * n_bytes + 10)
    manifests = []
    for first in range(5):
        manifests.append(publish(store, [first, *IDS[1:]]))
        path = store.root / "published" / f"{manifests[-1].key}.json"
        os.utime(path, ns=(first, first))
    kept = {entry.key for entry in store.manifests()}
    assert kept == {manifest.key for manifest in manifests[2:]}
    groups = {path.name for path in (store.root / "parts").iterdir()}
    assert groups == {manifest.group for manifest in manifests[2:]}
    with pytest.raises(StoreError, match="does not fit"):
        store.put_manifest(KEY, "{}", group=GROUP, n_bytes=4 * n_bytes)


def test_a_cache_that_is_published_again_replaces_the_old_one(store: SharedFolder) -> None:
    old, new = publish(store, IDS), publish(store, IDS)
    assert old.key == new.key
    assert [entry.key for entry in store.manifests()] == [old.key]
    # the parts of the old one may just be read; they go when they are old
    assert {path.name for path in (store.root / "parts").iterdir()} == {old.group, new.group}
    os.utime(store.root / "parts" / old.group, ns=(1, 1))
    other = publish(store, IDS[1:])
    assert {path.name for path in (store.root / "parts").iterdir()} == {new.group, other.group}


def test_writers_at_the_same_time_leave_whole_caches(store: SharedFolder) -> None:
    def work(number: int) -> None:
        for turn in range(5):
            publish(store, [turn, *IDS[1:]] if number % 2 else [number, turn, *IDS[2:]])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for entry in store.manifests():
        text = store.get_manifest(entry.key)
        assert text is not None
        manifest = read_manifest(text)
        for number, run in enumerate(manifest.runs):
            for layer, file in enumerate(run.files):
                data = store.get_part(manifest.group, part_name(number, layer), file.n_bytes)
                part = read_part(data, manifest.shape[layer], manifest.dtype)
                assert (part.start, part.stop, part.sha256) == (run.start, run.stop, file.sha256)


def test_what_dead_writers_left_is_removed(store: SharedFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, waiting = announce(store, IDS), announce(store, IDS[1:])
    write_part(store, begun, 0, 0, 0, 7)
    publish(store, IDS)
    assert {entry.key for entry in store.announcements()} == {begun.group, waiting.group}
    monkeypatch.setattr(store_module, "STALE_SECONDS", -1.0)
    publish(store, IDS[2:])
    assert not (store.root / "parts" / begun.group).exists()
    assert store.announcements() == []


def test_a_part_that_is_being_written_is_not_there(
    store: SharedFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, replace_file = [], os.replace

    def looked_at(written: Path, path: Path) -> None:
        assert written.read_bytes() == b"abcd"
        seen.append(store.part_size(GROUP, "0000-0000"))
        replace_file(written, path)

    monkeypatch.setattr(store_module.os, "replace", looked_at)
    store.put_part(GROUP, "0000-0000", [b"ab", b"cd"])
    assert seen == [None]
    assert store.part_size(GROUP, "0000-0000") == 4


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="another folder"):
        SharedFolder(tmp_path / "file" / "storage")
    with pytest.raises(StoreError, match="max_bytes=0"):
        SharedFolder(tmp_path, max_bytes=0)


def test_a_hanging_job_does_not_keep_others_from_being_refused() -> None:
    from kvmap.serving.background import Background

    thread, gate = Background("test"), threading.Event()
    first = thread.submit(gate.wait)
    second = thread.submit(lambda: 3)
    time.sleep(0.05)
    assert thread.stuck_seconds() > 0.02
    assert not second.done()
    gate.set()
    assert first.result(timeout=2)
    assert second.result(timeout=2) == 3
    failing = thread.submit(lambda: 1 / 0)
    assert isinstance(failing.exception(timeout=2), ZeroDivisionError)
    assert thread.stuck_seconds() == 0
    thread.close()
