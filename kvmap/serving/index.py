"""The longest prefix of a prompt that is published, or being written."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from kvmap.errors import KvmapError
from kvmap.serving.keys import BLOCK_TOKENS, block_keys, common_length
from kvmap.serving.manifest import Manifest, read_announcement, read_manifest
from kvmap.serving.store import Listed, Store

_log = logging.getLogger(__name__)

_TRIED_AT_A_KEY = 16

#: a writer that has given no sign of life for so long is taken for dead
ALIVE_SECONDS = 5.0


@dataclass(frozen=True, eq=False)
class Match:
    """A cache and how many of its first tokens a prompt begins with."""

    manifest: Manifest
    n_tokens: int


class PrefixIndex:
    """What a store has published, by block key; read anew as far as it has changed.

    Prefixes shorter than one block are not found.
    """

    def __init__(self, store: Store, namespaces: Sequence[str] | None = None) -> None:
        """Args: the store; and the namespaces to keep, None: all."""
        self._store = store
        self._namespaces = None if namespaces is None else set(namespaces)
        self._known: dict[str, tuple[Listed, Manifest | None]] = {}
        self._by_key: dict[str, dict[str, None]] = defaultdict(dict)

    def longest(self, namespace: str, token_ids: Sequence[int]) -> Match | None:
        """The cache that has most of the prompt's first tokens; None where none has a block of them.

        Raises:
            StoreError, OSError: the store cannot be listed.
        """
        self.refresh()
        for key in reversed(block_keys(namespace, token_ids)):
            entries = list(self._by_key.get(key, ()))[-_TRIED_AT_A_KEY:]
            best: Match | None = None
            for entry in reversed(entries):
                manifest = self._known[entry][1]
                if manifest is None or manifest.namespace != namespace:
                    continue
                length = common_length(manifest.token_ids, tuple(token_ids))
                if length and (best is None or length > best.n_tokens):
                    best = Match(manifest, length)
            if best is not None:
                return best
        return None

    def refresh(self) -> None:
        """Read what was published since, forget what is gone."""
        listed = {entry.key: entry for entry in self._store.manifests()}
        for key in [key for key, (entry, _) in self._known.items() if listed.get(key) != entry]:
            self.forget(key)
        for key, entry in listed.items():
            if key not in self._known:
                self._learn(entry)

    def forget(self, key: str) -> None:
        """Until it is published anew, or listed anew."""
        _, manifest = self._known.pop(key, (None, None))
        for block in manifest.block_keys if manifest is not None else ():
            entries = self._by_key.get(block)
            if entries is not None:
                entries.pop(key, None)
                if not entries:
                    del self._by_key[block]

    def _learn(self, entry: Listed) -> None:
        manifest = None
        try:
            if (text := self._store.get_manifest(entry.key)) is None:
                return
            manifest = read_manifest(text)
            if manifest.key != entry.key:
                _log.warning("%s is published under the key of other tokens: left alone", entry.key)
                manifest = None
        except OSError as error:  # it may be read the next time
            _log.warning("%s cannot be read: %s", entry.key, error)
            return
        except KvmapError as error:
            _log.warning("%s is left alone: %s", entry.key, error)
        # one that cannot be read is remembered, so that it is not read for every request
        self._known[entry.key] = (entry, manifest)
        for block in manifest.block_keys if manifest is not None else ():
            self._by_key[block][entry.key] = None


class Announcements:
    """What sources are writing, as long as they give signs of life.

    Whether one does is told by its announcement's stamp alone, which changes, and by this process' clock: the
    storage may have another.
    """

    def __init__(self, store: Store) -> None:
        """Args: the store."""
        self._store = store
        self._known: dict[str, _Announced] = {}

    def longest(self, namespace: str, token_ids: Sequence[int]) -> Match | None:
        """The cache that will have most of the prompt's first tokens; None where none will have a block.

        Raises:
            StoreError, OSError: the store cannot be listed.
        """
        self._refresh()
        oldest = time.monotonic() - ALIVE_SECONDS
        best: Match | None = None
        for announced in self._known.values():
            manifest = announced.manifest
            if manifest is None or manifest.namespace != namespace or announced.seen < oldest:
                continue
            length = common_length(manifest.token_ids, tuple(token_ids))
            if length >= BLOCK_TOKENS and (best is None or length > best.n_tokens):
                best = Match(manifest, length)
        return best

    def _refresh(self) -> None:
        listed = {entry.key: entry.stamp for entry in self._store.announcements()}
        known, now = self._known, time.monotonic()
        self._known = {}
        for group, stamp in listed.items():
            before = known.get(group)
            with suppress(OSError):  # it may be read the next time
                before = before or _Announced(stamp, now, self._read(group))
            if before is not None:
                is_new = before.stamp != stamp
                self._known[group] = replace(before, stamp=stamp, seen=now) if is_new else before

    def _read(self, group: str) -> Manifest | None:
        try:
            text = self._store.get_announcement(group)
            return None if text is None else read_announcement(text)
        except KvmapError as error:
            _log.warning("what is announced as %s is left alone: %s", group, error)
            return None


@dataclass(frozen=True, eq=False)
class _Announced:
    """Attributes: the last stamp, when it was new to this process, and of what; None: it cannot be read."""

    stamp: int
    seen: float
    manifest: Manifest | None
