"""The gate: whatever is wrong with a cache or a mapper, the target's own answer comes back, bit for bit."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvmap.errors import UnknownName
from kvmap.fit.features import geometry_shape
from kvmap.mappers import (
    BiasOnlyMapper,
    Canary,
    FittedFor,
    IdentityMapper,
    Mapper,
    Verdict,
    attach_verdict,
    save_mapper,
)
from kvmap.models.cache import KVCache
from kvmap.models.capture import prefill
from kvmap.models.loaded import LoadedModel
from kvmap.models.rope import Rotation
from kvmap.models.storage import save_kv
from kvmap.transfer import (
    CAUSES,
    Gate,
    GateCounts,
    Gated,
    HandOff,
    TransferError,
    TransferOptions,
    continue_greedy,
    gated_transfer,
    is_sampled,
    native,
    request_key,
    transfer,
)
from kvmap.transfer.context import read_context
from tests.tiny_random_models import ORIGINAL_MAX, build, left_padding, random_ids
from tests.transfer.fitted_maps import fitted_mapper, source_model, target_model
from tests.transfer.noisy_map import NoisyMap
from tests.transfer.noisy_map import source_model as noisy_source
from tests.transfer.noisy_map import target_model as noisy_target

IDS, MASK = random_ids(2, 20, seed=3), left_padding(2, 20)
# identity maps are off by rounding alone, 1e-12 nats; the faults below by more than 0.01
RECORDED = [15, 44, 46]
ALWAYS = Gate(canary=Canary(1e-6, n_tokens=4, share=1.0))


@cache
def model() -> LoadedModel:
    return LoadedModel.from_model(build("llama_llama3", seed=1, n_layers=3), name="both")


@cache
def other_checkpoint() -> LoadedModel:
    return LoadedModel.from_model(build("llama_llama3", seed=7, n_layers=3), name="another checkpoint")


def identity(rope: str = "strip") -> Mapper:
    """The exact map of `model` onto itself, which knows what it is of."""
    mapper = IdentityMapper(geometry_shape(model().geometry))
    mapper.fitted_for = FittedFor(model().identity, model().identity, rope)
    return mapper


@cache
def source() -> KVCache:
    return prefill(model(), IDS, MASK)


def same_bits(a: HandOff, b: HandOff) -> bool:
    tensors = [(*hand_off.kv.keys, *hand_off.kv.values, hand_off.logits) for hand_off in (a, b)]
    return all(torch.equal(x, y) for x, y in zip(*tensors, strict=True))


def greedy(target: LoadedModel, hand_off: HandOff) -> list[list[int]]:
    prefill(target, IDS[:, :2])  # a dynamic model keeps the frequencies of the longest text it has read since
    return continue_greedy(target, hand_off, 5)


def assert_native(gated: Gated, target: LoadedModel, ids: Tensor = IDS, mask: Tensor | None = MASK) -> None:
    """Logits, cache and greedy continuation are the target's own, and counted as such."""
    own = native(target, ids, mask)
    assert same_bits(gated.hand_off, own)
    assert gated.hand_off.kv.exact
    assert gated.hand_off.kv.owner == target.identity
    assert gated.hand_off.n_mapped == 0
    assert greedy(target, gated.hand_off) == greedy(target, own)
    assert gated.native_seconds is not None


def changed(kv: KVCache, kind: str, change: Callable[[Tensor], Tensor], layer: int = 1) -> KVCache:
    """The cache with one layer's keys or values changed."""
    layers = [part.clone() for part in getattr(kv, kind)]
    layers[layer] = change(layers[layer])
    return replace(kv, **{kind: tuple(layers)})


def at(column: int, value: float) -> Callable[[Tensor], Tensor]:
    def change(part: Tensor) -> Tensor:
        part[0, 0, column, 0] = value
        return part

    return change


def zeroed_but_last(part: Tensor) -> Tensor:
    part[:, :, :-1] = 0
    return part


def second_row_zeroed(part: Tensor) -> Tensor:
    part[1] = 0
    return part


def slower(kv: KVCache) -> KVCache:
    """The same keys, said to carry another rotation."""
    assert kv.rotations is not None
    wrong = tuple(r and Rotation(r.inv_freq * 0.5, r.scaling, r.layout) for r in kv.rotations)
    return replace(kv, rotations=wrong)


