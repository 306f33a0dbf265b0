"""What writers killed at random moments leave. The long form: `python -m tests.kills --kills 200`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvmap.files import remove_temporaries, write_json
from kvmap.tracking import Run
from tests import kills


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_artifacts_and_results_are_whole_or_absent_after_every_kill() -> None:
    command = [sys.executable, "-m", "tests.kills", "--kills", "200", "--seed", "1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr
    facts = json.loads(result.stdout)
    # amid what they struck, and that they left halves of it: else nothing would have been tried
    assert facts["struck"]["artifact"] > 0
    assert facts["struck"]["result"] > 0
    assert facts["left"]["half an artifact"] > 0
    assert facts["artifacts"] > 0


class TestJudge:
    """The judge sees what it is there to see."""

    def whole(self, root: Path) -> Path:
        from kvmap.artifacts import ArtifactStore

        artifact = ArtifactStore(root / "artifacts").get_or_build(
            "thing", {"n": 3}, lambda folder: kills.build(folder, 3)
        )
        return artifact.path

    def test_passes_what_is_whole(self, tmp_path: Path) -> None:
        self.whole(tmp_path)
        assert kills.judge_artifacts(tmp_path, set()) == {}

    @pytest.mark.parametrize("name", ["a.safetensors", "facts.json", "artifact.json"])
    def test_refuses_a_truncated_file(self, tmp_path: Path, name: str) -> None:
        file = self.whole(tmp_path) / name
        os.truncate(file, file.stat().st_size // 2)
        with pytest.raises((kills.Broken, ValueError)):
            kills.judge_artifacts(tmp_path, set())

    def test_refuses_a_cut_table_and_mixed_metrics(self, tmp_path: Path) -> None:
        (tmp_path / "tables").mkdir()
        (tmp_path / "tables" / "rows.csv").write_text("n,row\n1,0\n")
        with pytest.raises(kills.Broken, match="cut"):
            kills.judge_results(tmp_path)
        write_json(tmp_path / "metrics.json", {name: {"value": float(name > "d")} for name in "abcdefgh"})
        with pytest.raises(kills.Broken, match="generations"):
            kills.judge_results(tmp_path)


class TestStartingAgain:
    def fail(self, directory: Path) -> None:
        def work() -> None:
            with Run(directory, "study", {}, "none") as run:
                run.table("rows", [{"a": 1}])
                raise ValueError("first")

        with pytest.raises(ValueError, match="first"):
            work()

    @pytest.mark.parametrize("moved", [(), ("metrics.json",), ("metrics.json", "tables")])
    def test_after_a_kill_while_an_attempt_was_put_away(self, tmp_path: Path, moved: tuple[str, ...]) -> None:
        """Its folder is there, some of its files are in it, and run.json is still the earlier one."""
        self.fail(tmp_path)
        (tmp_path / "attempt-1").mkdir()
        for name in moved:
            (tmp_path / name).rename(tmp_path / "attempt-1" / name)
        with Run(tmp_path, "study", {}, "none"):
            pass
        record = json.loads((tmp_path / "run.json").read_text())
        assert record["status"] == "done"
        assert [attempt["directory"] for attempt in record["attempts"]] == ["attempt-1"]
        kept = {
            path.relative_to(tmp_path / "attempt-1").as_posix() for path in tmp_path.rglob("attempt-1/**/*")
        }
        assert {"run.json", "metrics.json", "tables/rows.csv", "traceback.txt"} <= kept
        assert not (tmp_path / "tables").exists()

    def test_what_killed_writers_left_is_removed_and_nothing_else(self, tmp_path: Path) -> None:
        (tmp_path / "tables").mkdir()
        left = [
            ".run.writing-0123456789ab.json",
            "tables/.rows.writing-0123456789ab.csv",
            ".x.writing-00ff00ff00ff",
        ]
        other = [".hydra.json", "run.writing-0123456789ab.json", ".gitkeep", ".a.writing-xyz.json"]
        for name in [*left, *other]:
            (tmp_path / name).write_text("")
        remove_temporaries(tmp_path)
        names = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
        assert names == set(other)
