"""What the scheduler's side knows of one request."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from kvmap.serving.asking import Asked
from kvmap.serving.outcome import Outcome, Published, refused
from kvmap.serving.vllm.claiming import Claim, Search


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
    publication: Publication | None = None
    published: Published | None = None

    def refuse(self, cause: str, reason: object) -> None:
        """Nothing is taken: the engine reads the whole prompt."""
        n_prompt = self.request.num_prompt_tokens
        self.outcome = refused(cause, reason, n_prompt=n_prompt, n_held_back=n_prompt)

    def fail_publication(self, why: str) -> None:
        """The worker could not write it."""
        self.publication, self.published = None, Published(0, reason=f"storage: {why}")