# what befalls the source's cache, and why it is not used
CACHE_FAULTS: dict[str, tuple[Callable[[], KVCache], str]] = {
    "NaN in a value": (lambda: changed(source(), "values", at(9, float("nan"))), "not_finite"),
    "infinity in a key": (lambda: changed(source(), "keys", at(9, float("inf"))), "not_finite"),
    "a layer of zero keys": (lambda: changed(source(), "keys", torch.zeros_like), "empty_layer"),
    "a layer of zero values": (lambda: changed(source(), "values", torch.zeros_like, 0), "empty_layer"),
    "zeros but for the last token": (lambda: changed(source(), "values", zeroed_but_last), "canary"),
    "one row zeroed": (lambda: changed(source(), "values", second_row_zeroed), "empty_layer"),
    "two layers in each other's place": (
        lambda: replace(source(), values=(source().values[1], source().values[0], source().values[2])),
        "canary",
    ),
    "rotated keys said to be stripped": (lambda: replace(source(), rotations=None), "canary"),
    "stripped keys said to be rotated": (
        lambda: replace(source().strip(), rotations=source().rotations),
        "canary",
    ),
    "the wrong rotation": (lambda: slower(source()), "canary"),
    "positions off by one": (lambda: replace(source(), positions=source().positions + 1), "canary"),
    "another text": (lambda: prefill(model(), random_ids(2, 20, seed=4), MASK), "canary"),
    "another checkpoint": (lambda: prefill(other_checkpoint(), IDS, MASK), "mismatch"),
    "another checkpoint, unsigned": (
        lambda: replace(prefill(other_checkpoint(), IDS, MASK), owner=None),
        "canary",
    ),
    "a model of other shapes": (lambda: prefill(target_model(), IDS, MASK), "mismatch"),
    "a layer too few": (lambda: source().first_layers(2), "mismatch"),
    "fewer tokens": (lambda: source().slice_tokens(0, 19), "mismatch"),
    "fewer rows": (lambda: source().select_rows([0]), "mismatch"),
    "other pads": (lambda: prefill(model(), IDS), "mismatch"),
    "several rotations in one cache": (lambda: replace(source(), mixed=True), "mismatch"),
}


@pytest.mark.parametrize("fault", CACHE_FAULTS)
def test_a_bad_source_cache_gives_the_targets_own_answer(fault: str) -> None:
    make, cause = CACHE_FAULTS[fault]
    gated = gated_transfer(make(), identity(), model(), IDS, MASK, gate=ALWAYS)
    assert (gated.cause, gated.status) == (cause, CAUSES[cause]), gated.reason
    assert gated.reason
    assert "\n" not in gated.reason
    assert (gated.canary_kl_nats is not None) == (cause == "canary")
    assert_native(gated, model())


class Failing(IdentityMapper):
    """Raises, or gives something of another shape."""

    kind = "failing"
    fault: Any = None

    def cache_map(self) -> None:
        return None

    def map_layer(self, layer: int, keys: Any, values: Any, *native: Any) -> tuple[Tensor, Tensor]:
        if isinstance(self.fault, Exception):
            raise self.fault
        key, value = super().map_layer(layer, keys, values, *native)
        return self.fault(key), value


def failing(fault: Any) -> Mapper:
    mapper = Failing(geometry_shape(model().geometry))
    mapper.fault = fault
    return mapper


def fitted_elsewhere() -> Mapper:
    mapper = identity()
    mapper.fitted_for = FittedFor(other_checkpoint().identity, model().identity, "strip")
    return mapper


def fitted_for_another_target() -> Mapper:
    mapper = identity()
    mapper.fitted_for = FittedFor(model().identity, other_checkpoint().identity, "strip")
    return mapper


def too_many_native_layers() -> Mapper:
    mapper = identity()
    mapper.native_layers = 4
    return mapper


MAPPER_FAULTS: dict[str, tuple[Callable[[], Mapper], str]] = {
    "fitted on another source": (fitted_elsewhere, "mismatch"),
    "fitted for another target": (fitted_for_another_target, "mismatch"),
    "fitted for another strategy": (lambda: identity("coupled"), "mismatch"),
    "of other shapes": (lambda: fitted_mapper("full-head"), "mismatch"),
    "more native layers than layers": (too_many_native_layers, "mismatch"),
    "it raises": (lambda: failing(RuntimeError("a shape\nthat cannot be")), "failure"),
    "it gives another shape": (lambda: failing(lambda key: key[..., :-1]), "failure"),
    "it gives NaN": (lambda: failing(lambda key: key * float("nan")), "not_finite"),
    "it gives zeros": (lambda: failing(torch.zeros_like), "canary"),
    "it gives the sign wrong": (lambda: failing(torch.neg), "canary"),
}


