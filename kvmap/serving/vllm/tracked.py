"""What the scheduler's side knows of one request."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from kvmap.serving.asking import Asked
from kvmap.serving.outcome import Outcome, Published, refused
from kvmap.serving.vllm.claiming import Claim, Search
from kvmap.serving.vllm.messages import Taken


@dataclass(eq=False)
class Publication:
    """A prompt's cache on its way to the store.

    Attributes:
        group: of the store.
        name: namespace.
        begun: True by it: the cache is published already.
        upto: first tokens whose pages the worker was told to write.
    """

    group: str
    name: str
    begun: Future[bool]
    upto: int = 0


@dataclass(eq=False)
class Tracked:
    """One request, and what is known of it so far.

    Attributes:
        request: vLLM's.
        asked: what it asks for.
        search: for a cache to take; None where none is asked for.
        claim: what was claimed last.
        is_loading: pages are being filled, or were: mapped tokens lie in them.
        undo_salt: gives the request's pages their plain hashes back.
        outcome: of taking, once it is known.
        tries_again: whether it may still be bettered.
        publication: under way.
        published: of publishing, once it is known.
    """

    request: Any
    asked: Asked
    search: Search | None = None
    claim: Claim | None = None
    is_loading: bool = False
    undo_salt: Callable[[], None] | None = None
    outcome: Outcome | None = None
    tries_again: bool = False
    publication: Publication | None = None
    published: Published | None = None

    @property
    def is_searching(self) -> bool:
        """Whether a cache may still be claimed."""
        return not self.is_loading and (self.outcome is None or self.tries_again)

    def try_again(self) -> None:
        """A cache that was being written has come to nothing; one may lie there complete."""
        assert self.search is not None
        self.tries_again = not self.search.only_published
        self.search.only_published = True

    def refuse(self, cause: str, reason: object, taken: Taken | None = None) -> None:
        """Nothing is taken: the engine reads the whole prompt.

        Args:
            cause: one of `kvmap.serving.outcome.CAUSES`.
            reason: for people.
            taken: what the worker says of the time that was spent.
        """
        if self.tries_again:  # the reason of the first try stands
            self.tries_again = False
            return
        n_prompt = self.request.num_prompt_tokens
        counts: dict[str, Any] = {"n_prompt": n_prompt, "n_held_back": n_prompt}
        if taken is not None:
            counts |= {"load_seconds": taken.load_seconds, "map_seconds": taken.map_seconds}
            counts |= {"wait_seconds": taken.wait_seconds}
        self.outcome = refused(cause, reason, **counts)
