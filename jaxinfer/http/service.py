"""The state of a server: its phase, the engine behind it, and the requests that are under way."""

import asyncio
from enum import StrEnum

from jaxinfer.engine.engine import Engine, EngineStats
from jaxinfer.engine.loop import EngineClosedError, EngineLoop
from jaxinfer.engine.request import Request, Update
from jaxinfer.http.jobs import Job, Jobs
from jaxinfer.http.metrics import Metrics
from jaxinfer.http.settings import ServerSettings
from jaxinfer.protocol import ApiError
from jaxinfer.tokenizer import Tokenizer


class Phase(StrEnum):
    """Where a server is in its life. New requests are taken in READY only."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class Service:
    """Everything that the endpoints share. Used from the event loop's thread, except where a method says otherwise."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.phase = Phase.STARTING
        self.progress = "loading"
        """What the start is busy with."""
        self.metrics = Metrics(self._stats, lambda: self._compilations.count)
        self._engine: Engine | None = None
        self._engine_loop: EngineLoop | None = None
        self._jobs: Jobs | None = None

    def start(self, engine: Engine) -> None:
        """Takes the engine, starts its loop, and opens the doors."""
        from jaxinfer.engine.compilations import CompilationCounter  # loads JAX: not before the port is open

        self._compilations = CompilationCounter()
        self._engine = engine
        self._engine_loop = EngineLoop(engine)
        self._engine_loop.start()
        self._jobs = Jobs(self._engine_loop)
        if self.phase is not Phase.DRAINING:
            self.phase = Phase.READY

    @property
    def status(self) -> str:
        """What /ready says: the phase, what the start is busy with ("compiling ..."), or that the engine is gone."""
        if not self.healthy:
            return "the engine's thread has ended"
        return self.progress if self.phase is Phase.STARTING else str(self.phase)

    def check_open(self) -> None:
        """Raises ApiError (503), naming the phase, unless requests are taken."""
        if self.phase is not Phase.READY:
            raise self._closed()

    def _closed(self) -> ApiError:
        detail = f" ({self.progress})" if self.phase is Phase.STARTING else ""
        return ApiError(503, f"the server takes no requests now: it is {self.phase}{detail}", code=str(self.phase))

    @property
    def healthy(self) -> bool:
        """Whether the engine's thread is alive, or has not been started yet."""
        return self._engine_loop is None or self._engine_loop.healthy

    @property
    def engine(self) -> Engine:
        """The engine. Raises ApiError (503) before there is one."""
        if self._engine is None:
            raise self._closed()
        return self._engine

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, if it has one."""
        return self.engine.tokenizer

    @property
    def model_name(self) -> str:
        """The name of the model towards clients."""
        return self.settings.served_model_name or self.engine.model_name

    @property
    def jobs(self) -> Jobs:
        """The requests that are under way. Raises ApiError (503) before there is an engine."""
        if self._jobs is None:
            raise self._closed()
        return self._jobs

    def submit(self, job: Job, requests: list[Request]) -> None:
        """Gives a job's requests to the engine. Raises ApiError: 400 where the engine refuses one, 503 if it closes."""
        try:
            self.jobs.submit(job, requests, self._observe)
        except ValueError as error:
            raise ApiError(400, str(error)) from None
        except EngineClosedError:
            raise self._closed() from None

    def _observe(self, update: Update) -> None:
        # Times of requests that did not come to their own end would blur the picture.
        if update.finish_reason in ("stop", "length") and update.metrics is not None:
            self.metrics.observe(update.metrics)

    def _stats(self) -> EngineStats | None:
        return None if self._engine is None else self._engine.stats()

    async def drain(self) -> None:
        """Refuses new requests, and returns when the running ones have ended, or were ended after the drain timeout."""
        self.phase = Phase.DRAINING
        if self._engine_loop is not None:
            await asyncio.to_thread(self._engine_loop.drain, self.settings.drain_timeout)

    def stop(self) -> None:
        """Ends the engine's thread."""
        if self._engine_loop is not None:
            self._engine_loop.stop()
