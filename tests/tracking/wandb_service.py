"""A W&B service of one process: it answers what W&B's own client asks, and keeps the rows it is sent."""

from __future__ import annotations

import gzip
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvmap.files import read_json
from kvmap.tracking import Metric, Run


class Service(ThreadingHTTPServer):
    """Keeps lines of history by run; operations in `refused` are answered with an error, in `silent` not."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.lines: dict[str, list[str]] = {}
        self.settings: dict[str, dict[str, Any]] = {}
        self.posts: list[tuple[str, int]] = []
        self.refused: set[str] = set()
        self.silent: set[str] = set()
        self.address = f"http://127.0.0.1:{self.server_port}"

    def rows(self, run: str) -> list[dict[str, Any]]:
        """What the run's history holds: of lines with one step, the last, as W&B keeps them."""
        rows = [json.loads(line) for line in self.lines[run]]
        return list({row["_step"]: row for row in rows}.values())

    def answer(self, operation: str, given: dict[str, Any]) -> dict[str, Any] | None:
        """The data of one GraphQL answer."""
        return getattr(self, f"_{operation}", lambda _: None)(given)

    def _RunResumeStatus(self, given: dict[str, Any]) -> dict[str, Any]:  # noqa: N802 (W&B's names)
        lines = self.lines.get(given["name"])
        bucket = {
            "id": "b",
            "name": given["name"],
            "historyLineCount": len(lines or []),
            "eventsLineCount": 0,
            "logLineCount": 0,
            "historyTail": json.dumps((lines or [])[-1:]),
            "eventsTail": "[]",
            "summaryMetrics": "{}",
            "config": "{}",
            "wandbConfig": "{}",
            "tags": [],
        }
        model = {"id": "m", "name": given["project"], "entity": {"id": "e", "name": "team"}}
        return {"model": {**model, "bucket": None if lines is None else bucket}}

    def _UpsertBucket(self, given: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        self.lines.setdefault(given["name"], [])
        told = {key: value for key, value in given.items() if value is not None}
        self.settings.setdefault(given["name"], {}).update(told)
        project = {"id": "p", "name": given.get("project") or "p", "entity": {"id": "e", "name": "team"}}
        bucket = {"id": "b", "name": given["name"], "displayName": given["name"], "project": project}
        more = {"description": "", "config": "{}", "sweepName": None}
        count = len(self.lines[given["name"]])
        return {"upsertBucket": {"bucket": {**bucket, **more, "historyLineCount": count}, "inserted": True}}

    def _Viewer(self, _: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        viewer = {"id": "u", "entity": "team", "username": "me", "flags": "{}", "teams": {"edges": []}}
        return {"viewer": viewer}

    def _ArtifactType(self, _: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        return {"project": {"artifact": None}}

    def _CreateRunFiles(self, given: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        files = [{"name": name, "uploadUrl": f"{self.address}/put/{name}"} for name in given["files"]]
        return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}

    def _CreateArtifact(self, given: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        artifact = {"id": "a", "state": "COMMITTED", "artifactSequence": {"latestArtifact": {"id": "a"}}}
        return {"createArtifact": {"artifact": artifact}}

    def stream(self, run: str, files: dict[str, Any]) -> None:
        """Lines from an offset on take the place of what was there."""
        if chunk := files.get("wandb-history.jsonl"):
            kept = self.lines.setdefault(run, [])
            self.posts.append((run, chunk["offset"]))
            del kept[chunk["offset"] :]
            kept.extend(chunk["content"])


class _Handler(BaseHTTPRequestHandler):
    server: Service

    def log_message(self, *_: object) -> None:
        return None

    def _content(self) -> bytes:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(content) if self.headers.get("Content-Encoding") == "gzip" else content

    def _reply(self, answer: dict[str, Any], status: int = 200) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        self._reply({})

    def do_PUT(self) -> None:
        self._content()
        self._reply({})

    def do_POST(self) -> None:
        content = json.loads(self._content())
        if self.path == "/graphql":
            operation = re.search(r"(?:query|mutation)\s+(\w+)", content["query"])
            assert operation
            if operation[1] in self.server.refused:
                return self._reply({"errors": [{"message": "permission denied"}]}, 403)
            if operation[1] in self.server.silent:
                return time.sleep(20)
            given = content.get("variables") or {}
            return self._reply({"data": self.server.answer(operation[1], given)})
        if found := re.fullmatch(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", self.path):
            self.server.stream(found[1], content.get("files") or {})
        return self._reply({"exitcode": None, "limits": {}})


@contextmanager
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """A service at work, and an environment in which W&B's client finds it."""
    with Service() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("WANDB_BASE_URL", server.address)
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        yield server
        server.shutdown()


def attempt(directory: Path, *names: str, fails: bool = False) -> str:
    """One attempt that logs a row a name; gives the id of its W&B run."""
    try:
        with Run(directory, "study", {}, "wandb") as run:
            for number, name in enumerate(names):
                run.log({f"evaluate/task/mapped/{name}": Metric(float(number), 10)})
            if fails:
                raise RuntimeError("stopped half way")
    except RuntimeError:
        pass
    return str(read_json(directory / "run.json")["wandb"]["id"])


def logged(server: Service, run: str) -> list[str]:
    """Last parts of the metrics' keys, in the order of the rows."""
    keys = (key for row in server.rows(run) for key in row)
    return [key.rsplit("/", 1)[1] for key in keys if key.startswith("evaluate/") and not key.endswith(".n")]
