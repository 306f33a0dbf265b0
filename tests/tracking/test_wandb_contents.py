"""What Weights & Biases is given besides scalars: names, tags, headline numbers, the artifact of results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvmap.metrics import Metric
from kvmap.tracking import Run
from kvmap.tracking.headline import TAG_CHARACTERS, headline, name_of, tags_of
from tests.tracking.wandb_records import wandb_records

CONFIG = {
    "direction": "up",
    "pair": {"name": "tiny"},
    "mapper": {"kind": "linear", "support": "head_local"},
}
METRICS = {
    "evaluate/where/mapped/accuracy": Metric(0.1),
    "evaluate/average/mapped/accuracy": Metric(0.5, 40, 0.1),
    "evaluate/average/target/accuracy": Metric(0.9),
    "evaluate/average/mapped/retention": Metric(float("nan")),
    "evaluate/perplexity/mapped/context_carried": Metric(0.8),
    "diagnose/evaluation/mapped/attention_cosine": Metric(0.7),
    "diagnose/questions/mapped/attention_cosine": Metric(0.6),
    "diagnose/fit/mapped/r2_key": Metric(0.95),
    "diagnose/held_out/mapped/r2_key": Metric(0.75),
}
ARMS = [
    {"task": "average", "arm": "mapped", "metric": "retention", "value": 0.55, "low": 0.4, "high": None},
    {"task": "average", "arm": "target", "metric": "accuracy", "value": 0.9},
]


def test_headline_numbers_are_the_averages_and_never_those_of_the_fit() -> None:
    assert headline(METRICS) == {
        "headline/accuracy": 0.5,
        "headline/context_carried": 0.8,
        "headline/attention_cosine": 0.6,
        "headline/r2_key": 0.75,
    }


def test_two_tasks_without_an_average_have_no_headline() -> None:
    two = {f"evaluate/{task}/mapped/accuracy": Metric(0.5) for task in ("a", "b")}
    assert headline(two) == {}
    assert headline({"evaluate/a/mapped/accuracy": Metric(0.5)}) == {"headline/accuracy": 0.5}


@pytest.mark.parametrize(
    ("config", "tags"),
    [
        (CONFIG, ["tiny", "linear", "head_local", "up"]),
        ({"pair": "tiny", "mapper": "x" * 99}, ["tiny", "x" * TAG_CHARACTERS]),
        ({"mapper": {"top_k": 8}}, []),
    ],
)
def test_tags_say_pair_mapper_and_direction(config: dict[str, Any], tags: list[str]) -> None:
    assert tags_of(config) == tags


@pytest.mark.parametrize(
    ("directory", "name"),
    [
        ("outputs/tiny/2026-01-01_a", "tiny/2026-01-01_a"),
        ("outputs/tiny/2026-01-01_a/7", "tiny/2026-01-01_a/7"),
        ("tiny/tiny", "tiny/tiny"),
        ("elsewhere", "tiny/elsewhere"),
    ],
)
def test_the_name_says_which_job_of_which_sweep(directory: str, name: str) -> None:
    assert name_of("tiny", Path(directory)) == name


def record(directory: Path) -> None:
    with Run(directory, "my study", CONFIG, "wandb") as run:
        run.log(METRICS)
        run.table("arms", ARMS)
        run.table("r2", [{"layer": 0, "r2": 0.5}])


@pytest.mark.slow
def test_an_offline_run_holds_tags_summary_and_the_artifact(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    record(tmp_path / "job")
    records = wandb_records(tmp_path / "job")
    (started,) = {(entry.run.run_group, entry.run.job_type) for entry in records if entry.HasField("run")}
    assert started == ("my study", "run")
    assert {tag for entry in records if entry.HasField("run") for tag in entry.run.tags} == set(
        tags_of(CONFIG)
    )
    summary = {
        "/".join(item.nested_key) or item.key: json.loads(item.value_json)
        for entry in records
        if entry.HasField("summary")
        for item in entry.summary.update
    }
    assert summary.items() >= headline(METRICS).items()
    artifacts = [entry.request.log_artifact.artifact for entry in records if entry.HasField("request")]
    artifacts += [entry.artifact for entry in records if entry.HasField("artifact")]
    results = [artifact for artifact in artifacts if artifact.type == "results"]
    assert {artifact.name for artifact in results} == {"my-study-results"}
    files = {entry.path for entry in results[0].manifest.contents}
    assert {"tables/arms.csv", "tables/r2.csv", "metrics.json", "run.json", "arms.table.json"} <= files


def test_the_artifact_holds_what_lies_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    record(tmp_path)
    (artifact,) = fake.logged
    assert (artifact.name, artifact.type) == ("my-study-results", "results")
    assert artifact.metadata["headline/accuracy"] == 0.5
    assert artifact.files == {
        name: (tmp_path / name).read_bytes()
        for name in ("run.json", "metrics.json", "tables/arms.csv", "tables/r2.csv")
    }
    assert json.loads(artifact.files["run.json"])["status"] == "done"
    table = artifact.added["arms"]
    assert table.columns == ["task", "arm", "metric", "value", "low", "high"]
    assert table.data[1] == ["average", "target", "accuracy", 0.9, None, None]
    assert fake.started["tags"] == tags_of(CONFIG)
    assert fake.summary.items() >= headline(METRICS).items()
    assert fake.summary["usage/cpu_seconds"] >= 0


def test_a_run_without_a_retention_table_has_an_artifact_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with Run(tmp_path, "plan", CONFIG, "wandb"):
        pass
    (artifact,) = fake.logged
    assert artifact.added == {}
    assert set(artifact.files) == {"run.json", "metrics.json"}


class FakeWandb:
    """Stands in for the package, and keeps what it is given."""

    def __init__(self) -> None:
        self.logged: list[FakeArtifact] = []
        self.summary: dict[str, float] = {}
        self.started: dict[str, Any] = {}
        self.Artifact = FakeArtifact

    def Settings(self, **_: object) -> None:  # noqa: N802 (the package's own name)
        return None

    def Table(self, columns: list[str], data: list[list[Any]], **_: object) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(columns=columns, data=data)

    def init(self, **given: Any) -> FakeWandb:
        self.started = given
        return self

    def log(self, _: object, **__: object) -> None:
        return None

    def log_artifact(self, artifact: FakeArtifact) -> None:
        self.logged.append(artifact)

    def finish(self, exit_code: int) -> None:
        del exit_code


class FakeArtifact:
    """Reads the files when they are added, as W&B copies them."""

    def __init__(self, name: str, type: str, metadata: dict[str, Any]) -> None:
        self.name, self.type, self.metadata = name, type, metadata
        self.files: dict[str, bytes] = {}
        self.added: dict[str, Any] = {}

    def add(self, what: Any, name: str) -> None:
        self.added[name] = what

    def add_file(self, path: str, name: str) -> None:
        self.files[name] = Path(path).read_bytes()
