"""The requests that are with the engine, by the names that clients know them by."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from jaxinfer.engine.loop import EngineLoop
from jaxinfer.engine.request import Request, Update
from jaxinfer.protocol import ApiError

_KEEP_ALIVE_SECONDS = 15.0


class ClientGone(Exception):
    """The client closed its connection."""


class Job:
    """One HTTP request and the engine requests that it stands for (one per prompt)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.cancelled = False
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Update] | None] = asyncio.Queue()
        self._open: set[str] = set()

    @property
    def open_ids(self) -> list[str]:
        """Ids of the engine requests that have not finished."""
        return list(self._open)

    def expect(self, request: Request) -> None:
        """Counts a request among those to wait for."""
        self._open.add(request.id)

    def receiver(self, prompt: int) -> Callable[[Update], None]:
        """The engine's callback for that prompt: hands updates from the engine's thread to this job's event loop."""

        def receive(update: Update) -> None:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (prompt, update))

        return receive

    def client_gone(self) -> None:
        """Makes `updates` raise ClientGone."""
        self._queue.put_nowait(None)

    async def updates(self) -> AsyncIterator[tuple[int, Update] | None]:
        """(prompt number, update) until every sample of every prompt has finished; None when nothing came for a while.

        Raises ClientGone when the client has closed its connection.
        """
        while self._open:
            try:
                item = await asyncio.wait_for(self._queue.get(), _KEEP_ALIVE_SECONDS)
            except TimeoutError:
                yield None
                continue
            if item is None:
                raise ClientGone
            _, update = item
            if update.request_finished:
                self._open.discard(update.request_id)
            yield item


class Jobs:
    """All jobs of a server. Used from the event loop's thread only."""

    def __init__(self, engine_loop: EngineLoop) -> None:
        self._engine_loop = engine_loop
        self._jobs: dict[str, Job] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def open(self, name: str) -> Job:
        """Takes a name. Raises ApiError (409) while another request has it."""
        if name in self._jobs:
            raise ApiError(
                409, f"X-Request-Id: a request named {name!r} is still running", param="X-Request-Id", code="id_in_use"
            )
        job = self._jobs[name] = Job(name)
        return job

    def submit(self, job: Job, requests: Sequence[Request], observe: Callable[[Update], None]) -> None:
        """Gives the requests to the engine, all or none; `observe` sees each update first, in the engine's thread.

        Raises ValueError where the engine refuses one of them.
        """
        for prompt, request in enumerate(requests):
            receive = job.receiver(prompt)

            def callback(update: Update, receive: Callable[[Update], None] = receive) -> None:
                observe(update)
                receive(update)

            self._engine_loop.submit(request, callback)
            job.expect(request)

    def cancel(self, name: str) -> bool:
        """Cancels a job by its name, wherever it is; False if there is none."""
        job = self._jobs.get(name)
        if job is None:
            return False
        job.cancelled = True
        self._abort(job)
        return True

    def close(self, job: Job) -> None:
        """Gives the name free and aborts what has not finished."""
        if self._jobs.get(job.name) is job:
            del self._jobs[job.name]
        self._abort(job)

    def _abort(self, job: Job) -> None:
        for request_id in job.open_ids:
            self._engine_loop.abort(request_id)