@pytest.mark.parametrize("fault", MAPPER_FAULTS)
def test_a_bad_mapper_gives_the_targets_own_answer(fault: str) -> None:
    make, cause = MAPPER_FAULTS[fault]
    gated = gated_transfer(source(), make(), model(), IDS, MASK, gate=ALWAYS)
    assert (gated.cause, gated.status) == (cause, CAUSES[cause]), gated.reason
    assert "\n" not in gated.reason
    assert_native(gated, model())


def test_a_random_map_is_caught_by_the_canary_alone() -> None:
    kv = prefill(noisy_source(), IDS, MASK)
    mapper, target = NoisyMap(noisy_target()), noisy_target()
    assert gated_transfer(kv, mapper, target, IDS, MASK).status == "applied"
    gated = gated_transfer(kv, mapper, target, IDS, MASK, gate=Gate(canary=Canary(0.5, share=1.0)))
    assert (gated.status, gated.cause) == ("fell_back", "canary")
    assert_native(gated, target)


@pytest.mark.parametrize("fault", ["cut", "gone", "verdict altered", "manifest gone"])
def test_a_mappers_folder_that_is_damaged_gives_the_targets_own_answer(fault: str, tmp_path: Path) -> None:
    save_mapper(identity(), tmp_path, {})
    attach_verdict(tmp_path, Verdict("go", 1.0, 1.0, 1.0, 0.9))
    assert gated_transfer(source(), tmp_path, model(), IDS, MASK).status == "applied"
    tensors, manifest = tmp_path / "mapper.safetensors", tmp_path / "manifest.json"
    if fault == "cut":
        tensors.write_bytes(tensors.read_bytes()[:-1])
    elif fault == "gone":
        tensors.unlink()
    elif fault == "manifest gone":
        manifest.unlink()
    else:
        path = tmp_path / "verdict.json"
        path.write_text(path.read_text().replace("0.9", "0.1"))
    gated = gated_transfer(source(), tmp_path, model(), IDS, MASK)
    assert (gated.status, gated.cause) == ("fell_back", "mapper_file")
    assert_native(gated, model())


