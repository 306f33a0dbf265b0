"""Up beside down: finished runs of known answers as one table."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from kvmap.errors import KvmapError
from kvmap.files import read_json, write_csv, write_json
from kvmap.studies.direction_scores import conversation_rows, question_rows
from kvmap.studies.directions import difference_text, differences, direction_table, direction_text, main
from tests.studies.test_runs import make_run

# Share of 20 questions that are right, by direction and arm.
RIGHT = {
    "up": {"target": 0.9, "source": 0.5, "mapped": 0.7, "no_context": 0.1},
    "down": {"target": 0.5, "source": 0.9, "mapped": 0.3, "no_context": 0.0},
}
# Nats a token of 8 sequences.
NLL = {
    "up": {"target": 1.0, "source": 1.5, "mapped": 1.5, "no_context": 2.0},
    "down": {"target": 1.5, "source": 1.0, "mapped": 1.6, "no_context": 2.5},
}
N_TURNS, FIRST = 4, 3
CARRY = "evaluation.conversation.carry"


def evaluated(folder: Path, direction: str, *, seed: int = 0, carry: str | None = None, **more) -> Path:
    """A finished run with questions and text, and conversations where something is carried."""
    run = make_run(folder, direction=direction, seed=seed, **more)
    record = read_json(run / "run.json")
    record["facts"] = {"artifacts": {"mapper": f"mapper{seed}"}}
    talk = {"mode": "at_turn", "turn": FIRST, "carry": carry or "everything", "seed": seed}
    record["config"]["evaluation"]["conversation"] = talk
    write_json(run / "run.json", record)
    items = [
        {"task": "t", "id": n, "arm": arm, "correct": n < round(20 * share), "content": f"{seed}{n}"}
        | {"logliks": "0 0 0 0", "n_truncated": 0}
        for arm, share in RIGHT[direction].items()
        for n in range(20)
    ]
    write_csv(run / "tables" / "items.csv", items)
    sequences = [
        {"sequence": n, "arm": arm, "nll_nats": 10 * nats, "n_tokens": 10, "content": f"{seed}{n}"}
        for arm, nats in NLL[direction].items()
        for n in range(8)
    ]
    write_csv(run / "tables" / "sequences.csv", sequences)
    if carry is not None:
        write_csv(run / "tables" / "conversations.csv", talked(direction, carry, seed))
        metrics = read_json(run / "metrics.json")
        shares = {"mapped_tokens": 100.0, "target_flop_share": 0.2 if carry == "everything" else 0.1}
        for name, value in shares.items():
            key = f"evaluate/talk/mapped/hand_off_{name}"
            metrics[key] = {"value": value, "n": 6, "standard_error": None}
        write_json(run / "metrics.json", metrics)
    return run


def talked(direction: str, carry: str, seed: int) -> list[dict[str, object]]:
    """Six conversations; before the hand-off everybody is right, so that counting those turns would show."""
    f1 = RIGHT[direction] | {"re_prefill": 0.8}
    gain = 0.0 if carry == "everything" else 0.1
    return [
        {"task": "talk", "id": f"{seed}/{n}", "arm": arm, "turn": turn, "content": f"{seed}{n}{turn}"}
        | {"f1": 1.0 if turn < FIRST else share + gain * (arm == "mapped") + 0.01 * (n - 2.5)}
        for arm, share in f1.items()
        for n in range(6)
        for turn in range(1, N_TURNS + 1)
    ]


@pytest.fixture
def sweep(tmp_path):
    """Both directions, two seeds, two ways to carry."""
    number = iter(range(100))
    for direction in ("down", "up"):
        for seed in (0, 1):
            for carry in ("everything", "fresh"):
                evaluated(tmp_path / str(next(number)), direction, seed=seed, carry=carry)
    return tmp_path


def test_up_stands_above_down_with_source_target_and_what_is_recovered(sweep):
    table, settings = direction_table([sweep], n_resamples=50)
    assert settings == [CARRY]
    asked = table[table["task"] == "t"]
    assert list(asked["direction"]) == ["up", "down"]
    assert list(asked["models"]) == ["tiny-small ↔ large"] * 2
    assert list(asked["ordered_pair"]) == ["tiny-small → large", "large → tiny-small"]
    up, down = asked.to_dict("records")
    assert (up["target"], up["source"], up["mapped"], up["no_context"]) == (0.9, 0.5, 0.7, 0.1)
    assert up["retention"] == pytest.approx(0.7 / 0.9)
    assert up["gain_recovered"] == pytest.approx(0.5)
    assert up["floor_retention"] == pytest.approx((0.7 - 0.25) / (0.9 - 0.25))
    assert up["minus_source"] == pytest.approx(0.2)
    assert up["minus_source_low"] < 0.2 < up["minus_source_high"]
    assert down["retention"] == pytest.approx(0.6)
    assert math.isnan(down["gain_recovered"])
    assert "the target's lead over the source is -0.4" in down["note"]
    assert down["minus_source"] == pytest.approx(-0.6)
    assert math.isnan(up["re_prefill"])


def test_questions_count_once_however_many_ways_a_conversation_is_carried(sweep):
    table, _ = direction_table([sweep], n_resamples=50)
    asked = table[table["task"] != "talk"]
    assert asked[CARRY].isna().all()
    assert list(asked["n_seeds"]) == [2] * 4
    assert list(asked["n_items"]) == [20, 20, 8, 8]


def test_text_is_carried(sweep):
    table, _ = direction_table([sweep], n_resamples=50)
    read = table[table["task"] == "perplexity"].set_index("direction")
    assert read.loc["up", "carried"] == pytest.approx(0.5)
    assert read.loc["down", "carried"] == pytest.approx(0.9)
    assert read.loc["up", "minus_source"] == pytest.approx(0.0)
    assert list(read["measure"]) == ["nll_nats"] * 2
    assert read["retention"].isna().all()


def test_conversations_are_judged_from_the_hand_off_on(sweep):
    table, _ = direction_table([sweep], n_resamples=50)
    talk = table[table["task"] == "talk"]
    assert list(zip(talk[CARRY], talk["direction"], strict=True)) == [
        ("everything", "up"),
        ("everything", "down"),
        ("fresh", "up"),
        ("fresh", "down"),
    ]
    row = talk.to_dict("records")[2]
    assert (row["n_seeds"], row["n_items"]) == (2, 6)
    assert row["mapped"] == pytest.approx(0.8)
    assert row["retention"] == pytest.approx(0.8 / 0.9)
    assert row["gain_recovered"] == pytest.approx(0.75)
    assert row["minus_re_prefill"] == pytest.approx(0.0)
    assert (row["mapped_tokens"], row["target_flop_share"]) == (100.0, 0.1)


def test_turns_count_alike_where_conversations_are_of_other_lengths(tmp_path):
    run = evaluated(tmp_path, "up")
    rows = [
        {"task": "talk", "id": name, "arm": arm, "turn": turn, "content": "c", "f1": share}
        for arm, share in (("target", 1.0), ("mapped", 0.5))
        for name, n_turns in (("a", FIRST), ("b", FIRST + 4))
        for turn in range(1, n_turns + 1)
        for share in [share if name == "a" else 0.1 * turn * share]
    ]
    write_csv(run / "tables" / "conversations.csv", rows)
    (row,) = conversation_rows([run], n_resamples=20)
    counted = [r for r in rows if r["turn"] >= FIRST]
    for arm in ("target", "mapped"):
        assert row[arm] == pytest.approx(np.mean([r["f1"] for r in counted if r["arm"] == arm]))
    assert row["retention"] == pytest.approx(0.5)
    assert row["n_items"] == 2


def test_intervals_draw_runs_and_then_conversations(tmp_path):
    random = np.random.default_rng(0)
    values = random.random((2, 6))
    runs = []
    for seed in range(2):
        run = evaluated(tmp_path / str(seed), "up", seed=seed)
        rows = [
            {"task": "talk", "id": f"{seed}/{n}", "arm": arm, "turn": FIRST, "content": "c", "f1": f1}
            for n in range(6)
            for arm, f1 in (("target", 1.0), ("mapped", values[seed, n]), ("source", 0.2))
        ]
        write_csv(run / "tables" / "conversations.csv", rows)
        runs.append(run)
    (row,) = conversation_rows(runs, n_resamples=4000)
    drawn = []
    for _ in range(4000):
        picked = values[random.integers(0, 2, 2)]
        drawn.append(np.mean([one[random.integers(0, 6, 6)].mean() for one in picked]))
    # two bootstraps of 4,000 draws: their ends differ by some percent of the width
    width = np.quantile(drawn, 0.975) - np.quantile(drawn, 0.025)
    assert row["retention_low"] == pytest.approx(np.quantile(drawn, 0.025), abs=0.1 * width)
    assert row["retention_high"] == pytest.approx(np.quantile(drawn, 0.975), abs=0.1 * width)


def test_several_tasks_stand_as_their_average(tmp_path):
    run = evaluated(tmp_path, "up")
    file = run / "tables" / "items.csv"
    with file.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    write_csv(file, rows + [row | {"task": "u", "correct": True} for row in rows])
    asked, _ = question_rows([run], n_resamples=20)
    assert (asked["task"], asked["mapped"], asked["n_items"]) == ("average", pytest.approx(0.85), 40)


def test_the_difference_is_of_one_pair_both_ways(sweep):
    table, settings = direction_table([sweep], n_resamples=50)
    found = differences(table, settings)
    rows = {(str(row[CARRY]), row["task"], row["metric"]): row for row in found.to_dict("records")}
    assert rows["nan", "t", "retention"]["value"] == pytest.approx(0.7 / 0.9 - 0.6)
    assert rows["nan", "t", "retention"]["n_pairs"] == 1
    assert rows["nan", "perplexity", "carried"]["value"] == pytest.approx(0.5 - 0.9)
    assert rows["fresh", "talk", "minus_source"]["value"] == pytest.approx(0.3 + 0.5)
    assert "up − down" in difference_text(found, settings)


def test_one_direction_alone_stands_there_without_a_difference(tmp_path):
    evaluated(tmp_path / "0", "down")
    table, settings = direction_table([tmp_path], n_resamples=20)
    assert list(table["direction"]) == ["down", "down"]
    found = differences(table, settings)
    assert found.empty
    assert difference_text(found, settings) == ""


def test_maps_stand_apart(tmp_path):
    for number, (mapper, direction) in enumerate(
        (mapper, direction) for mapper in ("linear", "head_local") for direction in ("up", "down")
    ):
        evaluated(tmp_path / str(number), direction, mapper=mapper)
    table, settings = direction_table([tmp_path], n_resamples=20)
    assert settings == ["mapper"]
    asked = table[table["task"] == "t"]
    assert list(zip(asked["mapper"], asked["direction"], strict=True)) == [
        ("linear", "up"),
        ("linear", "down"),
        ("head_local", "up"),
        ("head_local", "down"),
    ]
    text = direction_text(table, settings)
    assert "t, accuracy (seeds: 1, items: 20)" in text
    assert text.count("escalation") == text.count("downshift") == 4


def test_the_command_prints_and_writes(sweep, tmp_path, capsys):
    files = [tmp_path / name for name in ("table.csv", "effects.csv")]
    options = ["--csv", str(files[0]), "--effects", str(files[1]), "--resamples", "20"]
    assert main([str(sweep), *options]) == 0
    said = capsys.readouterr().out
    assert all(words in said for words in ("escalation", "downshift", "pairs above 0"))
    table, _ = direction_table([sweep], n_resamples=20)
    assert len(pd.read_csv(files[0])) == len(table) == 8
    assert set(pd.read_csv(files[1])["metric"]) == {"retention", "carried", "minus_source"}


def test_the_command_names_pairs_that_went_one_way(tmp_path, capsys):
    evaluated(tmp_path / "0", "up")
    assert main([str(tmp_path), "--resamples", "20"]) == 0
    assert "one direction alone: tiny-small ↔ large" in capsys.readouterr().out


def test_runs_that_evaluated_nothing_are_refused_in_one_line(tmp_path, capsys):
    make_run(tmp_path / "0")
    with pytest.raises(KvmapError, match="run them with stage evaluate"):
        direction_table([tmp_path])
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("error: 1 finished runs without tables")
