"""Print what an installed vLLM needs, for pip, without what only images, sound and films need.

Its builds for the CPU name builds of PyTorch that stand on another index, and media packages that match them.
"""

from __future__ import annotations

import sys
from importlib.metadata import requires

from packaging.requirements import Requirement

MEDIA = {"torchaudio", "torchvision", "torchcodec"}


def main() -> None:
    """Entry point; the argument is the name of the distribution."""
    for line in requires(sys.argv[1]) or []:
        needed = Requirement(line)
        if needed.name in MEDIA or (needed.marker and not needed.marker.evaluate({"extra": ""})):
            continue
        version = ",".join(str(part).split("+")[0] for part in needed.specifier)
        extras = f"[{','.join(sorted(needed.extras))}]" if needed.extras else ""
        print(f"{needed.name}{extras}{version}")


if __name__ == "__main__":
    main()
