"""Runs a server: listens at once, builds the engine meanwhile, drains on SIGTERM or SIGINT."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from threading import Thread
from typing import NoReturn

import uvicorn

from jaxinfer.engine.engine import Engine
from jaxinfer.http.app import create_app
from jaxinfer.http.service import Service
from jaxinfer.http.settings import ServerSettings

type Build = Callable[[Callable[[str], None]], Engine]
"""Builds the engine, calling back with what it is busy with ("loading", "compiling ..."), which /ready shows."""

_CLOSE_SECONDS = 5
"""Time for connections to take the last bytes of their answers after the drain."""


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises OSError that says which address cannot be had, and why."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        # The standard library adds the address to strerror; name resolution has numbers of its own, below 0.
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise OSError(f"cannot listen on {host}:{port}: {reason}; choose another --host or --port") from None


def run_server(settings: ServerSettings, listener: socket.socket, build: Build) -> int:
    """Serves on `listener` until a signal ends it; returns the exit code: 0, or 1 if the engine could not be built."""
    return asyncio.run(_Running(settings, listener, build).run())


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, which would close the doors before the running requests have finished."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _leave(code: int) -> NoReturn:
    """Ends the process while another thread is inside XLA, which an ordinary exit would tear down under it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _Running:
    def __init__(self, settings: ServerSettings, listener: socket.socket, build: Build) -> None:
        self._listener = listener
        self._build = build
        self._service = Service(settings)
        self._server = _Server(
            uvicorn.Config(
                create_app(self._service),
                log_level="warning",
                access_log=False,
                server_header=False,
                lifespan="off",
                timeout_keep_alive=75,
                timeout_graceful_shutdown=_CLOSE_SECONDS,
            )
        )
        self._stop = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        stopping = asyncio.create_task(self._stop.wait())
        building = asyncio.wrap_future(self._start_building())
        await asyncio.wait({building, stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
        failed = building.done() and building.exception() is not None
        if failed:
            print(f"jaxinfer: cannot start: {building.exception()}", file=sys.stderr, flush=True)
        elif building.done():
            self._service.start(building.result())
            print(self._ready_line(), flush=True)
            await asyncio.wait({stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
        await self._service.drain()
        self._server.should_exit = True
        await serving
        if not building.done():
            _leave(0)
        try:
            self._service.stop()
        except TimeoutError as error:
            print(f"jaxinfer: {error}", file=sys.stderr, flush=True)
            _leave(1)
        return 1 if failed else 0

    def _start_building(self) -> Future[Engine]:
        result: Future[Engine] = Future()

        def on_progress(text: str) -> None:
            self._service.progress = text

        def work() -> None:
            try:
                result.set_result(self._build(on_progress))
            except BaseException as error:
                result.set_exception(error)

        Thread(target=work, name="build-engine", daemon=True).start()
        return result

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stop.is_set():  # asked twice: now, as the operating system would
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        print(f"jaxinfer: {number.name}: finishing running requests", file=sys.stderr, flush=True)
        self._stop.set()

    def _ready_line(self) -> str:
        host, port = self._listener.getsockname()[:2]
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return f"jaxinfer: serving {self._service.model_name} on http://{address}/v1"
