"""Planned times against counts by hand, of public shapes that need no download."""

from __future__ import annotations

import pytest

from kvmap.economics import EconomicsError
from kvmap.economics.pairs import latencies_of_models
from kvmap.economics.planned import PlannedMap, planned_latencies
from kvmap.errors import UnknownName
from kvmap.models.spec import ModelSpec
from kvmap.planning.devices import DEVICES
from kvmap.planning.models import ModelFacts, read_facts

LENGTHS = (1024, 32768)
PEAK, RATE = 0.5 * 989e12, 3.35e12  # of an H100: half of its bfloat16 peak, and its bandwidth
# Of Qwen3 14B and 32B: layers, hidden size, query heads, gated width; both have 8 KV heads of 128.
SHAPES = {"source": (40, 5120, 40, 17408), "target": (64, 5120, 64, 25600)}
VOCABULARY = 151936


@pytest.fixture(scope="module")
def facts() -> dict[str, ModelFacts]:
    return {role: read_facts(ModelSpec(f"Qwen/Qwen3-{n}B")) for role, n in (("source", 14), ("target", 32))}


def layer_weights(role: str) -> int:
    n_layers, hidden, heads, mlp = SHAPES[role]
    return n_layers * hidden * (2 * heads * 128 + 2 * 8 * 128 + 3 * mlp)


def prefill_ms(role: str, n: int) -> float:
    n_layers, _, heads, _ = SHAPES[role]
    attention = 4 * n_layers * heads * 128 * n * (n + 1) / 2
    return 1e3 * (2 * n * layer_weights(role) + attention) / PEAK


def cache_bytes(role: str, n: int) -> int:
    return 2 * SHAPES[role][0] * 8 * 128 * n * 2


def test_prefills_and_caches(facts: dict[str, ModelFacts]) -> None:
    found = planned_latencies(*facts.values(), PlannedMap(1, 1, "bfloat16"), DEVICES["h100"], LENGTHS)
    for place, n in enumerate(LENGTHS):
        assert found.ms["source_prefill"][place] == pytest.approx(prefill_ms("source", n))
        assert found.ms["re_prefill"][place] == pytest.approx(prefill_ms("target", n))
        assert found.n_bytes["source_bytes"][place] == cache_bytes("source", n)
        assert found.n_bytes["mapped_bytes"][place] == cache_bytes("target", n)
    assert "planned for h100 at 50%" in found.origin


def test_a_token_reads_all_weights_and_the_cache(facts: dict[str, ModelFacts]) -> None:
    found = planned_latencies(*facts.values(), PlannedMap(1, 1, "bfloat16"), DEVICES["h100"], LENGTHS)
    # embedding and head are each vocabulary × hidden; norms and biases are less than a thousandth
    for role in ("source", "target"):
        weights = 2 * (layer_weights(role) + 2 * VOCABULARY * 5120)
        for place, n in enumerate(LENGTHS):
            expected = 1e3 * (weights + cache_bytes(role, n)) / RATE
            assert found.ms[f"{role}_token"][place] == pytest.approx(expected, rel=1e-3)


def test_a_hand_off_is_the_map_and_the_ends(facts: dict[str, ModelFacts]) -> None:
    """The map's products for all columns but two, and then one pass over the target's weights."""
    n_weights = 2 * 64 * 8 * (8 * 8 * 128) * 128
    mapping = PlannedMap(n_weights, 2 * n_weights, "bfloat16")
    found = planned_latencies(*facts.values(), mapping, DEVICES["h100"], LENGTHS)
    mapped = 1e3 * 2 * (32768 - 2) * n_weights / PEAK
    assert found.ms["hand_off"][1] == pytest.approx(mapped + found.ms["target_token"][1], rel=1e-6)


def test_native_layers_are_the_targets_own(facts: dict[str, ModelFacts]) -> None:
    none, half, most = (
        planned_latencies(
            *facts.values(), PlannedMap(1, 1, "bfloat16", native_layers=m), DEVICES["h100"], LENGTHS
        ).ms["hand_off"][1]
        for m in (0, 32, 63)
    )
    assert none < half < most
    assert most == pytest.approx(prefill_ms("target", 32768) * 62 / 64, rel=0.02)


def test_more_gpus_take_less_time_in_proportion(facts: dict[str, ModelFacts]) -> None:
    mapping = PlannedMap(10**9, 2 * 10**9, "bfloat16")
    one = planned_latencies(*facts.values(), mapping, DEVICES["h100"], LENGTHS)
    four = planned_latencies(*facts.values(), mapping, DEVICES["h100"], LENGTHS, target_gpus=4)
    for arm in ("re_prefill", "hand_off", "target_token"):
        assert (4 * four.ms[arm]).tolist() == pytest.approx(one.ms[arm].tolist())
    assert four.ms["source_prefill"].tolist() == one.ms["source_prefill"].tolist()


def test_of_models_by_name() -> None:
    found = latencies_of_models("zoo:tiny-small", "zoo:tiny-large", "cpu", top_k=1, lengths=[64, 128])
    assert found.lengths.tolist() == [64, 128]
    assert found.origin.startswith("zoo:tiny-small to zoo:tiny-large, full_head, k = 1: planned for cpu")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"device": "h1000"}, "Did you mean 'h100'"),
        ({"support": "full"}, "unknown support 'full'"),
        ({"top_k": 99}, "top_k=99: the source has"),
        ({"lengths": [2]}, "more than 2 tokens"),
        ({"lengths": [10**7]}, "what both models hold"),
        ({"lengths": []}, "expected at least one"),
    ],
)
def test_what_cannot_be_planned(change: dict[str, object], said: str) -> None:
    with pytest.raises((EconomicsError, UnknownName), match=said):
        # keyword values of several types
        latencies_of_models("zoo:tiny-small", "zoo:tiny-large", **({"device": "cpu", "top_k": 1} | change))  # type: ignore[arg-type]
