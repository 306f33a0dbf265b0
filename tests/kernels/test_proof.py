"""A path is believed where it gives what the batched one gives, and no other."""

from __future__ import annotations

import pytest
import torch

from kvmap.kernels import map_cache as kernel
from kvmap.kernels.map_cache.proof import disagreement
from tests.kernels.map_cases import CASES


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_right_path_is_believed_and_writes_nothing_of_the_callers(name):
    cache_map, inputs = CASES[name].build()
    output = CASES[name].columns(cache_map)
    before = [output.tensor(kind, layer).clone() for kind in kernel.KINDS for layer in cache_map.layers]
    layer = cache_map.layers[-1]
    assert disagreement(cache_map, inputs, output, layer, kernel.map_cache_reference) is None
    after = [output.tensor(kind, layer) for kind in kernel.KINDS for layer in cache_map.layers]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("kind", kernel.KINDS)
@pytest.mark.parametrize("fault", ["a tenth too large", "one number", "not a number", "zeros"])
def test_a_wrong_path_is_not(kind, fault):
    cache_map, inputs = CASES["plain"].build()
    output = CASES["plain"].columns(cache_map)
    layer = cache_map.layers[0]

    def wrong(cache_map, inputs, output, layers):
        kernel.map_cache_reference(cache_map, inputs, output, layers)
        written = output.tensor(kind, layer)
        if fault == "one number":
            written[0, 0, -1, -1] += written.abs().max()
        elif fault == "not a number":
            written[0, 0, 0, 0] = torch.nan
        else:
            written.mul_(1.1 if fault == "a tenth too large" else 0)

    assert f"{kind}s of layer {layer}" in disagreement(cache_map, inputs, output, layer, wrong)


def test_a_path_that_fails_is_not():
    cache_map, inputs = CASES["plain"].build()

    def fails(*args):
        raise RuntimeError("out of resource: shared memory\nrequired 300000")

    found = disagreement(cache_map, inputs, CASES["plain"].columns(cache_map), cache_map.layers[0], fails)
    assert found == "RuntimeError: out of resource: shared memory"