@pytest.mark.parametrize("fault", ["cut", "gone", "no cache"])
def test_a_cache_file_that_is_damaged_gives_the_targets_own_answer(fault: str, tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    save_kv(source(), path)
    assert gated_transfer(path, identity(), model(), IDS, MASK).status == "applied"
    if fault == "cut":
        path.write_bytes(path.read_bytes()[:-9])
    elif fault == "gone":
        path.unlink()
    else:
        save_mapper(fitted_mapper("full-head"), tmp_path, {})
        path = tmp_path / "mapper.safetensors"
    gated = gated_transfer(path, identity(), model(), IDS, MASK)
    assert (gated.status, gated.cause) == ("fell_back", "cache_file")
    assert_native(gated, model())


@pytest.mark.parametrize(
    "options", [{}, {"hold_back": 3}, {"native_head": 0}, {"recompute_share": 0.3}], ids=str
)
def test_what_passes_is_the_hand_off_itself(options: dict[str, Any]) -> None:
    kv = prefill(source_model(), IDS, MASK)
    mapper, target = fitted_mapper("full-head"), target_model()
    expected = transfer(kv, mapper, target, IDS, MASK, **options)
    for gate in (None, Gate(canary=Canary(1e3, share=1.0))):
        gated = gated_transfer(kv, mapper, target, IDS, MASK, options=TransferOptions(**options), gate=gate)
        assert (gated.status, gated.cause) == ("applied", None)
        assert same_bits(gated.hand_off, expected)
        assert not gated.hand_off.kv.exact
        assert (gated.native_seconds is None) == (gate is None)
        assert "tokens mapped" in gated.reason


@pytest.mark.parametrize("hold_back", [1, 2])
def test_falling_back_holds_back_what_was_asked_for(hold_back: int) -> None:
    options = TransferOptions(hold_back=hold_back)
    gated = gated_transfer(source(), fitted_elsewhere(), model(), IDS, MASK, options=options)
    assert same_bits(gated.hand_off, native(model(), IDS, MASK, hold_back))
    assert gated.hand_off.n_hold_back == 2 * hold_back


def by_hand(
    kv: KVCache, mapper: Mapper, target: LoadedModel, hold_back: int, n_tokens: int
) -> list[list[float]]:
    """KL of every compared token, one hand-off of a shorter context for each; an oracle in another order.

    The token at column j is judged by the context up to it, of which the columns before the last
    max(m, hold_back) of the whole are mapped, and the rest is the target's.
    """
    start = IDS.shape[1] - max(n_tokens, hold_back)
    rows: list[list[float]] = [[], []]
    for end in range(IDS.shape[1] - n_tokens + 1, IDS.shape[1] + 1):
        ids, mask = IDS[:, :end], MASK[:, :end]
        mapped = transfer(kv.slice_tokens(0, end), mapper, target, ids, mask, hold_back=end - start).logits
        own = native(target, ids, mask).logits
        kl = torch.nn.functional.kl_div(
            mapped.double().log_softmax(-1), own.double().log_softmax(-1), log_target=True, reduction="none"
        )
        for row, value in zip(rows, kl.sum(-1).tolist(), strict=True):
            row.append(value)
    return rows


@pytest.mark.parametrize(("hold_back", "n_tokens"), [(1, 1), (1, 5), (3, 3), (3, 2), (2, 6)])
def test_the_canary_is_the_kl_of_the_last_tokens(hold_back: int, n_tokens: int) -> None:
    kv = prefill(source_model(), IDS, MASK)
    mapper, target = fitted_mapper("full-head"), target_model()
    expected = max(sum(row) / len(row) for row in by_hand(kv, mapper, target, hold_back, n_tokens))
    gated = gated_transfer(
        kv,
        mapper,
        target,
        IDS,
        MASK,
        options=TransferOptions(hold_back=hold_back),
        gate=Gate(canary=Canary(1e3, n_tokens, 1.0)),
    )
    assert gated.n_compared == n_tokens
    # float32 logits of other batch shapes
    assert gated.canary_kl_nats == pytest.approx(expected, rel=1e-3)


def test_the_threshold_itself_passes() -> None:
    kv = prefill(source_model(), IDS, MASK)
    mapper, target = fitted_mapper("full-head"), target_model()
    kl = gated_transfer(
        kv, mapper, target, IDS, MASK, gate=Gate(canary=Canary(1e3, share=1.0))
    ).canary_kl_nats
    assert kl is not None
    for limit, status in ((kl, "applied"), (kl * 0.999, "fell_back")):
        gate = Gate(canary=Canary(limit, share=1.0))
        assert gated_transfer(kv, mapper, target, IDS, MASK, gate=gate).status == status


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("mistral_sliding", {"sliding_window": 8}),
        ("gemma3", {"sliding_window": 8}),
        ("llama_dynamic", {}),
        ("phi3_longrope", {}),
    ],
)
def test_an_exact_map_passes_the_strictest_canary_in_every_kind_of_layer(
    family: str, settings: dict[str, Any]
) -> None:
    """Windows: the first compared tokens see further back; scaled models: beyond their first length."""
    both = LoadedModel.from_model(build(family, seed=1, **settings), name=family)
    ids = random_ids(2, ORIGINAL_MAX + 8, seed=5)
    mask = left_padding(2, ORIGINAL_MAX + 8)
    mapper = IdentityMapper(geometry_shape(both.geometry))
    gate = Gate(canary=Canary(1e-6, n_tokens=6, share=1.0))
    gated = gated_transfer(prefill(both, ids, mask), mapper, both, ids, mask, gate=gate)
    assert gated.status == "applied", gated.reason
    assert gated.n_compared == 6
    damaged = changed(prefill(both, ids, mask), "values", zeroed_but_last)
    gated = gated_transfer(damaged, mapper, both, ids, mask, gate=gate)
    assert gated.cause == "canary"
    assert_native(gated, both, ids, mask)


def test_more_tokens_than_a_context_can_spare_are_cut_to_what_leaves_something_mapped() -> None:
    gate = Gate(canary=Canary(1e-6, n_tokens=500, share=1.0))
    gated = gated_transfer(source(), identity(), model(), IDS, MASK, gate=gate)
    # the shorter row has 17 tokens: its own first, at least one mapped, and the rest compared
    assert (gated.status, gated.n_compared) == ("applied", 15)
    assert gated_transfer(slower(source()), identity(), model(), IDS, MASK, gate=gate).cause == "canary"


