"""A cache is mapped while its source still writes it: the answers are those of one that lies there."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from kvmap.zoo import weights_folder
from tests.serving.engine.engines import Answer, Engine, Prompt, running
from tests.serving.engine.prompts import zoo_prompts
from tests.serving.engine.slow_source import Happening, SlowSource, SourceGone
from tests.serving.engine.test_pair import SOURCE, TARGET, Pair, loaded

TAKE = {"take": True}
WAIT = {"take": True, "wait_seconds": 60.0}
N = 24


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("arriving")
    prompts = zoo_prompts(6, lengths=(420, 400), seed=6)
    with running(
        weights_folder(SOURCE), "kv_producer", {"storage": folder / "storage"}, max_num_batched_tokens=128
    ) as engine:
        engine.publish(prompts)
    return Pair(loaded(SOURCE), loaded(TARGET), folder / "storage", folder, prompts)


@pytest.fixture(
    scope="module", params=[(0, 1), (2, 3)], ids=["every layer mapped", "native layers and a native head"]
)
def engine(request: pytest.FixtureRequest, pair: Pair) -> Iterator[Engine]:
    settings = {"storage": pair.storage, "mapper": pair.mapper(*request.param), "chunk_tokens": 50}
    with running(
        weights_folder(TARGET),
        "kv_consumer",
        settings,
        enable_prefix_caching=True,
        num_gpu_blocks_override=60,
    ) as running_engine:
        yield running_engine


@pytest.fixture(autouse=True)
def _forgetful(engine: Engine) -> Iterator[None]:
    engine.forget()
    yield
    engine.forget()


@pytest.fixture(scope="module")
def prompt(engine: Engine, pair: Pair) -> Prompt:
    """One that shows whether it was mapped."""
    for each in pair.prompts:
        mapped, plain = both(engine, each)
        if mapped.tokens != plain.tokens:
            return each
    raise AssertionError("every answer on a mapped cache is the plain one")


def both(engine: Engine, prompt: Prompt) -> tuple[Answer, Answer]:
    """Mapped from the cache as it lies there, and read by the target itself."""
    (mapped,) = engine.run([prompt], N, TAKE)
    engine.forget()
    (plain,) = engine.run([prompt], N)
    engine.forget()
    assert mapped.is_applied
    return mapped, plain


def test_a_cache_is_mapped_as_it_arrives(engine: Engine, pair: Pair, prompt: Prompt) -> None:
    mapped, _ = both(engine, prompt)
    source = SlowSource(pair.storage, prompt)
    assert len(source.manifest.runs) > 2
    with source.writing():
        (answer,) = engine.run([prompt], N, WAIT)
    assert answer.tokens == mapped.tokens
    assert answer.is_applied
    assert answer.record["wait_seconds"] > 0.1
    for name in ("n_mapped", "n_native_head", "n_held_back", "bytes"):
        assert answer.record[name] == mapped.record[name]
    assert mapped.record["wait_seconds"] == 0


def test_several_arrive_beside_others_that_are_answered_meanwhile(engine: Engine, pair: Pair) -> None:
    prompts = pair.prompts[:3]
    expected = [both(engine, prompt) for prompt in prompts]
    sources = [SlowSource(pair.storage, prompt) for prompt in prompts[:2]]
    asked = [WAIT, WAIT, TAKE, None, None]
    with sources[0].writing(), sources[1].writing(0.03):
        answers = engine.run([*prompts, *prompts[:2]], N, asked)
    assert [a.tokens for a in answers[:3]] == [mapped.tokens for mapped, _ in expected]
    assert [a.tokens for a in answers[3:]] == [plain.tokens for _, plain in expected[:2]]
    assert [a.is_applied for a in answers[:3]] == [True] * 3


def test_more_than_is_there_is_waited_for_within_the_grace(
    engine: Engine, pair: Pair, prompt: Prompt
) -> None:
    """As in mid-conversation: earlier turns are published, and the source is about to read the new one."""
    mapped, _ = both(engine, prompt)
    source = SlowSource(pair.storage, prompt)
    source.path.unlink()

    def announced_late() -> None:
        time.sleep(0.3)
        with source.writing():
            pass

    with source.first_run_published() as n_first:
        for asked in (TAKE, {**WAIT, "grace_seconds": 0.1}):
            (answer,) = engine.run([prompt], N, asked)
            assert answer.record["n_mapped"] + answer.record["n_native_head"] == n_first
            engine.forget()
        thread = threading.Thread(target=announced_late)
        thread.start()
        (answer,) = engine.run([prompt], N, {**WAIT, "grace_seconds": 10.0})
        thread.join()
    assert answer.tokens == mapped.tokens
    assert answer.record["n_mapped"] == mapped.record["n_mapped"]


def test_what_is_not_written_is_not_waited_for_unasked(engine: Engine, pair: Pair, prompt: Prompt) -> None:
    _, plain = both(engine, prompt)
    with SlowSource(pair.storage, prompt).writing():
        (answer,) = engine.run([prompt], N, TAKE)
    assert (answer.tokens, answer.cause) == (plain.tokens, "timeout")


def gone_before(part: int) -> Happening:
    def happen(number: int, data: bytes) -> bytes:
        if number == part:
            raise SourceGone
        return data

    return happen


def changed_at(part: int) -> Happening:
    return lambda number, data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:] if number == part else data


def cut_at(part: int) -> Happening:
    return lambda number, data: data[: len(data) // 2] if number == part else data


@pytest.mark.parametrize(
    ("happening", "lives", "wait", "cause"),
    [
        (gone_before(7), False, 60.0, "timeout"),
        (gone_before(7), True, 0.8, "timeout"),
        (changed_at(7), True, 60.0, "cache_file"),
        (cut_at(7), True, 60.0, "cache_file"),
    ],
    ids=["dies", "too slow", "changed", "cut"],
)
def test_what_goes_wrong_on_the_way_is_read_by_the_target(
    engine: Engine, pair: Pair, prompt: Prompt, happening: Happening, lives: bool, wait: float, cause: str
) -> None:
    _, plain = both(engine, prompt)
    begun = time.monotonic()
    with SlowSource(pair.storage, prompt).writing(0.02, happening, lives=lives):
        (answer,) = engine.run([prompt], N, {**WAIT, "wait_seconds": wait})
    assert (answer.tokens, answer.cause) == (plain.tokens, cause)
    assert time.monotonic() - begun < 20
    # and its pages are plain ones: they are found again
    (again,) = engine.run([prompt], N)
    assert again.tokens == plain.tokens
    assert again.n_cached > 0


def test_a_source_that_gives_up_ends_the_waiting(engine: Engine, pair: Pair, prompt: Prompt) -> None:
    _, plain = both(engine, prompt)
    source = SlowSource(pair.storage, prompt)

    def given_up(number: int, data: bytes) -> bytes:
        if number == 7:
            source.store.drop_group(source.written.group)
            raise SourceGone
        return data

    with source.writing(0.02, given_up):
        (answer,) = engine.run([prompt], N, WAIT)
    assert (answer.tokens, answer.cause) == (plain.tokens, "partial")


def test_where_the_longer_one_comes_to_nothing_the_shorter_one_that_is_there_is_taken(
    engine: Engine, pair: Pair, prompt: Prompt
) -> None:
    both(engine, prompt)
    source = SlowSource(pair.storage, prompt)
    with source.first_run_published() as n_first:
        (first,) = engine.run([prompt[: n_first + 1]], 1, TAKE)
        engine.forget()
        with source.writing(0.02, changed_at(7)):
            (answer,) = engine.run([prompt], N, WAIT)
    assert answer.is_applied
    assert answer.record["n_mapped"] == first.record["n_mapped"]
    assert answer.record["n_held_back"] == len(prompt) - n_first


def test_a_request_that_is_aborted_on_the_way_gives_its_pages_back(
    engine: Engine, pair: Pair, prompt: Prompt
) -> None:
    from vllm import SamplingParams

    mapped, _ = both(engine, prompt)
    core = engine.llm.llm_engine
    source = SlowSource(pair.storage, prompt)
    params = SamplingParams(temperature=0, max_tokens=N, extra_args={"kv_transfer_params": {"kvmap": WAIT}})
    with source.writing(0.2):
        for number in range(3):
            core.add_request(f"aborted-{number}", {"prompt_token_ids": list(prompt)}, params)
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            core.step()
        core.abort_request([f"aborted-{number}" for number in range(3)])
        while core.has_unfinished_requests():
            core.step()
    until = time.monotonic() + 10
    # refused while pages are held; an idle engine learns that they are free when it is next asked something
    while not engine.llm.reset_prefix_cache():
        assert time.monotonic() < until, "pages are held"
        time.sleep(0.1)
    (answer,) = engine.run([prompt], N, TAKE)
    assert answer.tokens == mapped.tokens
