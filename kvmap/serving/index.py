"""The longest published prefix of a prompt."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from kvmap.errors import KvmapError
from kvmap.serving.keys import BLOCK_TOKENS, block_keys, common_length
from kvmap.serving.manifest import Manifest, read_manifest
from kvmap.serving.store import Listed, Store

_log = logging.getLogger(__name__)

_TRIED_AT_A_KEY = 16


@dataclass(frozen=True, eq=False)
class Match:
    """A published cache and how many of its first tokens a prompt begins with."""

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
        except (KvmapError, OSError) as error:
            _log.warning("%s is left alone: %s", entry.key, error)
        # one that cannot be read is remembered, so that it is not read for every request
        self._known[entry.key] = (entry, manifest)
        for block in manifest.block_keys if manifest is not None else ():
            self._by_key[block][entry.key] = None


def announcement_text(namespace: str, token_ids: Sequence[int]) -> str:
    """What a source says of a cache that it is about to write."""
    return json.dumps({"keys": block_keys(namespace, token_ids)})


def announced_length(store: Store, namespace: str, token_ids: Sequence[int]) -> int:
    """Of the prompt's first tokens, how many are being written by some source, in full blocks."""
    mine = block_keys(namespace, token_ids)
    longest = 0
    for text in store.announcements().values():
        try:
            theirs = json.loads(text)["keys"]
            longest = max(longest, common_length(mine, theirs))
        except (ValueError, KeyError, TypeError):
            continue
    return longest * BLOCK_TOKENS
