"""Serves the application until it is told to stop, and lets answers under way come to their end."""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping

import uvicorn

from kvmap.errors import KvmapError
from kvmap.serving.gateway.app import application
from kvmap.serving.gateway.settings import ServerSettings, Settings


class AddressTaken(KvmapError):
    """The gateway cannot listen where it is told to."""


def serve(settings: Settings, environment: Mapping[str, str], *, quiet: bool = False) -> int:
    """Serve until SIGTERM or Ctrl-C. Returns the exit status, 0.

    From then on nothing new is taken; what is under way has `server.drain_seconds`, and what is left is cut.

    Raises:
        AddressTaken: it cannot listen there.
    """
    listening = listen(settings.server)
    level = logging.WARNING if quiet else logging.INFO
    logging.basicConfig(
        level=level, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    config = uvicorn.Config(
        application(settings, environment),
        log_config=None,
        log_level=level,
        access_log=False,
        lifespan="on",
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=round(settings.server.drain_seconds),
    )
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(
        f"kvmap gateway on http://{shown}:{port}: source {settings.source.url}, target {settings.target.url}",
        flush=True,
    )
    server = uvicorn.Server(config)
    # uvicorn has handlers of its own while it runs, and passes the signal on to this one before and after
    previous = signal.signal(signal.SIGTERM, lambda *_: setattr(server, "should_exit", True))
    try:
        server.run(sockets=[listening])
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, previous)
        listening.close()
    print("kvmap gateway: stopped", flush=True)
    return 0


def listen(server: ServerSettings) -> socket.socket:
    """A socket at the gateway's address.

    Raises:
        AddressTaken: naming the address, what the system said, and the remedy.
    """
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    try:
        return socket.create_server((server.host, server.port), family=family, backlog=512)
    except (OSError, UnicodeError) as error:
        code = getattr(error, "errno", None)
        said = os.strerror(code) if isinstance(code, int) and code in errno.errorcode else str(error)
        raise AddressTaken(
            f"server.host={server.host}, server.port={server.port}: {said}; choose an address of this "
            "machine and a port that is free (--host, --port)"
        ) from error
