"""Every mistake of a fleet is named, all at once; what an entry leaves unsaid is the pair's source's."""

from __future__ import annotations

import pytest

from kvmap.config import validate
from kvmap.config.fleet_rules import fleet_models
from tests.test_config import with_settings

STAGE = "stages=[fleet] fleet=[zoo:tiny-small,zoo:tiny-medium]"

MISTAKES = {
    "stages=[fleet]": "0 models; stage fleet takes 2 to 8",
    "stages=[fleet] fleet=[zoo:tiny-small]": "1 models; stage fleet takes 2 to 8",
    f"stages=[fleet] fleet=[{','.join(f'm{i}' for i in range(9))}]": "9 models",
    "fleet=[a,b,a]": "fleet[2]='a': stands at fleet[0] too",
    "fleet=[a,{dtype:float32}]": "fleet[1]={'dtype': 'float32'}: expected a model's id, or a mapping",
    "fleet=[a,3]": "fleet[1]=3: expected a model's id",
    "fleet=[a,{id:b,dtyp:float32}]": "fleet[1].dtyp: no setting of a model",
    "fleet=[a,{id:b,dtype:int3}]": "fleet[1].dtype=int3: expected one of auto",
    f"{STAGE} mapper.native_layers=1": "mapper.native_layers=1 with stage fleet",
    f"{STAGE} mapper.row_weights=sensitivity": "expected mapper.row_weights=none",
    f"{STAGE} mapper.compression.method=fp8": "expected mapper.compression.method=none",
    f"{STAGE} calibration.outliers.policy=drop": "expected calibration.outliers.policy=keep",
    f"{STAGE} pair.alignment=spans": "expected pair.alignment=refuse",
    f"{STAGE} rope.strategy=no_rerotate": "rope.strategy=no_rerotate with stage fleet",
    f"{STAGE} mapper.kind=identity": "mapper.kind (of a fleet)=identity: expected one of linear",
    f"{STAGE} calibration.sequence_length=7": "expected at least 8",
}


@pytest.mark.parametrize("overrides", MISTAKES)
def test_every_mistake_is_named(overrides: str) -> None:
    found = validate(with_settings(overrides))
    assert any(MISTAKES[overrides] in line for line in found), found


def test_they_come_all_at_once_and_only_where_the_stage_is_asked() -> None:
    wrong = "mapper.native_layers=1 rope.strategy=no_rerotate"
    assert len(validate(with_settings(f"{STAGE} {wrong}"))) == 2
    assert validate(with_settings(f"stages=[fit] fleet=[a,b] {wrong}")) == []
    assert validate(with_settings(STAGE)) == []


def test_an_entry_says_what_it_will_of_a_model() -> None:
    cfg = with_settings("fleet=[a,{id:b,dtype:bfloat16,revision:main}] pair.source.device=cpu")
    first, second = fleet_models(cfg)
    assert (first.id, first.dtype, first.device, first.revision) == ("a", "float32", "cpu", None)
    assert (second.id, second.dtype, second.device, second.revision) == ("b", "bfloat16", "cpu", "main")
