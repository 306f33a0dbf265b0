"""Run directories as an evaluation leaves them, written without one."""

from __future__ import annotations

import numpy as np

from kvmap.tracking import Run

CONFIG = {
    "study": "s",
    "outputs": "o",
    "seed": 0,
    "mapper": {"top_k": 4, "seed": 0},
    "transfer": {"recompute_seed": 0},
    "evaluation": {"seed": 0, "fewshot_seed": 1, "cost": {"seed": 0}},
    "benchmark": {"seed": 0},
    "tracking": {"backend": "none"},
}


def item_rows(task, arm, correct, *, n_truncated=0, contents=None, choices=4, first=0):
    """Rows of the table `items`, one for each right or wrong answer."""
    return [
        {
            "task": task,
            "id": f"line {first + number}",
            "arm": arm,
            "logliks": " ".join(["-1.0"] * choices),
            "correct": bool(right),
            "correct_norm": bool(right),
            "generated_correct": None,
            "n_truncated": n_truncated,
            "content": contents[number] if contents else f"{task}-{first + number}",
        }
        for number, right in enumerate(correct)
    ]


def sequence_rows(arm, nll, *, n_tokens=10, contents=None):
    """Rows of the table `sequences`, one for each summed NLL."""
    return [
        {
            "arm": arm,
            "sequence": number,
            "nll_nats": float(value),
            "n_tokens": n_tokens,
            "content": contents[number] if contents else f"text-{number}",
        }
        for number, value in enumerate(nll)
    ]


def write_run(directory, items=(), sequences=(), *, fails=False, tables=None, facts=None, **settings):
    """A finished run; `settings` change its configuration: `mapper={"seed": 1}`."""
    config = {
        key: {**value, **settings.get(key, {})} if isinstance(value, dict) else settings.get(key, value)
        for key, value in CONFIG.items()
    }
    try:
        with Run(directory, "study", config, "none") as run:
            run.note(**(facts or {}))
            for name, rows in {"items": items, "sequences": sequences, **(tables or {})}.items():
                if rows:
                    run.table(name, rows)
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    return directory


def answers(share, n, seed):
    """Right and wrong answers, so many of them right."""
    return np.random.default_rng(seed).random(n) < share