def test_a_context_with_nothing_to_map_is_the_targets_own_and_is_not_compared() -> None:
    ids = IDS[:, :2]
    gated = gated_transfer(prefill(model(), ids), identity(), model(), ids, gate=ALWAYS)
    assert (gated.status, gated.canary_kl_nats) == ("applied", None)
    assert "nothing to map" in gated.reason
    assert same_bits(gated.hand_off, native(model(), ids))
    assert gated.hand_off.kv.exact


@pytest.mark.parametrize(
    ("verdict", "settings", "applied"),
    [
        ("go", {}, True),
        ("no_go", {}, False),
        ("try_mlp", {}, False),
        ("not_enough_evidence", {}, True),
        (None, {}, True),
        ("go", {"require_verdict": True}, True),
        ("not_enough_evidence", {"require_verdict": True}, False),
        (None, {"require_verdict": True}, False),
        ("no_go", {"allow": ("no_go",)}, True),
        ("try_mlp", {"allow": ("no_go",)}, False),
        ("not_enough_evidence", {"require_verdict": True, "allow": ("not_enough_evidence",)}, True),
    ],
)
def test_the_verdict_decides(verdict: str | None, settings: dict[str, Any], applied: bool) -> None:
    mapper = identity()
    if verdict is not None:
        mapper.verdict = Verdict(verdict, None, None, None, 0.9, reasons=("R² held out below 0",))
    gated = gated_transfer(source(), mapper, model(), IDS, MASK, gate=Gate(**settings))
    assert gated.status == ("applied" if applied else "fell_back")
    if not applied:
        assert gated.cause == "verdict"
        assert (verdict is None) or "R² held out below 0" in gated.reason
        assert_native(gated, model())


def test_the_mappers_own_canary_is_used_unless_the_gate_has_one() -> None:
    mapper = identity()
    mapper.verdict = Verdict("go", 1.0, 1.0, 1.0, 0.9, canary=Canary(1e-6, n_tokens=3, share=1.0))
    bad = slower(source())
    gated = gated_transfer(bad, mapper, model(), IDS, MASK)
    assert (gated.cause, gated.n_compared) == ("canary", 3)
    for canary in (Canary(1e6, share=1.0), Canary(0.0, share=0.0)):
        gated = gated_transfer(bad, mapper, model(), IDS, MASK, gate=Gate(canary=canary))
        assert gated.status == "applied"


def test_an_unknown_origin_is_refused_where_identities_are_required() -> None:
    gate = Gate(require_identity=True)
    assert gated_transfer(source(), identity(), model(), IDS, MASK, gate=gate).status == "applied"
    nameless = IdentityMapper(geometry_shape(model().geometry))
    for kv, mapper in ((replace(source(), owner=None), identity()), (source(), nameless)):
        gated = gated_transfer(kv, mapper, model(), IDS, MASK, gate=gate)
        assert (gated.status, gated.cause) == ("unsupported", "unknown_origin")
        assert_native(gated, model())


def test_numbers_that_do_not_fit_the_dtype_are_refused_unless_allowed() -> None:
    """Float16 ends at 65,504: three mapped values of each layer's bias are beyond it."""
    target = LoadedModel.from_model(build("qwen3", seed=2, n_layers=2).half())
    shape = geometry_shape(target.geometry)
    bias = {kind: [torch.full(layer, 0.5) for layer in shape] for kind in ("key", "value")}
    bias["value"][1][1, 3] = -1e6
    mapper = BiasOnlyMapper(geometry_shape(model().geometry), shape, bias)
    gated = gated_transfer(source(), mapper, target, IDS, MASK)
    assert (gated.status, gated.cause) == ("fell_back", "clamped")
    assert "float16" in gated.reason
    assert_native(gated, target)
    gated = gated_transfer(source(), mapper, target, IDS, MASK, gate=Gate(max_clamped=None))
    assert gated.status == "applied" or gated.cause == "not_finite"


def test_a_mistake_of_the_caller_raises() -> None:
    with pytest.raises(TransferError, match="left padding"):
        gated_transfer(source(), identity(), model(), IDS, 1 - MASK)
    with pytest.raises(TransferError, match="input_ids have shape"):
        gated_transfer(source(), identity(), model(), IDS[0], None)
    with pytest.raises(UnknownName, match="Did you mean 'no_go'"):
        Gate(allow=("nogo",))
    with pytest.raises(TransferError, match="expected a tuple"):
        # the wrong type is what is refused
        Gate(allow="no_go")  # type: ignore[arg-type]
    with pytest.raises(TransferError, match="max_clamped=-1"):
        Gate(max_clamped=-1)


