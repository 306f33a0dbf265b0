"""A conversation that starts on the source and is handed over to the target, to watch.

    python -m kvmap.demo [pair=tiny] [mapper=linear] [any override of kvmap.run]
    python -m kvmap.demo --script FILE --compare        lines from a file
    python -m kvmap.demo --json < FILE                  one JSON object for each event

Exit status: 0 at `/quit` or the end of the input; 1 something that is the user's to mend, a line of a
script that could not be done, or a reader that has gone; 2 the configuration or an option is wrong;
130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvmap.errors import KvmapError

if TYPE_CHECKING:
    from kvmap.demo.commands import Commands
    from kvmap.demo.writing import Writer

EXIT_REFUSED, EXIT_INTERRUPTED = 1, 130


def parser() -> argparse.ArgumentParser:
    """The command line."""
    described = argparse.ArgumentParser(
        prog="python -m kvmap.demo",
        description="A conversation that starts on the source and is handed over to the target.",
        epilog="docs/demo.md; python -m kvmap.run --help lists the groups and options of overrides.",
    )
    add = described.add_argument
    add("overrides", nargs="*", help="pair=tiny, direction=down, any override of kvmap.run")
    add("--script", type=Path, metavar="FILE", help="lines from a file in place of the standard input")
    add("--escalate", default="auto", metavar="auto|never|N", help="by confidence, on request, or at turn N")
    add("--threshold", type=float, default=0.5, metavar="P", help="of auto, a probability (default: 0.5)")
    add("--confidence", default="first", metavar="first|mean", help="of the first token, or of all (first)")
    add("--compare", action="store_true", help="show the target's own answer beside each mapped one")
    add(
        "--max-kl",
        type=float,
        metavar="NATS",
        help="of a canary; above it the target reads the context itself",
    )
    add("--allow", action="append", default=[], metavar="VERDICT", help="a verdict let through, as no_go")
    add("--max-new-tokens", type=int, default=24, metavar="N", help="of an answer (default: 24)")
    add("--seed", type=int, default=0, metavar="N", help="which stories of the shipped world (default: 0)")
    add("--json", action="store_true", help="one JSON object for each event, on the standard output")
    return described


def main(arguments: Sequence[str] | None = None) -> int:
    """Hold a conversation. Returns the exit status."""
    asked = parser().parse_intermixed_args(arguments)

    from kvmap.run import guarded

    statuses: list[int] = []

    def hold() -> None:
        try:
            statuses.append(converse(asked))
        except BrokenPipeError:
            # whoever read has gone, and what is still buffered would fail again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            statuses.append(EXIT_REFUSED)

    return guarded(hold) or statuses[0]


def converse(asked: argparse.Namespace) -> int:
    """Open models and mapper, and follow the lines to their end.

    Returns:
        The exit status.

    Raises:
        KvmapError: a mistake in the options, the configuration or the models.
    """
    from kvmap.demo.commands import Commands
    from kvmap.demo.handing import watching_gate
    from kvmap.demo.opening import composed, opened
    from kvmap.demo.session import Session
    from kvmap.demo.settings import Rule, Talking
    from kvmap.demo.wording import wording_of
    from kvmap.demo.writing import JsonWriter, TextWriter

    rule = Rule(_turn(asked.escalate), asked.threshold, asked.confidence)
    if asked.max_new_tokens < 1:
        raise KvmapError(f"max-new-tokens={asked.max_new_tokens}: expected at least 1")
    script = None if asked.script is None else _script(asked.script)
    cfg = composed(asked.overrides)
    talking = Talking(
        asked.max_new_tokens, tuple(cfg.evaluation.stop), asked.compare, cfg.evaluation.max_tokens
    )
    writer: Writer = JsonWriter(sys.stdout) if asked.json else TextWriter(sys.stdout)
    with opened(cfg) as ctx:
        started = time.perf_counter()
        mapper, wording = ctx.mapper, wording_of(*(spec.id for spec in ctx.specs.values()))
        gate = watching_gate(mapper, asked.max_kl, tuple(asked.allow))
        session = Session(
            ctx.pair, mapper, wording, options=ctx.options, rule=rule, talking=talking, gate=gate
        )
        session.warm_up()
        writer.write(session.ready(fitted=ctx.mapper_artifact.built, seconds=time.perf_counter() - started))
        commands = Commands(session, asked.seed)
        if script is not None:
            return follow(commands, writer, iter(script), echoes=True)
        if sys.stdin.isatty() and not asked.json:
            return follow(commands, writer, typed(lambda: f"{session.speaker}> "), echoes=False)
        return follow(commands, writer, iter(sys.stdin), echoes=True)


def follow(commands: Commands, writer: Writer, lines: Iterator[str], *, echoes: bool) -> int:
    """Do what lines say until they end, `/quit` or Ctrl-C; a line that cannot be done is refused.

    Args:
        commands: of the session.
        writer: where events go.
        lines: read one by one, each when the one before is done.
        echoes: whether lines are written too, since no terminal shows them; a refused one is then a failure.

    Returns:
        The exit status.
    """
    from kvmap.demo.commands import Quit
    from kvmap.demo.events import Refused

    session, failed, interrupted = commands.session, False, False
    try:
        for event in () if echoes else commands.introduce():
            writer.write(event)
        for line in lines:
            if echoes:
                writer.echo(f"{session.speaker}> ", line.strip())
            try:
                for event in commands.follow(line):
                    writer.write(event)
            except KvmapError as error:
                failed = True
                writer.write(Refused(line.strip(), str(error)))
    except Quit:
        pass
    except KeyboardInterrupt:
        interrupted = True
    writer.write(replace(session.totals, interrupted=interrupted))
    if interrupted:
        return EXIT_INTERRUPTED
    return EXIT_REFUSED if failed and echoes else 0


def typed(prompt: Callable[[], str]) -> Iterator[str]:
    """Lines as they are typed on a terminal, up to the end of the input."""
    # its import is what gives `input` a history and keys to edit with
    with suppress(ImportError):
        import readline  # noqa: F401
    while True:
        try:
            yield input(prompt())
        except EOFError:
            print()
            return


def _turn(word: str) -> str | int:
    return int(word) if word.lstrip("-").isdigit() else word


def _script(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise KvmapError(f"script={path}: {reason}; expected a text file of lines") from error


if __name__ == "__main__":
    sys.exit(main())
