"""Sweeps from the command line: how far they got, and starting again what is not done.

python -m kvmap.sweep status outputs/<study> [--json] [--resubmit failed|missing|all [--dry-run]]

Exit status: 0 all points are done; 1 not all are; 2 it cannot be said.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `python -m kvmap.sweep`."""
    from kvmap import run
    from kvmap.sweeps.command import main as command

    return command(run.job, run.guarded, arguments)


if __name__ == "__main__":
    sys.exit(main())
