"""The engine in a thread of its own, which alone touches the engine and the device."""

import logging
import threading
from collections.abc import Callable

from jaxinfer.engine.engine import Engine
from jaxinfer.engine.request import Request, Update

log = logging.getLogger(__name__)

Callback = Callable[[Update], None]

_ABORT_SECONDS = 30.0
"""How long `drain` and `stop` wait for the step that is being computed."""


class EngineClosedError(RuntimeError):
    """The loop takes no more requests: it drains, or has ended."""


class EngineLoop:
    """Steps an engine as long as it has work, and sleeps otherwise.

    `submit`, `abort`, `drain` and `stop` may be called from any thread.  Callbacks are called in the loop's thread with
    each update of their request, up to the one with `request_finished`; one that raises has its request aborted.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._changed = threading.Condition()
        # Guarded by the condition:
        self._receivers: dict[str, tuple[Request, Callback]] = {}
        self._mailbox: list[Request | str] = []  # requests to admit, ids to abort
        self._open = True
        self._stopping = False

    def start(self) -> None:
        """Starts the thread; once."""
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """Whether the thread is alive."""
        return self._thread.is_alive()

    def submit(self, request: Request, callback: Callback) -> None:
        """Takes a request.  Raises ValueError if it can never be served or its id is under way (`Engine.add`), and
        EngineClosedError if the loop takes no more."""
        self.engine.check(request)
        with self._changed:
            if not self._open:
                raise EngineClosedError("the engine takes no more requests: it is shutting down")
            if request.id in self._receivers:
                raise ValueError(f"expected a new request id, got {request.id!r}, which is under way")
            self._receivers[request.id] = (request, callback)
            self._mailbox.append(request)
            self._changed.notify_all()

    def abort(self, request_id: str) -> bool:
        """Ends a request before the next step; its callback gets the last updates.  False if it is not under way."""
        with self._changed:
            if request_id not in self._receivers:
                return False
            self._mailbox.append(request_id)
            self._changed.notify_all()
            return True

    def drain(self, timeout: float) -> bool:
        """Takes no more requests, and returns True when all have finished; aborts those that are left after `timeout`
        seconds and returns False."""
        with self._changed:
            self._open = False
            if self._changed.wait_for(self._idle, timeout):
                return True
            self._mailbox.extend(self._receivers)
            self._changed.notify_all()
            self._changed.wait_for(self._idle, _ABORT_SECONDS)
            return False

    def stop(self) -> None:
        """Aborts every request and ends the thread.  Raises TimeoutError if a step does not come to its end."""
        with self._changed:
            self._open = False
            self._stopping = True
            self._changed.notify_all()
        if self._thread.ident is None:
            return
        self._thread.join(_ABORT_SECONDS)
        if self._thread.is_alive():
            raise TimeoutError(f"expected the engine's step to end within {_ABORT_SECONDS:.0f} s")

    def _idle(self) -> bool:
        return not self._receivers or not self.healthy

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._turn()
        finally:
            self._close()

    def _wait_for_work(self) -> bool:
        """Sleeps until there is something to do; False when the loop is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._mailbox or self.engine.has_work)
            return not self._stopping

    def _turn(self) -> None:
        with self._changed:
            mail, self._mailbox = self._mailbox, []
        try:
            for item in mail:
                if isinstance(item, Request):
                    self.engine.admit(item)
                else:
                    self.engine.abort(item)
            updates = self.engine.step()
        except Exception as error:
            log.exception("the engine failed; all requests end with an error")
            message = f"the engine failed: {type(error).__name__}: {error}"
            updates = self._end_all("error", message)
        self._deliver(updates)

    def _end_all(self, reason: str, message: str | None) -> list[Update]:
        """Ends all requests except those still in the mailbox, also those that the engine did not come to know."""
        updates = self.engine.end_all(reason, message)
        ended = {update.request_id for update in updates if update.request_finished}
        with self._changed:
            ended.update(item.id for item in self._mailbox if isinstance(item, Request))
            lost = [request for request, _ in self._receivers.values() if request.id not in ended]
        for request in lost:
            for index in range(request.params.n):
                last = index == request.params.n - 1
                updates.append(
                    Update(
                        request_id=request.id, index=index, finish_reason=reason, error=message, request_finished=last
                    )
                )
        return updates

    def _deliver(self, updates: list[Update]) -> None:
        for update in updates:
            if update.request_id not in self._receivers:
                continue
            _, callback = self._receivers[update.request_id]
            try:
                callback(update)
            except Exception:
                log.exception("the receiver of request %r failed; the request is aborted", update.request_id)
                self.engine.abort(update.request_id)
            if update.request_finished:
                with self._changed:
                    del self._receivers[update.request_id]
                    self._changed.notify_all()

    def _close(self) -> None:
        """Hands every request its last update."""
        with self._changed:
            self._open = False
            self._mailbox = []
        self._deliver(self._end_all("abort", None))
