"""lm-eval's own command line with the model `kvmap` registered, and how to make that permanent.

    python -m kvmap.harness --model kvmap --model_args mapper=<folder> --tasks arc_challenge
    python -m kvmap.harness enable     lm_eval itself finds the model from now on (lm-eval up to 0.4.13)
    python -m kvmap.harness disable    takes that back
    python -m kvmap.harness tasks      the folder of kvmap's own tasks, for --include_path

Exit status: 0 done; 1 something that is the user's to mend.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

from kvmap.errors import KvmapError
from kvmap.harness import discovery


def main(arguments: list[str] | None = None) -> int:
    """Run one of kvmap's own commands, or lm-eval's.

    Returns:
        0, or 1 where lm-eval met what is the user's to mend.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    site = Path(sysconfig.get_path("purelib"))
    if given == ["enable"]:
        print(f"wrote {discovery.link(site)}: `lm_eval --model kvmap` works in this environment")
    elif given == ["disable"]:
        removed = discovery.unlink(site)
        print(f"removed {removed}" if removed else f"nothing to remove in {site}")
    elif given == ["tasks"]:
        print(Path(__file__).parent)
    else:
        return _lm_eval(given)
    return 0


def _lm_eval(arguments: list[str]) -> int:
    discovery.register()
    from lm_eval.__main__ import cli_evaluate

    sys.argv = ["lm-eval", *arguments]
    try:
        cli_evaluate()
    except KvmapError as error:
        print(f"kvmap: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
