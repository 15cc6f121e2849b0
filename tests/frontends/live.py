"""A real server, uvicorn and all, in a thread of the test process; and the same as a program of its own."""

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import uvicorn

from jaxinfer.engine.engine import Engine
from jaxinfer.http.app import create_app
from jaxinfer.http.server import bind, run_server
from jaxinfer.http.service import Service
from jaxinfer.http.settings import ServerSettings
from tests.frontends.fakes import FakeRunner, fake_engine


@dataclass
class Live:
    """A running server."""

    url: str
    service: Service
    client: httpx.Client
    openai: openai.OpenAI

    @property
    def engine(self) -> Engine:
        return self.service.engine

    @property
    def runner(self) -> Any:
        return self.engine.runner

    def completion(self, **body: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json=body)

    def chat(self, content: str = "Hi", **body: Any) -> httpx.Response:
        return self.client.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": content}], **body}
        )

    def idle(self) -> bool:
        """Whether the engine has nothing to do, holds no pages, and all names are free."""
        stats = self.engine.stats()
        busy = stats.running + stats.prefilling + stats.waiting
        return not busy and stats.free_pages == stats.total_pages and not len(self.service.jobs)


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether the condition comes true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return False


@contextlib.contextmanager
def live(engine: Engine | None, **settings: Any) -> Iterator[Live]:
    """Serves an engine on a free port; None leaves the server at its start."""
    service = Service(ServerSettings(port=0, **settings))
    listener = bind("127.0.0.1", 0)
    server = uvicorn.Server(
        uvicorn.Config(create_app(service), log_level="warning", lifespan="off", timeout_graceful_shutdown=2)
    )

    async def serve() -> None:
        if engine is not None:
            service.start(engine)
        await server.serve(sockets=[listener])
        service.stop()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    headers = {"Authorization": "Bearer secret"}
    try:
        with (
            httpx.Client(base_url=url, headers=headers, timeout=30) as client,
            openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0, timeout=30) as openai_client,
        ):
            assert eventually(lambda: server.started)
            yield Live(url, service, client, openai_client)
    finally:
        if isinstance(engine, Engine) and isinstance(engine.runner, FakeRunner):
            engine.runner.go.set()
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def main() -> int:
    """`python -m tests.frontends.live STEP_SECONDS BUILD_SECONDS DRAIN_SECONDS`: as jaxinfer.serve, on a free port."""
    step_seconds, build_seconds, drain_timeout = map(float, sys.argv[1:4])

    def build(on_progress: Callable[[str], None]) -> Engine:
        on_progress("compiling")
        if build_seconds < 0:
            raise ValueError("expected a model, got none")
        time.sleep(build_seconds)
        return fake_engine(step_seconds)

    listener = bind("127.0.0.1", 0)
    print(listener.getsockname()[1], flush=True)
    return run_server(ServerSettings(port=0, drain_timeout=drain_timeout), listener, build)


if __name__ == "__main__":
    sys.exit(main())
