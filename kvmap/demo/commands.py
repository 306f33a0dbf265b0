"""Lines to what a session does: a question, or a command that begins with a slash."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

from kvmap.demo.events import Event, Note
from kvmap.demo.session import Session
from kvmap.demo.wording import WorldWording, world_stories
from kvmap.errors import KvmapError, UnknownName

HELP = """\
any other line     a question, which the source or the target answers
/story             a story of the shipped world; the conversation begins anew, on the source
/story TEXT        a story of yours; /story @FILE reads it from a file
/escalate          hand the conversation over: the target answers the last question, and from then on
/back              give it back to the source
/native            what the target answers to the last question from its own cache
/help              this
/quit              the end, as is the end of the input"""

Action: TypeAlias = Callable[[str], Iterator[Event]]


class Quit(Exception):
    """The line that ends the conversation."""


class Commands:
    """What lines mean to one session."""

    def __init__(self, session: Session, seed: int) -> None:
        """Args: the session; which stories of the world `/story` tells."""
        self.session = session
        self._stories = world_stories(seed)
        self._told = False
        self._actions: dict[str, Action] = {
            "/story": self._story,
            "/escalate": self._bare(session.escalate),
            "/back": self._bare(session.back),
            "/native": self._bare(session.native),
            "/help": self._bare(lambda: iter([Note(HELP)])),
            "/quit": self._quit,
        }

    @property
    def tells_stories(self) -> bool:
        """Whether the pair's models know the shipped world, and so its stories."""
        return isinstance(self.session.wording, WorldWording)

    def introduce(self) -> Iterator[Event]:
        """A story of the shipped world where the pair's models know it and none was told yet."""
        if self.tells_stories and not self._told:
            yield from self._story("")

    def follow(self, line: str) -> Iterator[Event]:
        """Do what a line says. Blank lines, and those that begin with `#`, say nothing.

        The first question is about a story that `introduce` tells, unless `/story` told one.

        Raises:
            KvmapError: it cannot be done; nothing has changed.
            Quit: it ends the conversation.
        """
        line = line.strip()
        if not line or line.startswith("#"):
            return
        if not line.startswith("/"):
            yield from self.introduce()
            yield from self.session.ask(line)
            return
        name, _, rest = line.partition(" ")
        if name not in self._actions:
            raise UnknownName("command", name, self._actions)
        yield from self._actions[name](rest.strip())

    def _story(self, text: str) -> Iterator[Event]:
        if text.startswith("@"):
            told = self.session.tell(_read(Path(text[1:]).expanduser()))
        elif text:
            told = self.session.tell(text)
        elif self.tells_stories:
            told = self.session.tell(*next(self._stories))
        else:
            raise KvmapError("/story: expected a text, or @FILE; only shipped models have a world of stories")
        yield from told
        self._told = True

    def _quit(self, _: str) -> Iterator[Event]:
        raise Quit

    @staticmethod
    def _bare(action: Callable[[], Iterator[Event]]) -> Action:
        """A command that takes nothing."""

        def run(rest: str) -> Iterator[Event]:
            if rest:
                raise KvmapError(f"{rest!r} after the command: expected nothing")
            return action()

        return run


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise KvmapError(f"/story @{path}: {reason}; expected a text file") from error
