"""The worker's half of taking caches: read them beside the steps, map between them what has come."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace

from kvmap.errors import KvmapError
from kvmap.serving.compatibility import Incompatible
from kvmap.serving.vllm.filling import Filling
from kvmap.serving.vllm.loading import Loader, LoadFailed, Loading, Wanted
from kvmap.serving.vllm.messages import Take, Taken
from kvmap.serving.vllm.own_tokens import TargetParts
from kvmap.serving.vllm.settings import Settings

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Job:
    """A cache on its way into pages; `filling` begins with the first piece of work, `taken` is its end."""

    take: Take
    loading: Loading
    filling: Filling | None = None
    map_seconds: float = 0.0
    taken: Taken | None = None


class Taker:
    """Caches on their way into pages. Pages and model are touched by the engine's own thread alone."""

    def __init__(self, parts: TargetParts, loader: Loader, settings: Settings) -> None:
        """Args: the engine's parts; what reads from the store; and the connector's settings."""
        self._parts, self._loader, self._settings = parts, loader, settings
        self._jobs: dict[str, _Job] = {}

    def start(self, take: Take) -> None:
        """Begin to read."""
        n_tokens, load_seconds = len(take.token_ids), self._settings.load_seconds
        wanted = Wanted(take.manifest, take.n_own, n_tokens, take.wait_seconds, load_seconds)
        self._jobs[take.request_id] = _Job(take, self._loader.start(wanted))

    def give_up(self, request_id: str) -> Take | None:
        """A request is over: its pages are written no more. None where they were not on their way."""
        job = self._jobs.pop(request_id, None)
        if job is None:
            return None
        job.loading.give_up()
        return job.take

    def advance(self, idle_seconds: float) -> list[tuple[Take, Taken]]:
        """Map some of what has come, of the request first that came first.

        Args:
            idle_seconds: the engine has nothing else to do, so go on for so long, and wait for more to come.
                0: map one piece, so that running requests wait for no more than that.

        Returns:
            What is over.
        """
        until = time.monotonic() + idle_seconds
        while True:
            self._loader.news.clear()
            has_worked = any(self._work(job) for job in self._jobs.values())
            over = [(job.take, job.taken) for job in self._jobs.values() if job.taken is not None]
            remaining = until - time.monotonic()
            if over or not self._jobs or remaining <= 0:
                break
            if not has_worked:
                self._loader.news.wait(remaining)
        for take, _ in over:
            del self._jobs[take.request_id]
        return over

    def _work(self, job: _Job) -> bool:
        """One piece of a request's pages, if there is one to be had; whether there was."""
        begun = time.perf_counter()
        try:
            return self._fill(job)
        except (LoadFailed, Incompatible) as error:
            _log.warning("%s: the target reads the prompt itself: %s", job.take.request_id, error)
            job.taken = Taken(error.cause, str(error))
        except KvmapError as error:
            _log.warning("%s: the target reads the prompt itself: %s", job.take.request_id, error)
            job.taken = Taken("layout", str(error))
        except Exception as error:
            # whatever a damaged mapper or cache provokes, the request is answered
            _log.warning("%s: the target reads the prompt itself", job.take.request_id, exc_info=True)
            job.taken = Taken("failure", f"{type(error).__name__}: {error}")
        finally:
            job.map_seconds += time.perf_counter() - begun
            if job.taken is not None:
                loading = job.loading
                loading.give_up()
                job.taken = replace(
                    job.taken,
                    load_seconds=loading.seconds,
                    map_seconds=job.map_seconds,
                    wait_seconds=loading.wait_seconds,
                )
        return True

    def _fill(self, job: _Job) -> bool:
        is_ended = job.loading.is_ended
        arrived = job.loading.take()
        filling, has_begun = job.filling, False
        if filling is None:
            filling = job.filling = Filling(self._parts, job.take, self._settings.chunk_tokens)
            has_begun = filling.begin()
        for part in arrived:
            filling.add(part)
        has_worked = filling.work()
        if is_ended and not filling.has_work:
            filling.check_full()
            job.taken = Taken(
                None,
                f"{filling.n_mapped} tokens mapped",
                filling.n_mapped,
                filling.n_head,
                job.loading.n_bytes,
            )
        return has_worked or has_begun
