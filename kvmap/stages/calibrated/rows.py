"""Which tokens of the calibration text are rows, and what determines them."""

from __future__ import annotations

from dataclasses import asdict
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvmap.fit.calibrate import CalibrationOptions

if TYPE_CHECKING:
    from kvmap.stages.context import Context

Splits = dict[str, list[int]]


class CalibrationRows:
    """The rows of one run: sequences by split, tokens of each, and the content of all keys."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.cfg = ctx.cfg.calibration

    @property
    def native_head(self) -> int:
        """First tokens of a sequence that are no rows: those that the target will compute itself."""
        own = self.cfg.native_head
        return self.ctx.cfg.transfer.native_head if own is None else own

    @cached_property
    def splits(self) -> Splits:
        """Sequence numbers of the fit and the held-out split."""
        fit, held_out = self.ctx.tokens.split(self.cfg.held_out_share, self.cfg.seed)
        return {"fit": list(fit), "held_out": list(held_out)}

    @property
    def options(self) -> CalibrationOptions:
        """Which tokens become rows, and how they are added up."""
        return CalibrationOptions(
            native_head=self.native_head,
            token_stride=self.cfg.token_stride,
            rope=self.ctx.cfg.rope.strategy,
            product_dtype=self.cfg.product_dtype,
            device=_device(self.cfg.device),
        )

    @property
    def content(self) -> dict[str, Any]:
        """What determines the rows: both models and the tokens."""
        return {
            "source": self.ctx.content("source"),
            "target": self.ctx.content("target"),
            "tokens": self.ctx.tokens.fingerprint,
        }

    @property
    def rows_spec(self) -> dict[str, Any]:
        """What determines which rows count, on which split, and how they are added."""
        strategy, outliers = self.ctx.cfg.rope.strategy, self.cfg.outliers
        policy = {} if outliers.policy == "keep" else {"outliers": asdict(outliers)}
        return (
            self.content
            | policy
            | {
                "held_out_share": self.cfg.held_out_share,
                "split_seed": self.cfg.seed,
                "token_stride": self.cfg.token_stride,
                "native_head": self.native_head,
                "rope": "coupled" if strategy == "coupled" else "strip",
                "product_dtype": self.cfg.product_dtype,
            }
        )


def _device(name: str) -> str:
    """Where tables grow: as asked for, or a GPU if there is one."""
    import torch

    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"
