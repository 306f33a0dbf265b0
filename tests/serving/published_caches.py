"""Caches as a source would publish them, without an engine."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace

import torch

from kvmap.models.identity import ModelIdentity
from kvmap.models.rope import Rotation
from kvmap.serving.keys import namespace
from kvmap.serving.manifest import Manifest, PartFile, Run, manifest_text
from kvmap.serving.parts import part_bytes, part_name
from kvmap.serving.store import Store

SOURCE = ModelIdentity("small", "w" * 64, "c" * 64, "t" * 64, "r" * 64, "float32")
SHAPE = ((2, 8), (2, 8), (1, 16))
TURNED = Rotation(torch.tensor([1.0, 0.3, 0.07, 1 / 3]), 1.1, "half")
ROTATIONS = (TURNED, TURNED, None)


def announce(
    store: Store, token_ids: Sequence[int], source: ModelIdentity = SOURCE, salt: str | None = None
) -> Manifest:
    """Say that a cache of some tokens is being written."""
    group = secrets.token_hex(16)
    manifest = Manifest(namespace(source, salt), source, group, tuple(token_ids), SHAPE, "float32", ROTATIONS)
    store.announce(group, manifest_text(manifest))
    return manifest


def write_part(store: Store, announced: Manifest, number: int, layer: int, start: int, stop: int) -> PartFile:
    """Random keys and values of a layer, as the number-th run of an announced cache."""
    n_heads, width = SHAPE[layer]
    pair = [torch.randn(1, n_heads, stop - start, width) for _ in range(2)]
    pieces, sha256, n_bytes = part_bytes(pair[0], pair[1], start)
    store.put_part(announced.group, part_name(number, layer), pieces)
    return PartFile(sha256, n_bytes)


def publish(
    store: Store, token_ids: Sequence[int], cuts: Sequence[int] = (), source: ModelIdentity = SOURCE
) -> Manifest:
    """Publish random keys and values of some tokens, in runs that end at `cuts` and at the end."""
    announced, runs, start = announce(store, token_ids, source), [], 0
    for number, stop in enumerate([*cuts, len(token_ids)]):
        files = [write_part(store, announced, number, layer, start, stop) for layer in range(len(SHAPE))]
        runs.append(Run(start, stop, tuple(files)))
        start = stop
    manifest = replace(announced, runs=tuple(runs), seconds=0.5)
    store.put_manifest(manifest.key, manifest_text(manifest), group=manifest.group, n_bytes=manifest.n_bytes)
    return manifest
