"""vLLM's benchmark client as a command: `vllm bench serve`, also where the package has another name.

The command `vllm` asks for the version of a package of that name; builds for the CPU are called otherwise.
"""

from __future__ import annotations

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser


def run() -> None:
    """Entry point of `python -m kvmap.serving.vllm.bench_client`; arguments of `vllm bench serve`."""
    parser = FlexibleArgumentParser(description="benchmark of an engine that serves")
    add_cli_args(parser)
    main(parser.parse_args())


if __name__ == "__main__":
    run()
