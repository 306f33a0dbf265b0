"""Kills a process (-9) at random moments while it writes artifacts and results, and looks at what is left.

    python -m tests.kills --kills 200

Every artifact must be complete or absent, every record, metric, table and kept answer readable and whole.
What is found is compared with what the writer was to write, by other means than the writer's own. Exit status
0: all is well; 1: the first thing that is not, on stderr.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import itertools
import json
import mmap
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from safetensors.numpy import load_file

from kvmap import provenance
from kvmap.artifacts import ArtifactStore
from kvmap.evaluation.answers import Answers
from kvmap.files import save_tensors, write_json
from kvmap.metrics import Metric
from kvmap.tracking import Run

PHASES = ("between", "artifact", "result", "start")
N_VALUES, N_ROWS, KILLS_A_RUN = 20_000, 200, 20
SLOWEST_SECONDS = 0.25


class Broken(Exception):
    """Something that a kill must not leave."""


# The writer


def write_for_ever(root: Path, phase: mmap.mmap, number: int) -> None:
    """Artifacts and results, one after the other, until somebody kills this process."""
    provenance.git_state = lambda: ({}, "")
    provenance.package_versions = dict
    store = ArtifactStore(root / "artifacts")
    first = sum(is_key(entry.name) for entry in (root / "artifacts").glob("thing/*"))
    phase[0] = PHASES.index("start")
    with Run(root / f"run-{number}", "kills", {"number": number}, "none", argv=[]) as run:
        answers = Answers.open(root / "answers", {"of": "kills"})
        for n in itertools.count(first):
            phase[0] = PHASES.index("artifact")
            store.get_or_build("thing", {"n": n}, lambda folder, n=n: build(folder, n))
            phase[0] = PHASES.index("result")
            write_results(run, answers, n)
            phase[0] = PHASES.index("between")


def is_key(name: str) -> bool:
    """Whether a folder of this name is an artifact, and not one in the making."""
    return re.fullmatch("[0-9a-f]{64}", name) is not None


def build(folder: Path, n: int) -> None:
    """Two files of tensors and one of JSON, all made of the number n."""
    for name in ("a", "b"):
        save_tensors(folder / f"{name}.safetensors", {"x": torch.full((N_VALUES,), n, dtype=torch.float64)})
    write_json(folder / "facts.json", {"n": n, "many": [n] * 1000})


def write_results(run: Run, answers: Answers, n: int) -> None:
    """A stage's record, metrics, a table and answers, all of generation n."""
    with run.stage(f"stage-{n % 3}"):
        run.log({f"kill/task/arm/{name}": Metric(n) for name in "abcdefgh"})
        run.table("rows", [{"n": n, "row": row} for row in range(N_ROWS)])
        answers.add({f"{n}/{item}": {"n": n, "item": item} for item in range(20)})
        run.note(generation=n)


# The judge


def judge_artifacts(root: Path, known: set[str]) -> Counter[str]:
    """Every artifact is whole and holds what it was to hold; counts what is left beside them."""
    left: Counter[str] = Counter()
    for entry in sorted((root / "artifacts").glob("thing/*")):
        if is_key(entry.name):
            if entry.name not in known:
                judge_artifact(entry)
                known.add(entry.name)
        elif ".corrupt-" in entry.name:
            raise Broken(f"{entry} was found to be corrupt")
        else:
            left["half an artifact" if ".tmp-" in entry.name else "a lock"] += 1
    return left


def judge_artifact(folder: Path) -> None:
    """Files, sums and numbers of one artifact."""
    manifest = json.loads((folder / "artifact.json").read_text())
    n, files = manifest["spec"]["n"], manifest["files"]
    expect(set(files) == {"a.safetensors", "b.safetensors", "facts.json"}, folder, f"lists {sorted(files)}")
    for name, facts in files.items():
        content = (folder / name).read_bytes()
        expect(hashlib.sha256(content).hexdigest() == facts["sha256"], folder / name, "has another sha256")
    for name in ("a", "b"):
        x = load_file(folder / f"{name}.safetensors")["x"]
        expect(len(x) == N_VALUES and bool((x == n).all()), folder / name, f"does not hold {n}")
    expect(json.loads((folder / "facts.json").read_text())["many"] == [n] * 1000, folder, "facts differ")


