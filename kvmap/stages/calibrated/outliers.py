"""The rule that flags outlier tokens, fitted once for all parts of a calibration."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from kvmap.files import load_tensors, read_json, save_tensors, write_json
from kvmap.fit.outliers import OutlierRows, OutlierRule, sample_sequences
from kvmap.fit.view import cache_view
from kvmap.models.cache import KVCache
from kvmap.models.capture import prefill
from kvmap.stages.calibrated.captures import CapturedRows


class FlaggedRows(CapturedRows):
    """Rows of which outlier tokens can be told apart."""

    @cached_property
    def outlier_rule(self) -> OutlierRule | None:
        """What flags outlier tokens, fitted on a sample of the fit split; None where all rows are kept."""
        outliers = self.cfg.outliers
        if outliers.policy == "keep":
            return None
        spec = self.rows_spec | {"sample": "outliers"}

        def build(folder: Path) -> None:
            rule = OutlierRule.fit(self._sample(), threshold=outliers.threshold, share=outliers.share)
            settings, tensors = rule.to_state()
            write_json(folder / "rule.json", settings)
            save_tensors(folder / "rule.safetensors", tensors)

        path = self.ctx.store.get_or_build("outlier_rule", spec, build).path
        return OutlierRule.from_state(read_json(path / "rule.json"), load_tensors(path / "rule.safetensors"))

    def _sample(self) -> Iterator[KVCache]:
        numbers = sample_sequences(self.splits["fit"], self.cfg.sequence_length)
        for start in range(0, len(numbers), self.cfg.batch_size):
            ids = self.ctx.tokens.input_ids[numbers[start : start + self.cfg.batch_size]]
            yield cache_view(prefill(self.ctx.pair.source, ids).to("cpu"), self.ctx.cfg.rope.strategy)


def read_outliers(folder: Path) -> OutlierRows:
    """Outlier rows that `write_outliers` wrote."""
    return OutlierRows.from_state(
        read_json(folder / "outliers.json"), load_tensors(folder / "outliers.safetensors")
    )


def write_outliers(outliers: OutlierRows, folder: Path) -> None:
    """Outlier rows beside the moments they were taken with."""
    settings, tensors = outliers.to_state()
    write_json(folder / "outliers.json", settings)
    save_tensors(folder / "outliers.safetensors", tensors)
