"""A model onto itself: whatever happens to a cache, the answer is plain vLLM's."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file

from kvmap.fit.features import geometry_shape
from kvmap.mappers.identity import IdentityMapper
from kvmap.mappers.store import identity_record, save_mapper
from kvmap.models.load import read_geometry, read_identity
from kvmap.models.spec import ModelSpec
from kvmap.zoo import weights_folder
from tests.serving.engine.engines import (
    Engine,
    Prompt,
    last_part_of,
    manifest_of,
    part_of,
    rewrite_manifest,
    running,
    wait_until_published,
)
from tests.serving.engine.prompts import zoo_prompts

MODEL = "tiny-large"
TAKE = {"take": True}
N = 24


def save_identity(folder: Path, model: str) -> Path:
    spec = ModelSpec(f"zoo:{model}", dtype="float32")
    record = identity_record(read_identity(spec))
    mapper = IdentityMapper(geometry_shape(read_geometry(spec)))
    save_mapper(mapper, folder, {"source": record, "target": record, "rope": "strip"})
    return folder


@dataclass(frozen=True)
class Twin:
    """An engine that takes what it has published; its storage; prompts, and its own answers to them."""

    engine: Engine
    storage: Path
    prompts: list[list[int]]
    plain: list[tuple[int, ...]]


@pytest.fixture(scope="module", params=[True, False], ids=["prefix caching", "no prefix caching"])
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twin]:
    folder = tmp_path_factory.mktemp("twin")
    settings = {
        "storage": folder / "storage",
        "mapper": save_identity(folder / "mapper", MODEL),
        "load_seconds": 1.0,
        "look_seconds": 0.5,
    }
    options = {"enable_prefix_caching": request.param, "num_gpu_blocks_override": 60}
    with running(weights_folder(MODEL), "kv_both", settings, **options) as engine:
        prompts = zoo_prompts(16)
        engine.publish(prompts)
        engine.forget()
        plain = [answer.tokens for answer in engine.run(prompts, N)]
        engine.forget()
        yield Twin(engine, folder / "storage", prompts, plain)


@pytest.fixture(autouse=True)
def _forgetful(twin: Twin) -> Iterator[None]:
    yield
    twin.engine.forget()


def caches_by_prefix(twin: Twin) -> bool:
    return bool(twin.engine.llm.llm_engine.vllm_config.cache_config.enable_prefix_caching)


def test_answers_on_a_taken_cache_are_plain_ones(twin: Twin) -> None:
    """Mixed lengths, eight at once, prompts in several steps, and too few pages for all of them."""
    answers = twin.engine.run(twin.prompts, N, TAKE)
    assert [answer.tokens for answer in answers] == twin.plain
    assert all(answer.is_applied for answer in answers)
    for answer, prompt in zip(answers, twin.prompts, strict=True):
        assert answer.record["n_mapped"] == len(prompt) - 1
        assert answer.record["n_held_back"] == 1
        assert answer.record["bytes"] > 0


def test_taken_pages_are_found_by_no_other_request(twin: Twin) -> None:
    answers = twin.engine.run(twin.prompts[:8], N, TAKE)
    assert all(answer.is_applied for answer in answers)
    longer = [[*p, *a.tokens, 7, 8, 9] for p, a in zip(twin.prompts[:8], answers, strict=True)]
    again = twin.engine.run([*twin.prompts[:8], *longer], 4)
    # a prompt is read anew, and the longer one finds what that one has read, at most
    assert [answer.n_cached for answer in again[:8]] == [0] * 8
    twin.engine.forget()
    twin.engine.run(twin.prompts[:8], N, TAKE)
    assert [answer.n_cached for answer in twin.engine.run(longer, 4)] == [0] * 8


def test_an_exact_prefix_is_used_first(twin: Twin) -> None:
    if not caches_by_prefix(twin):
        pytest.skip("no prefix is kept")
    prompt, plain = next((p, t) for p, t in zip(twin.prompts, twin.plain, strict=True) if len(p) >= 300)
    twin.engine.run([prompt[:100]], 1)
    (answer,) = twin.engine.run([prompt], N, TAKE)
    assert answer.tokens == plain
    assert answer.record["n_own_prefix"] == 96
    assert answer.record["n_mapped"] == len(prompt) - 97
    (again,) = twin.engine.run([prompt], N)
    assert (again.n_cached, again.tokens) == (96, plain)


def test_a_longer_prompt_takes_what_it_begins_with(twin: Twin) -> None:
    prompt = [*twin.prompts[0], *twin.prompts[1]]
    (plain,) = twin.engine.run([prompt], N)
    twin.engine.forget()
    (answer,) = twin.engine.run([prompt], N, TAKE)
    assert answer.tokens == plain.tokens
    assert answer.record["n_mapped"] == len(twin.prompts[0])
    assert answer.record["n_held_back"] == len(twin.prompts[1])


def test_a_shorter_prompt_takes_a_part(twin: Twin) -> None:
    prompt = max(twin.prompts, key=len)[:150]
    (plain,) = twin.engine.run([prompt], N)
    twin.engine.forget()
    (answer,) = twin.engine.run([prompt], N, TAKE)
    assert (answer.tokens, answer.record["n_mapped"]) == (plain.tokens, 149)


def cut_manifest(storage: Path, prompt: Prompt) -> None:
    path, _ = manifest_of(storage, prompt)
    path.write_text(path.read_text()[:-40])


def other_tokens(storage: Path, prompt: Prompt) -> None:
    path, _ = manifest_of(storage, prompt)
    rewrite_manifest(path, token_ids=[1, *prompt[1:]])


def no_manifest(storage: Path, prompt: Prompt) -> None:
    manifest_of(storage, prompt)[0].unlink()


def cut_part(storage: Path, prompt: Prompt) -> None:
    path = part_of(storage, prompt, 0, 3)
    path.write_bytes(path.read_bytes()[:-100])


def no_part(storage: Path, prompt: Prompt) -> None:
    part_of(storage, prompt, 0, 5).unlink()


def changed_part(storage: Path, prompt: Prompt) -> None:
    path = last_part_of(storage, prompt, 2)
    data = bytearray(path.read_bytes())
    data[-9] ^= 0x40
    path.write_bytes(data)


def swapped_parts(storage: Path, prompt: Prompt) -> None:
    a, b = last_part_of(storage, prompt, 1), last_part_of(storage, prompt, 4)
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)


def hanging_part(storage: Path, prompt: Prompt) -> None:
    """A pipe that nobody writes to looks like a part until it is read: its size is no part's, so it is found
    before anything is claimed.
    """
    path = part_of(storage, prompt, 0, 0)
    path.unlink()
    os.mkfifo(path)


FAULTS: dict[str, tuple[Callable[[Path, Prompt], None], str]] = {
    "manifest cut": (cut_manifest, "not_found"),
    "manifest of other tokens": (other_tokens, "not_found"),
    "no manifest": (no_manifest, "not_found"),
    "part cut": (cut_part, "partial"),
    "no part": (no_part, "partial"),
    "part changed": (changed_part, "cache_file"),
    "parts swapped": (swapped_parts, "cache_file"),
    "part that hangs": (hanging_part, "partial"),
}


@pytest.mark.parametrize("fault", sorted(FAULTS))
@pytest.mark.parametrize("n_own", [0, 64])
def test_a_damaged_cache_costs_nothing_but_time(twin: Twin, fault: str, n_own: int) -> None:
    damage, cause = FAULTS[fault]
    if n_own and not caches_by_prefix(twin):
        pytest.skip("no prefix is kept")
    prompts = zoo_prompts(8, lengths=(128, 200, 300), seed=1 + sorted(FAULTS).index(fault) + 50 * n_own)
    plain = [answer.tokens for answer in twin.engine.run(prompts, N)]
    twin.engine.forget()
    twin.engine.publish(prompts)
    twin.engine.forget()
    for prompt in prompts[::2]:
        damage(twin.storage, prompt)
    if n_own:
        twin.engine.run([prompt[: n_own + 5] for prompt in prompts], 1)
    answers = twin.engine.run(prompts, N, TAKE)
    assert [answer.tokens for answer in answers] == plain
    assert [answer.cause for answer in answers] == [cause, None] * 4
    # what is read after a failure is exact: it is found, and gives the same
    if caches_by_prefix(twin) and not n_own:
        twin.engine.forget()
        twin.engine.run(prompts[:1], N, TAKE)
        (again,) = twin.engine.run(prompts[:1], N)
        assert again.tokens == plain[0]
        assert again.n_cached == (len(prompts[0]) - 1) // 32 * 32


def test_a_request_that_asks_for_nothing_is_plain(twin: Twin) -> None:
    answers = twin.engine.run(twin.prompts[:3], N, [{}, {"take": False}, {"later": 1}])
    assert [answer.record for answer in answers] == [{}, {}, {}]
    assert [answer.tokens for answer in answers] == twin.plain[:3]


@pytest.mark.parametrize(
    ("asked", "outcome", "cause"),
    [
        ({"take": "yes"}, "unsupported", "request"),
        ({"take": True, "min_tokens": 1000}, "fell_back", "too_short"),
        ({"take": True, "require": "go"}, "fell_back", "verdict"),
    ],
)
def test_what_cannot_be_served_is_answered_plainly(
    twin: Twin, asked: dict[str, object], outcome: str, cause: str
) -> None:
    (answer,) = twin.engine.run(twin.prompts[:1], N, asked)
    assert answer.tokens == twin.plain[0]
    assert (answer.record["outcome"], answer.cause) == (outcome, cause)


def test_nothing_published_is_not_found(twin: Twin) -> None:
    (answer,) = twin.engine.run(zoo_prompts(1, seed=777), N, {**TAKE, "wait_seconds": 5.0})
    assert answer.cause == "not_found"


def test_a_request_waits_for_a_cache_that_is_announced(twin: Twin) -> None:
    """Taking and publishing one prompt at once: what is published serves those that wait."""
    (prompt,) = zoo_prompts(1, lengths=(400,), seed=778)
    asked = [{"publish": True}, {**TAKE, "wait_seconds": 20.0, "grace_seconds": 5.0}]
    published, taken = twin.engine.run([prompt, prompt], N, asked)
    assert published.record["published"] == len(prompt)
    assert taken.tokens == published.tokens
    assert taken.is_applied or taken.cause == "too_short"


def test_a_request_that_takes_and_publishes_does_not_wait_for_itself(twin: Twin) -> None:
    (prompt,) = zoo_prompts(1, lengths=(200,), seed=782)
    begun = time.monotonic()
    asked = {**TAKE, "publish": True, "wait_seconds": 60.0}
    (answer,) = twin.engine.run([prompt], 1, asked)
    assert time.monotonic() - begun < 30
    assert (answer.cause, answer.record["published"]) == ("not_found", len(prompt))


def test_an_output_is_published_and_continued(twin: Twin) -> None:
    (prompt,) = zoo_prompts(1, lengths=(200,), seed=779)
    (first,) = twin.engine.run([prompt], N, {"publish": True, "publish_output": True})
    assert first.record["published"] == len(prompt)
    assert first.record["output_pending"] == len(prompt) + N - 1
    turn = [*prompt, *first.tokens, *zoo_prompts(1, lengths=(40,), seed=780)[0]]
    twin.engine.forget()
    (plain,) = twin.engine.run([turn], N)
    wait_until_published(twin.storage, turn[: len(prompt) + N - 1])
    twin.engine.forget()
    (answer,) = twin.engine.run([turn], N, TAKE)
    assert answer.tokens == plain.tokens
    assert answer.record["n_mapped"] == len(prompt) + N - 1


def test_a_cache_that_lies_there_is_not_written_again(twin: Twin) -> None:
    (answer,) = twin.engine.run(twin.prompts[:1], 1, {"publish": True})
    assert answer.record["published"] == len(twin.prompts[0])
    assert answer.record["bytes"] == 0


def test_salts_keep_tenants_apart(twin: Twin) -> None:
    from vllm import SamplingParams

    (prompt,) = zoo_prompts(1, lengths=(200,), seed=781)
    found = []
    for salt, asked in (("a", {"publish": True}), ("b", TAKE), ("a", TAKE)):
        params = SamplingParams(
            temperature=0, max_tokens=1, extra_args={"kv_transfer_params": {"kvmap": asked}}
        )
        request = {"prompt_token_ids": prompt, "cache_salt": salt}
        (output,) = twin.engine.llm.generate([request], params, use_tqdm=False)
        found.append(output.kv_transfer_params["kvmap"])
        twin.engine.forget()
    assert found[0]["published"] == 200
    assert found[1]["cause"] == "not_found"
    assert found[2]["outcome"] == "applied"


def test_an_aborted_request_leaves_the_engine_well(twin: Twin) -> None:
    from vllm import SamplingParams

    engine = twin.engine.llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=N, extra_args={"kv_transfer_params": {"kvmap": TAKE}})
    for number, prompt in enumerate(twin.prompts[:6]):
        engine.add_request(f"abort-{number}", {"prompt_token_ids": prompt}, params)
    engine.abort_request([f"abort-{number}" for number in range(6)])
    while engine.has_unfinished_requests():
        engine.step()
    answers = twin.engine.run(twin.prompts, N, TAKE)
    assert [answer.tokens for answer in answers] == twin.plain


def test_parts_hold_what_the_manifest_says(twin: Twin) -> None:
    prompt = max(twin.prompts, key=len)
    _, manifest = manifest_of(twin.storage, prompt)
    assert manifest.token_ids == tuple(prompt)
    assert manifest.source.mismatches(read_identity(ModelSpec(f"zoo:{MODEL}", dtype="float32"))) == []
    for number, run in enumerate(manifest.runs):
        tensors = load_file(part_of(twin.storage, prompt, number, 0))
        assert tensors["keys"].shape == (1, manifest.shape[0][0], run.stop - run.start, manifest.shape[0][1])
