"""Up and down: every part of a run takes either direction, and what a conversation carries over."""

from __future__ import annotations

import pytest

from tests.stages.conftest import Runner
from tests.stages.test_evaluate_conversation import AT_TURN, QUIET, rows_of

EVERY_PART = (
    "stages=[plan,calibrate,fit,diagnose,evaluate,benchmark,report] mapper.top_k=1 evaluation.generate=true "
    "evaluation.arms=[target,source,mapped,bias_only,raw,random,own_keys,own_values,no_context] "
    "evaluation.world.n_per_kind=1 evaluation.perplexity.n_sequences=2 "
    "evaluation.perplexity.prefix_tokens=32 evaluation.perplexity.continuation_tokens=16 "
    "evaluation.conversation.limit=1 evaluation.conversation.max_turns=3 "
    "evaluation.conversation.max_new_tokens=2 evaluation.conversation.mode=at_turn "
    "evaluation.conversation.turn=3 evaluation.conversation.carry=artifacts "
    "evaluation.conversation.re_prefill=true evaluation.relay.hops=2 evaluation.cost.lengths=[32] "
    "evaluation.long_context.n_needles=1 evaluation.long_context.n_sequences=1 "
    "evaluation.long_context.multiples=[1] evaluation.long_context.depths=[0.5] "
    "evaluation.long_context.growth_tokens=16 evaluation.long_context.growth_windows=2 "
    "diagnostics.texts=[held_out,evaluation,questions] benchmark.lengths=[32] benchmark.repeats=1"
)

SAME = {
    "items": ("logliks", "generated"),
    "sequences": ("nll_nats",),
    "needle_items": ("correct",),
    "length_sequences": ("nll_nats",),
}
"""Tables, and columns that a model by itself gives whichever part it plays."""


@pytest.mark.slow
def test_every_part_takes_either_direction(run: Runner) -> None:
    up, down = (run(f"{EVERY_PART} direction={direction}") for direction in ("up", "down"))
    assert up.tables == down.tables
    assert set(SAME) | {"conversations", "carry", "relay", "hand_back", "latency"} <= up.tables
    names = [
        {role: finished.json("run")["facts"]["models"][role]["name"] for role in ("source", "target")}
        for finished in (up, down)
    ]
    assert names[0] == {"source": names[1]["target"], "target": names[1]["source"]}
    for table, columns in SAME.items():
        for column in columns:
            for one, other in (("target", "source"), ("source", "target")):
                found = [row[column] for row in rows_of(up, table, arm=one)]
                assert found == [row[column] for row in rows_of(down, table, arm=other)], (table, column)
                assert found
    for one, other in (("target", "source"), ("source", "target")):
        answers = [row["answer"] for row in rows_of(up, "conversations", arm=one)]
        assert answers == [row["answer"] for row in rows_of(down, "conversations", arm=other)]


@pytest.mark.slow
def test_each_way_to_carry_has_its_costs(run: Runner) -> None:
    rows = {}
    for carry in ("everything", "artifacts", "fresh"):
        finished = run(f"{QUIET} {AT_TURN} evaluation.conversation.carry={carry}")
        (rows[carry],) = finished.table("carry")  # the mapped arm alone is handed something
        assert rows[carry]["carry"] == carry
        for name in ("mapped_tokens", "target_flop_share"):
            found = finished.metric(f"evaluate/world_conversation/mapped/hand_off_{name}")
            assert found == pytest.approx(float(rows[carry][name]))
    for name in ("mapped_tokens", "target_flop_share"):
        values = [float(rows[carry][name]) for carry in ("fresh", "artifacts", "everything")]
        assert values == sorted(values)
        assert values[0] < values[2]
