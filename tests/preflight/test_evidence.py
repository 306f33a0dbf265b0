"""Cases of finished runs, and tables of them read back."""

from __future__ import annotations

import pandas as pd
import pytest

from kvmap.config import schema
from kvmap.errors import KvmapError
from kvmap.metrics import Metric
from kvmap.models.pair import ModelPair, ModelSpec
from kvmap.preflight import Evidence
from kvmap.preflight.__main__ import main
from kvmap.preflight.evidence import FACTS, FAMILY, SHIPPED, cases_of, read_evidence
from kvmap.stages.preflight.contexts import SETTINGS
from kvmap.tracking import Run
from tests.preflight.planted_cases import cases

RETENTION = "evaluate/average/mapped/retention"


def write_run(directory, source="small", mapper="linear", seed=0, status=True, **metrics):
    config = {
        "study": "s",
        "outputs": "o",
        "seed": 0,
        "direction": "up",
        "mapper": {"kind": mapper, "top_k": "all", "seed": seed},
        "calibration": {"data": {"seed": seed}},
        "pair": {"name": f"{source}_large", "source": {"id": f"zoo:{source}"}, "target": {"id": "zoo:large"}},
    }
    with Run(directory, "s", config, "none") as run:
        run.log({name.replace("__", "/"): Metric(value) for name, value in metrics.items()})


@pytest.fixture
def sweep(tmp_path):
    good = {"preflight__held_out__head_local__r2_key": 0.7, "evaluate__perplexity__mapped__kl_nats": 0.2}
    write_run(tmp_path / "0", **good, evaluate__average__mapped__retention=0.5)
    write_run(tmp_path / "1", seed=1, **good, evaluate__average__mapped__retention=0.7)
    write_run(tmp_path / "2", **good)
    write_run(tmp_path / "3", source="medium", evaluate__average__mapped__retention=0.6)
    write_run(tmp_path / "4", source="wide", **good, evaluate__tasks_average__mapped__retention=0.6)
    return tmp_path


def test_cases_are_runs_with_a_preflight_and_an_outcome(sweep):
    (sweep / "empty").mkdir()
    table = cases_of([sweep / "empty", sweep])
    assert list(table) == [*FACTS, FAMILY, "head_local/r2_key"]
    assert table["pair"].tolist() == ["small → large", "small → large", "wide → large"]
    assert table["retention"].tolist() == [0.5, 0.7, 0.6]
    assert table["kl_nats"].tolist() == [0.2] * 3
    assert table["seed"].tolist() == ["0", "1", "0"]


def test_runs_without_cases_are_refused(tmp_path):
    write_run(tmp_path / "0", **{RETENTION.replace("/", "__"): 0.5})
    with pytest.raises(KvmapError, match=r"no run has both.*experiment=preflight"):
        cases_of([tmp_path])


def test_a_table_comes_back_and_seeds_share_a_truth(sweep, tmp_path, capsys):
    file = tmp_path / "cases.csv"
    assert main(["table", str(sweep), "--csv", str(file)]) == 0
    assert "linear" in capsys.readouterr().out
    evidence = read_evidence([file], shipped=False)
    assert evidence.n_cases == 3
    assert evidence.probes == ["head_local"]
    assert evidence.of("linear")["true"].tolist() == pytest.approx([0.6, 0.6, 0.6])
    assert evidence.without("small → large").pairs == ["wide → large"]


def test_of_a_case_in_two_tables_the_last_counts(tmp_path):
    for name, value in (("a", 0.1), ("b", 0.9)):
        pd.DataFrame([dict.fromkeys(FACTS, "x") | {"retention": value}]).to_csv(tmp_path / name, index=False)
    assert read_evidence([tmp_path / "a", tmp_path / "b"], shipped=False).table["retention"].tolist() == [0.9]


def test_what_is_no_table_is_refused(tmp_path):
    file = tmp_path / "cases.csv"
    with pytest.raises(KvmapError, match="cannot be read"):
        read_evidence([file])
    file.write_text("pair,mapper\na,b\n")
    with pytest.raises(KvmapError, match=r"no column top_k, seed.*preflight table makes"):
        read_evidence([file])


def test_the_shipped_table_is_one():
    evidence = read_evidence()
    assert SHIPPED.is_file()
    assert set(FACTS) <= set(evidence.table)


def test_every_mapper_that_may_be_named_has_settings():
    assert set(schema.PREFLIGHT_MAPPERS) == set(SETTINGS) - {"bias_only"}


class TestCommand:
    def test_rates(self, tmp_path, capsys):
        file = tmp_path / "cases.csv"
        cases().table.drop(columns="true").to_csv(file, index=False)
        judged = tmp_path / "judged.csv"
        arguments = ["rates", str(file), "--alone", "--min-retention", "0.8", "--csv", str(judged)]
        assert main(arguments) == 0
        out = capsys.readouterr().out
        assert "Each of 12 pairs judged by the cases of the others" in out
        assert "false accepts" in out
        assert len(pd.read_csv(judged)) == 48

    def test_mistakes_are_one_line(self, tmp_path, capsys):
        (tmp_path / "no.csv").write_text(",".join(FACTS) + "\n")
        assert main(["rates", "--alone", str(tmp_path / "no.csv")]) == 1
        assert capsys.readouterr().err.startswith("error: no cases")
        assert main(["attach", str(tmp_path), "head_local", str(tmp_path)]) == 1
        assert "no verdict; the run's preflight has fitted nothing" in capsys.readouterr().err


def test_cases_count_for_their_own_family_and_those_without_one_for_all():
    table = cases(n_pairs=3, n_seeds=1).table
    of_pair = {"pair 0": "a" * 12, "pair 1": "b" * 12, "pair 2": ""}
    evidence = Evidence(table.assign(family=table["pair"].map(of_pair)))
    assert evidence.of_family("a" * 64).pairs == ["pair 0", "pair 2"]
    assert evidence.of_family("c" * 64).pairs == ["pair 2"]
    assert Evidence(table).of_family("c" * 64).pairs == evidence.pairs


def test_cases_of_the_shipped_family_stand_under_its_tokenizer():
    known = read_evidence()
    pair = ModelPair(ModelSpec("zoo:tiny-small"), ModelSpec("zoo:tiny-large"))
    tokenizer = pair.target_identity.tokenizer
    assert known.of_family(tokenizer).n_cases == known.table["pair"].str.startswith("tiny").sum() > 0
    assert known.of_family("0" * 64).n_cases == 0
