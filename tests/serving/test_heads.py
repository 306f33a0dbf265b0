"""First tokens that were computed once are computed once."""

from __future__ import annotations

import torch

from kvmap.serving.vllm.heads import KeptHeads


def test_heads_are_kept_by_their_ids_and_the_least_used_go_first() -> None:
    kept = KeptHeads(n_most=2)
    layers = [(torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4)) for _ in range(3)]
    kept.put((1, 2), layers)
    kept.put((3,), layers)
    found = kept.get((1, 2))
    assert found is not None
    assert all(torch.equal(k, whole[:, :, :2]) for (k, _), (whole, _) in zip(found, layers, strict=True))
    kept.put((4,), layers)
    assert kept.get((3,)) is None
    assert kept.get((1, 2)) is not None
    layers[0][0].zero_()
    assert not torch.equal(found[0][0], torch.zeros(1, 2, 2, 4))
