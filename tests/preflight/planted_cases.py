"""Tables of cases with planted relations, and diagnostics of a map that is as good as asked for."""

from __future__ import annotations

import numpy as np
import pandas as pd

from kvmap.preflight import Evidence

PROBE = "head_local"


def diagnostics(quality: float, control_kl: float = 0.5) -> dict[str, float]:
    """Of a map of that quality, 0 to 1: everything `measure` gives, and `kl_share`."""
    kl = control_kl * (1 - quality)
    return {
        "kl_nats": kl,
        "kl_share": kl / control_kl,
        "kl_window_nats": 4 * kl,
        "top1_agreement": 0.8 + 0.2 * quality,
        "attention_cosine": 0.5 + 0.5 * quality,
        "r2_key": quality,
        "r2_value": 0.9 * quality,
        "r2_key_fit": quality + 0.01,
        "r2_value_fit": 0.9 * quality + 0.01,
        "gap_key": 0.01,
        "gap_value": 0.01,
        "rows_per_feature": 50.0,
    }


def cases(n_pairs: int = 12, n_seeds: int = 2, noise: float = 0.01, seed: int = 0) -> Evidence:
    """Pairs of quality 0.2 to 0.9: `head_local` retains its quality, `mlp` 0.95 or more of everything."""
    random = np.random.default_rng(seed)
    rows = []
    for pair, quality in enumerate(np.linspace(0.2, 0.9, n_pairs)):
        for draw in range(n_seeds):
            shown = {f"{PROBE}/{name}": value for name, value in diagnostics(quality).items()}
            kept = {"head_local": quality, "mlp": 0.95 + 0.04 * quality}
            for mapper, retention in kept.items():
                facts = {"pair": f"pair {pair}", "mapper": mapper, "top_k": "all", "seed": str(draw)}
                value = retention + noise * random.normal()
                kl = 0.5 * (1 - retention)
                rows.append(
                    facts
                    | {"n_items": 60, "retention": value, "standard_error": 0.01}
                    | {"context_carried": retention, "kl_nats": kl, **shown}
                )
    table = pd.DataFrame(rows)
    true = table.groupby(["pair", "mapper", "top_k"])["retention"].transform("mean")
    return Evidence(table.assign(true=true))
