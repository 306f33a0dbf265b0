"""Concentration of planted errors, against what is computed by hand."""

from __future__ import annotations

import pytest
import torch

from kvmap.diagnostics.concentration import gram, key_concentration, value_concentration
from kvmap.diagnostics.findings import text_tables
from kvmap.diagnostics.streaming import diagnose_texts
from kvmap.diagnostics.texts import Text
from kvmap.fit.features import geometry_shape
from kvmap.mappers import IdentityMapper
from kvmap.transfer import TransferOptions
from tests.diagnostics.plain_loops import KINDS_OF_TOKENS, identity, observe, self_pair
from tests.tiny_random_models import random_ids

N, D = 40, 6
IDS = random_ids(1, 12, seed=8)
# keys that are mapped as they lie in the cache: what is planted is what is found
AS_CACHED = TransferOptions(native_head=0, rope="coupled")


@pytest.fixture(scope="module")
def queries():
    """(n, d) with singular values that differ."""
    return torch.randn(N, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * torch.arange(
        1, 7
    )


@pytest.mark.parametrize("j", range(D))
def test_a_key_error_along_one_singular_vector_weighs_as_its_singular_value(queries, j):
    _, sigma, vectors = torch.linalg.svd(queries)
    sizes = torch.linspace(1, 2, N, dtype=torch.float64)[:, None]
    error = sizes * vectors[j]
    found = key_concentration((queries.T @ queries)[None], (error.T @ error)[None])
    assert float(found) == pytest.approx(float(D * sigma[j] ** 2 / (sigma**2).sum()), rel=1e-12)


def test_a_key_error_alike_in_all_directions_is_not_concentrated(queries):
    found = key_concentration((queries.T @ queries)[None], 3 * torch.eye(D, dtype=torch.float64)[None])
    assert float(found) == pytest.approx(1.0, rel=1e-12)


def test_a_key_error_where_no_query_reads_is_none_at_all():
    query, error = torch.zeros(2, 1, D), torch.zeros(2, 1, D)
    query[:, 0, 0], error[:, 0, 1] = 1.0, 1.0
    assert float(key_concentration(gram(query), gram(error))) == 0.0


def test_heads_of_a_group_read_the_errors_of_their_one_kv_head():
    grams = torch.randn(4, D, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    grams = grams @ grams.transpose(1, 2)
    errors = grams[[1, 2]]
    found = key_concentration(grams, errors)
    for head in range(4):
        alone = key_concentration(grams[head : head + 1], errors[head // 2 : head // 2 + 1])
        assert float(found[head]) == pytest.approx(float(alone), rel=1e-12)
    values = value_concentration(
        torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.full((4,), 2.0), torch.tensor([5.0, 10.0]), 10
    )
    assert values.tolist() == pytest.approx([1.0, 2.0, 1.5, 2.0])


def test_without_an_error_it_is_one_by_definition():
    none = torch.zeros(1, D, D, dtype=torch.float64)
    assert float(key_concentration(torch.eye(D, dtype=torch.float64)[None], none)) == 1.0
    zero = torch.zeros(1, dtype=torch.float64)
    assert float(value_concentration(zero, torch.ones(1, dtype=torch.float64), zero, 7)) == 1.0


class Planted(IdentityMapper):
    """The identity, but for an error added to the keys or values of one layer."""

    def __init__(self, pair, layer, kind, error):
        super().__init__(geometry_shape(pair.target.geometry))
        self.place, self.error = (layer, kind), error

    def map_layer(self, layer, keys, values, *native):
        found = {"key": keys[layer], "value": values[layer]}
        if layer == self.place[0]:
            kind = self.place[1]
            found[kind] = found[kind] + self.error[None, :, : found[kind].shape[2]]
        return found["key"], found["value"]


def rows_of(pair, mapper):
    text = Text.of_contexts("questions", IDS.tolist())
    found = diagnose_texts(pair, mapper, [text], KINDS_OF_TOKENS, AS_CACHED, query_block=4)
    return text_tables(found.values())["attention_output"]


@pytest.fixture(scope="module")
def pair():
    return self_pair("llama")


@pytest.fixture(scope="module")
def seen(pair):
    """The target's own queries and weights."""
    return observe(pair, identity(pair), IDS[0].tolist(), AS_CACHED)


@pytest.mark.parametrize("j", [0, -1])
def test_an_error_planted_in_the_keys_of_a_model_is_found_where_it_is(pair, seen, j):
    query = seen.layers[1].query
    d, kv_head, head = query.shape[2], 1, 3
    _, sigma, vectors = torch.linalg.svd(query[head], full_matrices=True)
    sigma = torch.cat([sigma, sigma.new_zeros(d - len(sigma))])
    error = torch.zeros(2, IDS.shape[1], d)
    error[kv_head] = 0.1 * vectors[j].float()
    for row in rows_of(pair, Planted(pair, 1, "key", error)):
        if (row["layer"], row["head"]) == (1, head):
            expected = float(d * sigma[j] ** 2 / (sigma**2).sum())
            # the error is the difference of float32 keys
            assert row["concentration_key"] == pytest.approx(expected, rel=1e-4)
        elif row["layer"] == 0 or row["kv_head"] != kv_head:
            assert row["concentration_key"] == 1.0
        assert row["concentration_value"] == 1.0


def test_a_wrong_value_at_the_most_attended_token_is_concentrated_as_its_attention_is(pair, seen):
    layer, head, n = seen.layers[1], 3, IDS.shape[1] - 1
    received = torch.zeros(n, dtype=torch.float64)
    for u in range(n):
        received[: u + 1] += torch.tensor(layer.weights(head, u, layer.own), dtype=torch.float64).square()
    most, least = int(received.argmax()), int(received.argmin())
    found = {}
    for token in (most, least):
        error = torch.zeros(2, IDS.shape[1], layer.query.shape[2])
        error[layer.shared(head), token] = 0.5
        rows = rows_of(pair, Planted(pair, 1, "value", error))
        (found[token],) = [r["concentration_value"] for r in rows if (r["layer"], r["head"]) == (1, head)]
        # float32 softmax and values
        assert found[token] == pytest.approx(float(n * received[token] / received.sum()), rel=1e-4)
        assert {row["concentration_key"] for row in rows} == {1.0}
    assert found[most] > 1 > found[least]