def test_nothing_that_was_given_changes() -> None:
    kv = source()
    before = [part.clone() for part in (*kv.keys, *kv.values)]
    gated_transfer(kv, identity(), model(), IDS, MASK, gate=ALWAYS)
    gated_transfer(kv, fitted_elsewhere(), model(), IDS, MASK, gate=ALWAYS)
    assert all(torch.equal(a, b) for a, b in zip(before, (*kv.keys, *kv.values), strict=True))


class TestSampling:
    def test_a_share_of_the_requests_is_drawn(self) -> None:
        drawn = sum(is_sampled(str(number), 0.05) for number in range(20_000))
        # five standard deviations of a binomial
        assert abs(drawn - 1000) < 5 * (20_000 * 0.05 * 0.95) ** 0.5
        assert not any(is_sampled(str(number), 0.0) for number in range(1000))
        assert all(is_sampled(str(number), 1.0) for number in range(1000))

    def test_what_is_drawn_at_one_share_is_drawn_at_a_larger_one(self) -> None:
        draws = [{n for n in range(2000) if is_sampled(str(n), share, 3)} for share in (0.01, 0.1, 0.5)]
        assert draws[0] < draws[1] < draws[2]

    def test_the_draw_is_the_same_in_every_process_and_another_for_another_seed(self) -> None:
        """Recorded: a replay months later must find the same requests."""
        assert [n for n in range(60) if is_sampled(str(n), 0.1)] == RECORDED
        assert [n for n in range(60) if is_sampled(str(n), 0.1, seed=1)] != RECORDED

    def test_pads_are_no_part_of_a_request(self) -> None:
        alone = read_context(model(), IDS[1:, 3:], None, 1)
        padded = read_context(model(), IDS[1:], MASK[1:], 1)
        assert request_key(alone) == request_key(padded)
        assert request_key(alone) != request_key(read_context(model(), IDS[1:, 4:], None, 1))
        assert request_key(read_context(model(), IDS, None, 1)) != request_key(
            read_context(model(), IDS.reshape(1, -1), None, 1)
        )

    def test_a_gate_compares_the_requests_that_are_drawn_and_no_others(self) -> None:
        gate = Gate(canary=Canary(1e-6, n_tokens=2, share=0.3), seed=5)
        for name in ("a", "b", "c", "d", "e", "f"):
            gated = gated_transfer(source(), identity(), model(), IDS, MASK, gate=gate, request=name)
            assert (gated.canary_kl_nats is not None) == is_sampled(name, 0.3, 5)

    def test_without_a_name_the_ids_decide(self) -> None:
        key = request_key(read_context(model(), IDS, MASK, 1))
        for seed in range(6):
            gate = Gate(canary=Canary(1e-6, n_tokens=2, share=0.5), seed=seed)
            gated = gated_transfer(source(), identity(), model(), IDS, MASK, gate=gate)
            assert (gated.canary_kl_nats is not None) == is_sampled(key, 0.5, seed)


class TestCounts:
    def test_every_answer_is_counted_once(self) -> None:
        counts = GateCounts()
        assert counts.mean_kl_nats is None
        for kv, mapper in (
            (source(), identity()),
            (slower(source()), identity()),
            (source(), fitted_elsewhere()),
            (source().first_layers(2), identity()),
        ):
            counts.add(gated_transfer(kv, mapper, model(), IDS, MASK, gate=ALWAYS))
        record = counts.record()
        assert counts.requests == 4
        assert counts.max_kl_nats is not None
        assert counts.max_kl_nats > 0.01
        assert json.loads(json.dumps(record)) == record
        # one of the two was all but exact
        assert record.pop("mean_kl_nats") == pytest.approx(record.pop("max_kl_nats") / 2, rel=1e-6)
        assert record == {
            "requests": 4,
            "applied": 1,
            "fell_back": 1,
            "unsupported": 2,
            "canaries": 2,
            "by_cause": {"canary": 1, "mismatch": 2},
        }

    def test_threads_lose_none(self) -> None:
        counts = GateCounts()
        gated = gated_transfer(source(), fitted_elsewhere(), model(), IDS, MASK)
        threads = [threading.Thread(target=lambda: [counts.add(gated) for _ in range(500)]) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert counts.unsupported == counts.by_cause["mismatch"] == 4000