def judge_run(folder: Path) -> None:
    """Record, metrics and table of one run directory and of its earlier attempts."""
    if not (folder / "run.json").exists():
        expect(not any(folder.glob("attempt-*")), folder, "has attempts but no run.json")
        return
    record = json.loads((folder / "run.json").read_text())
    expect(record["status"] in ("running", "done"), folder, f"has status {record['status']}")
    for attempt in record["attempts"]:
        earlier = json.loads((folder / attempt["directory"] / "run.json").read_text())
        expect(earlier["status"] == "running", folder / attempt["directory"], "was not killed")
    for place in (folder, *folder.glob("attempt-*")):
        judge_results(place)


def judge_results(folder: Path) -> None:
    """Metrics and table are of one generation each, and whole."""
    if (folder / "metrics.json").exists():
        metrics = json.loads((folder / "metrics.json").read_text())
        values = {entry["value"] for entry in metrics.values()}
        expect(len(metrics) in (0, 8) and len(values) <= 1, folder, f"metrics of generations {values}")
    if (folder / "tables" / "rows.csv").exists():
        with open(folder / "tables" / "rows.csv", newline="") as stream:
            rows = list(csv.DictReader(stream))
        expect(len(rows) == N_ROWS and len({row["n"] for row in rows}) == 1, folder, "a table is cut")


def judge_answers(root: Path) -> None:
    """Whole lines hold what was asked; a torn one is skipped, and swallows no other."""
    found = Answers.open(root / "answers", {"of": "kills"})
    for n, item in itertools.product(range(0, 400), range(20)):
        row = found.get(f"{n}/{item}")
        expect(row in (None, {"n": n, "item": item}), root / "answers", f"answer {n}/{item} is {row}")


def expect(true: bool, place: Path, what: str) -> None:
    """Raises `Broken` where a claim does not hold."""
    if not true:
        raise Broken(f"{place}: {what}")


# The killer


def kill_once(root: Path, number: int, rng: random.Random) -> str:
    """Starts a writer, kills it after a random time, and says amid what."""
    phase = mmap.mmap(-1, 1)
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        try:
            write_for_ever(root, phase, number)
        finally:
            os._exit(3)
    while phase[0] == 0 and time.monotonic() - began < 10:
        time.sleep(0.0005)
    time.sleep(rng.random() ** 2 * SLOWEST_SECONDS)  # more often while it starts
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    expect(os.WIFSIGNALED(status), root, f"the writer ended by itself: {os.waitstatus_to_exitcode(status)}")
    return PHASES[phase[0]]


def main() -> int:
    """Kills as often as asked, or says what broke."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    rng, known = random.Random(asked.seed), set[str]()
    struck, left = Counter[str](), Counter[str]()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        root, began = Path(folder), time.monotonic()
        try:
            while struck["artifact"] + struck["result"] < asked.kills:
                number = sum(struck.values()) // KILLS_A_RUN
                struck[kill_once(root, number, rng)] += 1
                left += judge_artifacts(root, known)
                left["a temporary file"] += len(list(root.rglob(".*.writing-*")))
                judge_run(root / f"run-{number}")
                judge_answers(root)
        except (Broken, ValueError, KeyError, OSError) as fault:
            print(f"after {sum(struck.values())} kills: {type(fault).__name__}: {fault}", file=sys.stderr)
            return 1
        facts = {
            "struck": dict(struck),
            "left": dict(left),
            "artifacts": len(known),
            "seconds": round(time.monotonic() - began, 1),
        }
        print(json.dumps(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
