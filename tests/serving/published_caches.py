"""Caches as a source would publish them, without an engine."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

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


def publish(
    store: Store, token_ids: Sequence[int], cuts: Sequence[int] = (), source: ModelIdentity = SOURCE
) -> Manifest:
    """Publish random keys and values of some tokens, in runs that end at `cuts` and at the end."""
    group, runs, start = secrets.token_hex(16), [], 0
    for number, stop in enumerate([*cuts, len(token_ids)]):
        files = []
        for layer, (n_heads, width) in enumerate(SHAPE):
            pair = [torch.randn(1, n_heads, stop - start, width) for _ in range(2)]
            pieces, sha256, n_bytes = part_bytes(*pair)
            store.put_part(group, part_name(number, layer), pieces)
            files.append(PartFile(sha256, n_bytes))
        runs.append(Run(start, stop, tuple(files)))
        start = stop
    manifest = Manifest(
        namespace(source), source, group, tuple(token_ids), SHAPE, "float32", ROTATIONS, tuple(runs), 0.5
    )
    store.put_manifest(manifest.key, manifest_text(manifest), group=group, n_bytes=manifest.n_bytes)
    return manifest
