"""Write questions of the shipped world as prompts, without choices or answers: none that an evaluation asks.

python experiments/preflight/prompts.py FILE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kvmap.evaluation.items import world_items

SEED, N_PER_KIND = 77, 16


def main() -> None:
    """Entry point."""
    lines = [json.dumps({"context": item.context}) for item in world_items(SEED, N_PER_KIND)]
    Path(sys.argv[1]).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
