"""Where models are put, and what a calibration of one at a time may take: what is right, and what is told."""

from __future__ import annotations

import pytest

from kvmap.config import schema, validate
from kvmap.models import placement
from kvmap.models.spec import ModelSpec
from kvmap.stages.context import _spec
from tests.test_config import with_settings

MISTAKES = {
    "pair.source.device_map=all": ("pair.source.device_map=all", "expected one of auto, balanced"),
    "pair.target.device_map=3": ("pair.target.device_map=3", "module names and their devices"),
    "pair.target.device_map={model:gpu}": ("pair.target.device_map: 'model' on 'gpu'", "a GPU's number"),
    "pair.target.device_map={model:0,model.norm:cpu}": (
        "pair.target.device_map: 'model.norm' lies within 'model'",
        "none within another",
    ),
    "pair.source.device_map=auto pair.source.device=cpu": (
        "pair.source.device_map='auto'",
        "name one of them",
    ),
    "pair.source.max_memory={cpu:1GiB}": ("pair.source.max_memory=", "only a device map reads it"),
    "pair.source.offload_folder=there": ("pair.source.offload_folder=there", "only a device map reads it"),
    "pair.source.device_map=auto pair.source.max_memory=1GiB": (
        "pair.source.max_memory='1GiB'",
        "sizes by device",
    ),
    "pair.source.device_map=auto pair.source.max_memory={disk:1GiB}": (
        "pair.source.max_memory: 'disk' is no device",
        "a GPU's number or cpu",
    ),
    "pair.source.device_map=auto pair.source.max_memory={cpu:lots}": (
        "pair.source.max_memory: 'lots' of 'cpu'",
        "bytes or a size such as 20GiB",
    ),
    "calibration.max_spill_gib=0": ("calibration.max_spill_gib=0.0", "above 0"),
    "calibration.max_spill_gib=inf": ("calibration.max_spill_gib=inf", "null for no bound"),
    "calibration.layerwise=maybe": ("calibration.layerwise=maybe", "expected auto, true or false"),
    "calibration.layerwise=true": ("calibration.layerwise=true", "set calibration.sequential=true as well"),
}


@pytest.mark.parametrize("overrides", MISTAKES)
def test_a_mistake_gets_one_line_with_its_remedy(overrides: str) -> None:
    setting, remedy = MISTAKES[overrides]
    (mistake,) = validate(with_settings(overrides))
    assert mistake.startswith(setting)
    assert remedy in mistake
    assert "\n" not in mistake


@pytest.mark.parametrize(
    "overrides",
    [
        "pair.source.device_map=auto pair.source.max_memory={0:20GiB,cpu:30GiB} pair.source.offload_folder=x",
        "pair.source.device_map={model:0,lm_head:cpu} pair.target.device_map=disk",
        "pair.target.device_map={model.layers.1:cpu,model.layers.10:disk}",
        "calibration.max_spill_gib=0.5 calibration.layerwise=false",
        "stages=[calibrate] calibration.layerwise=true calibration.sequential=true",
    ],
)
def test_what_is_right_is_not_refused(overrides: str) -> None:
    assert validate(with_settings(overrides)) == []


def test_settings_reach_the_models_spec() -> None:
    overrides = (
        "pair.source.device_map=auto pair.source.max_memory={0:20GiB,cpu:1000} pair.source.offload_folder=x"
    )
    model = with_settings(overrides).pair.source
    expected = ModelSpec(
        model.id,
        dtype=model.dtype,
        device_map="auto",
        max_memory={0: "20GiB", "cpu": 1000},
        offload_folder="x",
    )
    assert _spec(model) == expected
    assert placement.placement_arguments(expected) == {
        "device_map": "auto",
        "max_memory": {0: "20GiB", "cpu": 1000},
        "offload_folder": "x",
    }


def test_names_in_the_schema_are_those_of_the_code() -> None:
    assert schema.DEVICE_MAPS == placement.DEVICE_MAPS
