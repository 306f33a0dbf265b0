"""Conversations and relays as parts of stage `evaluate`, on the shipped family."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvmap.config import validate
from kvmap.errors import KvmapError
from kvmap.zoo.words import PLACES
from tests.stages.conftest import Finished, Runner
from tests.test_config import with_settings

ARMS = ("target", "source", "mapped", "no_context")
# Questions alone would be asked in every run: nothing here is about them.
QUIET = (
    "stages=[evaluate] evaluation.world.n_per_kind=0 evaluation.arms=[target,source,mapped,no_context] "
    "evaluation.perplexity.n_sequences=2 evaluation.perplexity.prefix_tokens=32 "
    "evaluation.perplexity.continuation_tokens=16 mapper.top_k=1"
)
TALK = (
    "evaluation.perplexity.n_sequences=0 evaluation.conversation.limit=2 evaluation.conversation.max_turns=3 "
    "evaluation.conversation.max_new_tokens=2"
)
AT_TURN = f"{TALK} evaluation.conversation.mode=at_turn evaluation.conversation.turn=3"
RELAY = "evaluation.relay.hops=3"


def rows_of(finished: Finished, table: str, **fields: str) -> list[dict[str, str]]:
    return [row for row in finished.table(table) if all(row[name] == value for name, value in fields.items())]


class TestConversations:
    def test_every_arm_holds_every_turn(self, run: Runner) -> None:
        finished = run(f"{QUIET} {TALK}")
        rows = finished.table("conversations")
        assert [(row["id"], row["arm"], row["turn"]) for row in rows] == [
            (name, arm, str(turn)) for name in ("0/0", "0/1") for arm in ARMS for turn in (1, 2, 3)
        ]
        drift = finished.table("drift")
        assert [(row["arm"], row["turn"]) for row in drift] == [
            (arm, str(t)) for arm in ARMS for t in (1, 2, 3)
        ]
        assert {row["n"] for row in drift} == {"2"}
        right = [float(row["f1"]) for row in rows if row["arm"] == "mapped"]
        assert finished.metric("evaluate/world_conversation/mapped/f1") == pytest.approx(sum(right) / 6)
        metrics = {row["metric"] for row in rows_of(finished, "arms", arm="mapped")}
        assert {"f1", "exact_match", "retention", "drift_points", "drift_slope_points_per_turn"} <= metrics
        assert (finished.directory / "figures" / "conversations.png").is_file()
        assert finished.json("run")["facts"]["conversation"] == {"n": 2, "n_too_short": 0}

    def test_a_run_like_another_asks_nobody_again(self, run: Runner) -> None:
        first = run(f"{QUIET} {TALK}")
        again = run(f"{QUIET} {TALK}", again=True)
        assert again.table("conversations") == first.table("conversations")
        assert again.json("run")["facts"]["n_reused"]["conversation"] == dict.fromkeys(ARMS, 2)

    def test_another_hand_off_asks_only_the_mapped_arm(self, run: Runner) -> None:
        run(f"{QUIET} {TALK}")
        late = run(f"{QUIET} {TALK} evaluation.conversation.mode=at_turn evaluation.conversation.turn=2")
        reused = late.json("run")["facts"]["n_reused"]["conversation"]
        assert reused == {"target": 2, "source": 2, "mapped": 0, "no_context": 2}
        mapped = rows_of(late, "conversations", arm="mapped")
        assert [row["answered_by"] for row in mapped] == ["source", "target", "target"] * 2
        source = rows_of(late, "conversations", arm="source")
        assert mapped[0]["answer"] == source[0]["answer"]
        # turns before the hand-off say nothing of the map
        right = [float(row["f1"]) for row in mapped if row["turn"] != "1"]
        assert late.metric("evaluate/world_conversation/mapped/f1") == pytest.approx(sum(right) / 4)

    def test_the_identity_map_holds_the_target_s_own_conversation(self, run: Runner) -> None:
        finished = run(f"{QUIET} {TALK} pair=tiny_self mapper=identity")
        answers = [
            [row["answer"] for row in rows_of(finished, "conversations", arm=arm)]
            for arm in ("target", "mapped")
        ]
        assert answers[0] == answers[1]
        assert finished.metric("evaluate/world_conversation/mapped/drift_points") == 0

    def test_a_file_of_conversations(self, run: Runner, tmp_path: Path) -> None:
        turns = [{"question": "where is ben", "answers": [place]} for place in PLACES[:3]]
        lines = [{"story": "ben is in paris . " * 8, "turns": turns[:n]} for n in (3, 1, 3)]
        file = tmp_path / "talks.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        asked = (
            f"evaluation.conversation.path={file} evaluation.conversation.limit=null "
            "evaluation.conversation.mode=at_turn evaluation.conversation.turn=2"
        )
        finished = run(f"{QUIET} {TALK} {asked} evaluation.conversation.feed=gold")
        assert finished.json("run")["facts"]["conversation"] == {"n": 2, "n_too_short": 1}
        rows = rows_of(finished, "conversations", arm="mapped")
        assert [row["id"] for row in rows] == ["line 1"] * 3 + ["line 3"] * 3
        assert rows[0]["task"] == "talks"
        with pytest.raises(KvmapError, match=r"evaluation\.conversation\.turn=7.*3 turns"):
            run(f"{QUIET} {TALK} {asked} evaluation.conversation.turn=7 evaluation.conversation.max_turns=9")


class TestCarry:
    def test_the_arm_that_reads_the_text_itself(self, run: Runner) -> None:
        finished = run(
            f"{QUIET} {AT_TURN} evaluation.conversation.carry=fresh evaluation.conversation.re_prefill=true"
        )
        arms = {row["arm"]: row for row in finished.table("carry")}
        assert set(arms) == {"mapped", "re_prefill"}
        assert float(arms["re_prefill"]["mapped_tokens"]) == 0
        assert 0.5 < float(arms["re_prefill"]["target_flop_share"]) < 1
        metrics = {row["metric"] for row in rows_of(finished, "arms", arm="re_prefill")}
        assert {"f1", "retention", "gain_recovered"} <= metrics
        again = run(
            f"{QUIET} {AT_TURN} evaluation.conversation.carry=fresh evaluation.conversation.re_prefill=true",
            again=True,
        )
        assert again.json("run")["facts"]["n_reused"]["conversation"]["re_prefill"] == 2
        assert again.table("carry") == finished.table("carry")


class TestRelay:
    def test_every_hop_has_a_line(self, run: Runner) -> None:
        finished = run(f"{QUIET} {RELAY}")
        table = finished.table("relay")
        assert [(row["hop"], row["holder"]) for row in table] == [
            ("1", "target"),
            ("2", "source"),
            ("3", "target"),
        ]
        assert len(finished.table("relay_sequences")) == 6
        assert float(table[0]["kl_nats"]) == pytest.approx(
            finished.metric("evaluate/perplexity/mapped/kl_nats")
        )
        same = finished.metric("evaluate/perplexity/mapped/top1_agreement")
        assert finished.metric("evaluate/relay_1/mapped/top1_agreement") == pytest.approx(same)

    def test_the_way_back_is_the_mapper_of_the_other_direction(self, run: Runner) -> None:
        finished = run(f"{QUIET} {RELAY}")
        facts = finished.json("run")["facts"]
        down = run(f"{QUIET} direction=down stages=[fit]")
        artifact = down.artifact("mapper")
        assert facts["relay"]["reverse_mapper"] == artifact.name
        assert facts["models"]["source"]["name"] == "zoo:tiny-small"  # and not those of the other direction
        given = run(f"{QUIET} {RELAY} evaluation.relay.reverse_mapper={artifact}")
        assert given.table("relay") == finished.table("relay")

    def test_a_mapper_of_the_same_direction_is_no_way_back(self, run: Runner) -> None:
        own = run(f"{QUIET} stages=[fit]").artifact("mapper")
        with pytest.raises(KvmapError, match="fitted for other models"):
            run(f"{QUIET} {RELAY} evaluation.relay.reverse_mapper={own}")

    def test_a_relay_that_was_run_is_not_run_again(self, run: Runner) -> None:
        first = run(f"{QUIET} {RELAY}")
        again = run(f"{QUIET} {RELAY}", again=True)
        assert again.json("run")["facts"]["n_reused"]["relay"] == {"relay": 2}
        assert again.table("relay") == first.table("relay")

    def test_settings_that_do_not_fit_the_way_back_are_refused(self, run: Runner) -> None:
        # tiny-small has three layers, tiny-large six
        with pytest.raises(KvmapError, match=r"mapper\.native_layers=4: the target has 3 layers"):
            run(f"{QUIET} {RELAY} mapper.native_layers=4")


MISTAKES = {
    "evaluation.conversation.mode=every": "did you mean 'every_turn'",
    "evaluation.conversation.feed=golden": "did you mean 'gold'",
    "evaluation.conversation.limit=-1": "evaluation.conversation.limit=-1: expected at least 0",
    "evaluation.conversation.turn=0": "evaluation.conversation.turn=0: expected at least 1",
    "evaluation.conversation.max_turns=0": "evaluation.conversation.max_turns=0",
    "evaluation.conversation.max_new_tokens=0": "evaluation.conversation.max_new_tokens=0",
    "evaluation.conversation.path=/no/such.json": "evaluation.conversation.path=/no/such.json: no such file",
    "evaluation.conversation.limit=null": "has no last conversation",
    "evaluation.conversation.mode=at_turn evaluation.conversation.turn=5 "
    "evaluation.conversation.max_turns=4": "evaluation.conversation.turn=5: comes after the last turn",
    "evaluation.conversation.limit=2 evaluation.sequential=true": "the two models take turns",
    "evaluation.conversation.carry=all": "expected one of everything, artifacts, fresh",
    "evaluation.conversation.carry=fresh": "evaluation.conversation.carry=fresh: at every turn the whole",
    "evaluation.conversation.carry=artifacts evaluation.conversation.mode=at_turn": "before "
    "evaluation.conversation.turn=1 nothing is left out",
    "evaluation.conversation.re_prefill=true": "evaluation.conversation.re_prefill=true: at every turn",
    "evaluation.relay.hops=-1": "evaluation.relay.hops=-1",
    "evaluation.relay.reverse_mapper=/no/such": "evaluation.relay.reverse_mapper=/no/such: no such folder",
    "evaluation.relay.hops=2 evaluation.perplexity.n_sequences=0": "set its n_sequences",
    "evaluation.relay.hops=2 rope.strategy=no_rerotate": "cannot be handed on",
    "evaluation.relay.hops=2 calibration.sequential=true": "relay.hops=2: the two models take turns",
}


@pytest.mark.parametrize("overrides", MISTAKES)
def test_a_mistake_is_named(overrides: str) -> None:
    assert any(MISTAKES[overrides] in line for line in validate(with_settings(overrides)))


def test_a_file_that_would_not_be_read_is_a_mistake(tmp_path: Path) -> None:
    file = tmp_path / "talks.jsonl"
    file.touch()
    (mistake,) = validate(with_settings(f"evaluation.conversation.path={file}"))
    assert mistake.startswith("evaluation.conversation.limit=0: no conversation of")


def test_what_can_be_carried_is_no_mistake() -> None:
    for carry in ("artifacts", "fresh"):
        talk = f"mode=at_turn turn=2 carry={carry} re_prefill=true limit=2".split()
        assert validate(with_settings(" ".join(f"evaluation.conversation.{one}" for one in talk))) == []


def test_conversations_alone_or_costs_alone_are_something_to_evaluate() -> None:
    nothing = "evaluation.world.n_per_kind=0 evaluation.perplexity.n_sequences=0"
    assert validate(with_settings(f"{nothing} evaluation.conversation.limit=3")) == []
    assert validate(with_settings(f"{nothing} evaluation.cost.lengths=[128]")) == []
    assert any("asks nothing" in line for line in validate(with_settings(nothing)))
