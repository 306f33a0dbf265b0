"""Time to first token against context length, of each way of serving."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvmap.serving.bench.points import COLD, GATEWAY_COLD, GATEWAY_REPREFILL, GATEWAY_WARM, REPREFILL, WARM

LINES = {
    REPREFILL: ("re-prefill", "#0072B2", "-"),
    WARM: ("hand-off, source has read", "#D55E00", "-"),
    COLD: ("hand-off, source reads first", "#D55E00", "--"),
    GATEWAY_REPREFILL: ("gateway, re-prefill", "#56B4E9", "-"),
    GATEWAY_WARM: ("gateway, source has read", "#009E73", "-"),
    GATEWAY_COLD: ("gateway, source reads meanwhile", "#009E73", "--"),
}


def draw(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """One panel a concurrency."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    concurrencies = sorted({int(row["concurrency"]) for row in rows})
    figure, axes = plt.subplots(
        1,
        len(concurrencies),
        figsize=(3.4 * len(concurrencies), 2.6),
        layout="constrained",
        squeeze=False,
        sharey=True,
    )
    for axis, concurrency in zip(axes[0], concurrencies, strict=True):
        for mode, (label, colour, style) in LINES.items():
            own = [row for row in rows if (row["mode"], int(row["concurrency"])) == (mode, concurrency)]
            if not own:
                continue
            own.sort(key=lambda row: int(row["n_tokens"]))
            times = [float(row["ttft_ms"]) / 1000 for row in own]
            lengths = [int(row["n_tokens"]) for row in own]
            axis.plot(lengths, times, style, color=colour, marker="o", markersize=3, label=label)
        axis.set_title(f"{concurrency} at a time", fontsize=8)
        axis.set_xscale("log", base=2)
        lengths = sorted({int(row["n_tokens"]) for row in rows})
        axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axis.set_yscale("log")
        axis.set_xlabel("tokens of context")
    axes[0][0].set_ylabel("time to first token, seconds")
    axes[0][0].legend(frameon=False, fontsize=6, handlelength=3)
    figure.savefig(file, dpi=200)
    plt.close(figure)
