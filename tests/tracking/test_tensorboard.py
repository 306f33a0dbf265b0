"""TensorBoard's copy, read back with TensorBoard's own reader."""

from __future__ import annotations

import json
import math
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvmap.errors import KvmapError
from kvmap.tracking import Metric, Run, read_metrics
from tests.tracking.test_run import do_work, record

PNG = b"\x89PNG\r\n\x1a\n"


def events(directory: Path) -> Any:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = reader.EventAccumulator(
        str(directory / "tensorboard"), size_guidance={"tensors": 0, "scalars": 0}
    )
    return found.Reload()


def test_it_holds_what_the_local_files_hold(tmp_path: Path) -> None:
    directory = tmp_path / "study" / "sweep" / "3"
    with Run(directory, "study", {"mapper": {"top_k": 8}, "pair": "tiny"}, "tensorboard") as run:
        do_work(run)
    found = events(directory)
    for key, metric in read_metrics(directory).items():
        (point,) = found.Scalars(key)
        assert point.value == pytest.approx(metric.value, rel=1e-6) or math.isnan(metric.value)
        if metric.n is not None:
            assert found.Scalars(f"{key}.n")[0].value == metric.n
    assert found.Scalars("headline/accuracy")[0].value == 0.5
    assert found.Scalars("usage/cpu_seconds")[0].value >= 0
    (picture,) = found.Images("figures/empty")
    assert picture.encoded_image_string.startswith(PNG)
    assert (picture.width, picture.height) == (300, 300)

    def text(tag: str) -> str:
        return found.Tensors(tag)[-1].tensor_proto.string_val[0].decode()

    assert "| mapped, k=8 |  | 0.1 |" in text("tables/arms")
    assert json.loads(text("facts/models").strip("`json\n")) == {"source": "a", "target": "b"}
    assert text("run").startswith("study/sweep/3\n\ntiny")
    assert record(directory)["tensorboard"] == {"folder": "tensorboard", "name": "study/sweep/3"}
    assert record(directory)["wandb"] is None


def test_settings_stand_on_the_page_that_compares_them(tmp_path: Path) -> None:
    with Run(tmp_path / "job", "study", {"mapper": {"top_k": 8, "rule": None}}, "tensorboard"):
        pass
    plugin = pytest.importorskip("tensorboard.plugins.hparams.plugin_data_pb2")
    content = events(tmp_path / "job").SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    values = plugin.HParamsPluginData.FromString(content).session_start_info.hparams
    assert values["mapper.top_k"].number_value == 8
    assert values["mapper.rule"].string_value == "None"
    assert values["study"].string_value == "study"


def test_attempts_stand_side_by_side(tmp_path: Path) -> None:
    with suppress(KvmapError), Run(tmp_path, "study", {}, "tensorboard") as run:
        run.log({"x/y/z/old": Metric(1.0), "x/y/z/both": Metric(1.0)})
        raise KvmapError("node lost")
    with Run(tmp_path, "study", {}, "tensorboard") as run:
        run.log({"x/y/z/both": Metric(2.0)})
    found = events(tmp_path)
    assert [point.value for point in found.Scalars("x/y/z/old")] == [1.0]
    assert [(point.step, point.value) for point in found.Scalars("x/y/z/both")] == [(0, 1.0), (1, 2.0)]


def test_without_it_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with Run(tmp_path, "study", {}, "tensorboard") as run:
        do_work(run)
    assert record(tmp_path)["status"] == "done"
    assert caplog.text.count("going on without it") == 1
