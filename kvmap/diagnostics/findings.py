"""Tables and metrics of the texts that were read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any, TypeAlias

from kvmap.diagnostics.attention import attention_rows
from kvmap.diagnostics.errors import error_by_position_rows, error_by_token_rows, text_r2_rows
from kvmap.diagnostics.next_token import next_token_metrics, next_token_rows
from kvmap.diagnostics.reconstruction import r2_metrics
from kvmap.diagnostics.spectrum import spectrum_rows, spectrum_summary_rows
from kvmap.diagnostics.sums import TextSums
from kvmap.fit.features import KINDS
from kvmap.metrics import Metric

Row: TypeAlias = dict[str, Any]

HEAD_MEANS = {
    "attention_cosine": "cosine",
    "concentration_key": "concentration_key",
    "concentration_value": "concentration_value",
    "sink_mass": "sink_mass",
    "sink_mass_mapped": "sink_mass_mapped",
}
"""Metric by the column of table `attention_output` that it is the mean of."""


def text_tables(texts: Iterable[TextSums]) -> dict[str, list[Row]]:
    """Rows of all texts by table: `attention_output`, `r2`, `errors_by_token`, `errors_by_position`,
    `spectrum`, `spectrum_summary` and `next_token`. A table without rows is there, empty.
    """
    tables: dict[str, list[Row]] = {}
    for sums in texts:
        found = {
            "attention_output": attention_rows(sums),
            "r2": text_r2_rows(sums),
            "errors_by_token": error_by_token_rows(sums),
            "errors_by_position": error_by_position_rows(sums),
            "spectrum": spectrum_rows(sums),
            "spectrum_summary": spectrum_summary_rows(sums),
            "next_token": next_token_rows(sums.text, sums.predicted),
        }
        for name, rows in found.items():
            tables.setdefault(name, []).extend(rows)
    return tables


def text_metrics(
    sums: TextSums, tables: Mapping[str, list[Row]] | None = None, arm: str = "mapped"
) -> dict[str, Metric]:
    """Metrics `diagnose/<text>/<arm>/<metric>` of one text.

    * `attention_cosine`, `sink_mass`, `sink_mass_mapped`: means over all layers and query heads, n of them.
    * `concentration_key`, `concentration_value`: the same over mapped layers.
    * `r2_key`, `r2_value`, `effective_rank_key`, `effective_rank_value`: means over mapped layers and KV
      heads, n of them.
    * `error_key_<token kind>`, `error_value_<token kind>`: means over mapped layers, n of them.
    * `kl_nats`, `top1_agreement`: means over predictions, n of them, standard error over contexts.

    What is not a number is left out of its mean, and a mean of nothing is not there.

    Args:
        sums: of the text.
        tables: `text_tables`, where they are made already; other texts' rows are passed over.
        arm: whose mapper it is.
    """
    tables = text_tables([sums]) if tables is None else tables
    own = {name: [row for row in rows if row.get("text") == sums.text] for name, rows in tables.items()}
    values: dict[str, list[float]] = {}
    for row in own["attention_output"]:
        for metric, column in HEAD_MEANS.items():
            if row["layer"] >= sums.native_layers or not column.startswith("concentration"):
                values.setdefault(metric, []).append(row[column])
    for row in own["errors_by_token"]:
        for kind in KINDS:
            values.setdefault(f"error_{kind}_{row['token_kind']}", []).append(row[f"{kind}_error"])
    for row in own["spectrum_summary"]:
        values.setdefault(f"effective_rank_{row['kind']}", []).append(row["effective_rank"])
    means = {
        f"diagnose/{sums.text}/{arm}/{name}": Metric(fmean(kept), n=len(kept))
        for name, found in values.items()
        if (kept := [value for value in found if not math.isnan(value)])
    }
    r2 = [row for row in tables["r2"] if row["split"] == sums.text and not math.isnan(row["r2"])]
    return r2_metrics(r2, arm) | means | next_token_metrics(sums.text, sums.predicted, arm)
