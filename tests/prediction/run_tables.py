"""Tables of runs with planted relations."""

from __future__ import annotations

import numpy as np
import pandas as pd

COSINE = "diagnose/questions/mapped/attention_cosine"
R2 = "diagnose/held_out/mapped/r2_key"
RETENTION = "evaluate/average/mapped/retention"


def table_of(pairs, **columns):
    """One row a run; columns by name, or by the constants above in lower case."""
    names = {"cosine": COSINE, "r2": R2, "retention": RETENTION}
    return pd.DataFrame({"ordered_pair": [f"pair {pair}" for pair in pairs]}).assign(
        **{names.get(name, name): values for name, values in columns.items()}
    )


def noise(seed, n_pairs, n_runs, between=0.5):
    """(n_pairs · n_runs,) of unit variance, a share of which the runs of a pair have in common."""
    random = np.random.default_rng(seed)
    of_pairs = np.repeat(random.normal(size=n_pairs), n_runs)
    return np.sqrt(between) * of_pairs + np.sqrt(1 - between) * random.normal(size=n_pairs * n_runs)


def pairs_of(n_pairs, n_runs):
    return np.repeat(np.arange(n_pairs), n_runs)


def simpson(n_pairs=8, n_runs=6, seed=0):
    """Within each pair the cosine raises retention; pairs of high cosine have low retention."""
    random = np.random.default_rng(seed)
    level = np.repeat(np.linspace(-3, 3, n_pairs), n_runs)
    own = random.normal(size=n_pairs * n_runs)
    retention = -level + own + 0.1 * random.normal(size=n_pairs * n_runs)
    return table_of(pairs_of(n_pairs, n_runs), cosine=level + own, retention=retention)
