"""An application on a port, until a signal ends it: no new connections, the running requests finish, exit."""

from __future__ import annotations

import math
import os
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from llmc.errors import UserError
from llmc.runtime.engine import Engine
from llmc.runtime.server.connection import Connection

OnReady = Callable[[str], None]


class Server(uvicorn.Server):
    """uvicorn's server, which on SIGTERM or SIGINT drains the engine and then returns instead of dying by
    it.
    """

    def __init__(self, config: uvicorn.Config, engine: Engine, on_ready: OnReady | None) -> None:
        super().__init__(config)
        self._engine = engine
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._on_ready is not None and sockets:
            host, port = sockets[0].getsockname()[:2]
            self._on_ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # The base class records the signal to raise it again at the end, which would turn exit code 0 into
        # -15.
        self._engine.begin_drain()
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to host:port (port 0: any). Raises UserError when that cannot be."""
    where = f"{host}:{port}"
    if host.startswith("[") and host.endswith("]"):  # as in a URL
        host = host[1:-1]
    if not 0 <= port < 2**16:  # getaddrinfo would take it modulo 65536
        raise UserError(f"cannot listen on {where}: a port is between 0 and 65535; give another --port")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise UserError(f"cannot listen on {where}: {error}; give another --host") from error
    sock = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(1024)
    except OSError as error:
        sock.close()
        raise UserError(f"cannot listen on {where}: {error.strerror}; give another --port or --host") from error
    return sock


def make_server(app: FastAPI, drain_timeout: float = 30.0, on_ready: OnReady | None = None) -> Server:
    """A server for an app of `create_app`, not yet running."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        http=Connection,
        ws="none",
        timeout_keep_alive=30,
        timeout_graceful_shutdown=max(1, math.ceil(drain_timeout)),
    )
    return Server(config, app.state.engine, on_ready)


def serve(app: FastAPI, host: str, port: int, *, drain_timeout: float = 30.0, on_ready: OnReady | None = None) -> None:
    """Serves until SIGTERM or SIGINT, then drains: new requests get 503, running ones have `drain_timeout`
    seconds.

    Closes the engine, and returns when all is done. on_ready is called with the base URL once connections are
    taken. Raises UserError when the port cannot be had.
    """
    engine: Engine = app.state.engine
    try:
        sock = listen(host, port)
        make_server(app, drain_timeout, on_ready).run(sockets=[sock])
    finally:
        engine.close()
