"""Looking for published caches, beside the scheduler: a storage that hangs must not hang the engine."""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass

from kvmap.serving.background import Background
from kvmap.serving.index import Announcements, Match, PrefixIndex
from kvmap.serving.keys import whole_key
from kvmap.serving.manifest import Manifest, manifest_text, read_manifest
from kvmap.serving.signs_of_life import SignsOfLife
from kvmap.serving.store import Store
from kvmap.serving.vllm.loading import missing_part


@dataclass(frozen=True, eq=False)
class Found:
    """What the storage has of a prompt's first tokens.

    Attributes:
        match: the longest published prefix.
        missing: the first part of it that is not there in full, in words.
        arriving: the longest prefix that some source is writing.
    """

    match: Match | None
    missing: str | None
    arriving: Match | None


class Looker:
    """One thread that looks at the storage for the scheduler."""

    def __init__(self, store: Store) -> None:
        """Args: the store."""
        self._store, self._index, self._announced = store, PrefixIndex(store), Announcements(store)
        self._thread = Background("kvmap-look")
        self._signs = SignsOfLife(store)

    def look(self, namespace: str, token_ids: tuple[int, ...]) -> Future[Found]:
        """Look for the longest published prefix."""
        return self._thread.submit(self._look, namespace, token_ids)

    def begin(self, announcement: Manifest) -> Future[bool]:
        """Announce a cache, or find that it is published already: then True, and nothing is announced."""
        return self._thread.submit(self._begin, announcement)

    def end(self, group: str) -> None:
        """No more is computed of an announced cache; what is computed of it may still have to be written."""
        self._thread.submit(self._signs.end, group)

    def published(self, namespace: str, token_ids: tuple[int, ...]) -> Future[Manifest | None]:
        """The manifest of these very tokens."""
        return self._thread.submit(self._published, namespace, token_ids)

    def is_stuck(self, seconds: float) -> bool:
        """Whether the storage has kept the thread for so long."""
        return self._thread.stuck_seconds() > seconds

    def close(self) -> None:
        """Look no longer."""
        self._thread.close()
        self._signs.close()

    def _look(self, namespace: str, token_ids: tuple[int, ...]) -> Found:
        # first what is being written: what is published meanwhile is then seen by the other
        arriving = self._announced.longest(namespace, token_ids)
        match = self._index.longest(namespace, token_ids)
        missing = None
        if match is not None:
            missing = missing_part(self._store, match.manifest, match.n_tokens)
            if missing is not None:
                self._index.forget(match.manifest.key)
        return Found(match, missing, arriving)

    def _begin(self, announcement: Manifest) -> bool:
        token_ids = announcement.token_ids
        match = self._index.longest(announcement.namespace, token_ids)
        whole = match is not None and match.n_tokens == len(token_ids)
        if match is not None and whole and missing_part(self._store, match.manifest, len(token_ids)) is None:
            return True
        self._store.announce(announcement.group, manifest_text(announcement))
        self._signs.begin(announcement.group)
        return False

    def _published(self, namespace: str, token_ids: tuple[int, ...]) -> Manifest | None:
        text = self._store.get_manifest(whole_key(namespace, token_ids))
        return None if text is None else read_manifest(text)


def settled(future: Future[bool], seconds: float) -> bool:
    """What a future holds within so many seconds; False where it holds nothing, or any error."""
    with suppress(Exception):
        return future.result(timeout=seconds)
    return False


def waited(future: Future[Found], seconds: float) -> bool:
    """Whether a future has come, or failed, within so many seconds."""
    try:
        future.exception(timeout=seconds)
    except FutureTimeout:
        return False
    return True
