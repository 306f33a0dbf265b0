"""Two engines behind one OpenAI-compatible address.

    python -m kvmap.serving.gateway --source-url http://127.0.0.1:8001 --target-url http://127.0.0.1:8002
    python -m kvmap.serving.gateway --config gateway.json --check       what would hold, as JSON

Exit status: 0 after SIGTERM or Ctrl-C; 1 something that is the user's to mend, as an address that is taken
or a package that is missing; 2 a setting is wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvmap.errors import KvmapError

EXIT_REFUSED, EXIT_MISTAKEN = 1, 2

#: flag: setting it stands for
FLAGS = {
    "--source-url": "source.url",
    "--target-url": "target.url",
    "--source-model": "source.model",
    "--target-model": "target.model",
    "--model": "model",
    "--host": "server.host",
    "--port": "server.port",
    "--mode": "handoff.mode",
    "--min-tokens": "handoff.min_tokens",
    "--from-turn": "rules.from_turn",
    "--prompt-tokens": "rules.prompt_tokens",
    "--confidence": "confidence.measure",
    "--threshold": "confidence.threshold",
    "--first-tokens": "confidence.first_tokens",
    "--max-in-flight": "limits.in_flight",
    "--drain-seconds": "server.drain_seconds",
}


def parser() -> argparse.ArgumentParser:
    """The command line; what a flag means and its default are those of its setting."""
    from kvmap.serving.gateway.reading_settings import fields

    described = argparse.ArgumentParser(
        prog="python -m kvmap.serving.gateway",
        description="An OpenAI-compatible gateway: a small engine answers, a large one takes over.",
        epilog="All settings, also those without a flag: docs/serving_gateway.md, or --check.",
    )
    known = {name: (default, text) for name, default, text in fields()}
    described.add_argument("--config", type=Path, metavar="FILE", help="settings as JSON; flags go before it")
    for flag, name in FLAGS.items():
        default, text = known[name]
        suffix = "required" if default is ... else f"default: {'none' if default is None else default}"
        group, _, field = name.rpartition(".")
        whose = f"the {group}'s {field}, " if group in ("source", "target") else ""
        described.add_argument(flag, dest=name, metavar=field.upper(), help=f"{whose}{text} ({suffix})")
    described.add_argument(
        "--expose", action="store_true", default=None, dest="server.expose", help=known["server.expose"][1]
    )
    described.add_argument("--check", action="store_true", help="print the settings that hold, and leave")
    described.add_argument("--quiet", action="store_true", help="log warnings alone")
    return described


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until told to stop. Returns the exit status."""
    try:
        from kvmap.serving.gateway.reading_settings import SettingsMistaken, read_settings
        from kvmap.serving.gateway.serving import serve
    except ImportError as error:
        print(
            f"{error.name} is not installed: the gateway needs fastapi, uvicorn, httpx and prometheus_client "
            "(pip install 'kvmap[serving]')",
            file=sys.stderr,
        )
        return EXIT_REFUSED
    asked = vars(parser().parse_args(arguments))
    given: dict[str, Any] = {name: asked[name] for name in asked if "." in name or name == "model"}
    given = {name: value for name, value in given.items() if value is not None}
    try:
        settings = read_settings(asked["config"], given, os.environ)
        if asked["check"]:
            print(settings.model_dump_json(indent=2))
            return 0
        return serve(settings, os.environ, quiet=asked["quiet"])
    except SettingsMistaken as error:
        for mistake in error.mistakes:
            print(f"kvmap.serving.gateway: {mistake}", file=sys.stderr)
        return EXIT_MISTAKEN
    except KvmapError as error:
        print(f"kvmap.serving.gateway: {error}", file=sys.stderr)
        return EXIT_REFUSED


if __name__ == "__main__":
    sys.exit(main())
