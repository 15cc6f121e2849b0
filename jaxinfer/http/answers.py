"""From a checked call to an HTTP response: whole, or as a stream of server-sent events."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from jaxinfer.engine.output import Accumulator
from jaxinfer.engine.request import Request, RequestOutput, Update
from jaxinfer.http.jobs import ClientGone, Job
from jaxinfer.http.service import Service
from jaxinfer.protocol import ApiError, Call, Prompt, load_json, parse_call
from jaxinfer.protocol.call import Answer

_MEBIBYTE = 1 << 20


async def answer(service: Service, http_request: HttpRequest, url: str) -> Response:
    """Serves one request to `url`, an endpoint of `jaxinfer.protocol`. Raises ApiError."""
    service.check_open()
    body = await read_body(http_request, service.settings.max_body_mb)
    call = await asyncio.to_thread(lambda: parse_call(url, load_json(body)))
    if call.model is not None and call.model != service.model_name:
        message = f"model: expected {service.model_name!r}, the model served here, got {call.model!r}"
        raise ApiError(404, message, param="model", code="model_not_found")
    job = service.jobs.open(http_request.state.request_name)
    try:
        prompts = await asyncio.to_thread(call.encode, service.tokenizer)
        service.check_open()  # encoding takes seconds for long texts
        requests = call.requests(job.name, prompts)
        if job.cancelled:
            raise ApiError(409, "the request was cancelled before it began", code="cancelled")
        service.submit(job, requests)
        head = Answer(name=job.name, model=service.model_name)
        if call.stream:
            return EventStream(service, job, call, head, prompts)
        response = await _whole(job, call, head, prompts, requests, http_request.receive)
    except BaseException:
        service.jobs.close(job)
        raise
    service.jobs.close(job)
    return response


async def read_body(http_request: HttpRequest, max_mb: float) -> bytes:
    """The body. Raises ApiError (413) with both sizes if it is larger than `max_mb` MiB."""
    limit = int(max_mb * _MEBIBYTE)
    body = bytearray()
    size = 0
    async for chunk in http_request.stream():
        size += len(chunk)
        if size <= limit:
            body += chunk
        elif size > 4 * limit:
            break
        # Else read on: a client that is still sending would see a broken connection and not the reason.
    if size > limit:
        announced = int(http_request.headers.get("content-length", "0"))
        message = f"the body has {max(size, announced)} bytes; the limit is {limit} ({max_mb:g} MiB, --max_body_mb)"
        raise ApiError(413, message, code="body_too_large")
    return bytes(body)


async def _whole(
    job: Job, call: Call, head: Answer, prompts: Sequence[Prompt], requests: Sequence[Request], receive: Receive
) -> Response:
    """Waits for all prompts and answers in one body. Raises ApiError where the engine failed."""
    accumulators = [Accumulator(request) for request in requests]
    async with _watch(job, receive):
        try:
            async for item in job.updates():
                if item is not None:
                    prompt, update = item
                    check_finish(update, job)
                    accumulators[prompt].add(update)
        except ClientGone:
            return Response(status_code=499)  # nobody reads it
    outputs: list[RequestOutput] = [accumulator.output for accumulator in accumulators]
    return JSONResponse(call.response(head, prompts, outputs))


class EventStream(Response):
    """The streamed answer: chunks as server-sent events, prefill progress as comments. Ends the job in every case."""

    media_type = "text/event-stream"

    def __init__(self, service: Service, job: Job, call: Call, head: Answer, prompts: Sequence[Prompt]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._service = service
        self._job = job
        self._call = call
        self._prompts = prompts
        self._stream = call.open_stream(head, prompts)
        self._prefill: dict[tuple[int, int], int] = {}
        self._prefill_total = call.params.n * sum(len(prompt.ids) for prompt in prompts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response."""
        try:
            async with _watch(self._job, receive):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                async for event in self._events():
                    await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (ClientGone, OSError):
            return
        finally:
            self._service.jobs.close(self._job)

    async def _events(self) -> AsyncIterator[str]:
        try:
            async for item in self._job.updates():
                if item is None:
                    yield ": waiting\n\n"  # proxies close connections on which nothing comes
                    continue
                prompt, update = item
                check_finish(update, self._job)
                if update.prefill is not None:
                    self._prefill[prompt, update.index] = update.prefill[0]
                    yield f": prefill {sum(self._prefill.values())}/{self._prefill_total}\n\n"
                else:
                    self._prefill[prompt, update.index] = len(self._prompts[prompt].ids)
                for chunk in self._stream.feed(prompt, update):
                    yield _event(chunk)
            if self._call.include_usage:
                yield _event(self._stream.usage())
        except ApiError as error:
            yield _event(error.body())
        yield "data: [DONE]\n\n"


def check_finish(update: Update, job: Job) -> None:
    """Raises ApiError if the engine failed (500), or the server ended the request itself (503)."""
    if update.finish_reason == "error":
        raise ApiError(500, f"the engine failed on this request: {update.error}", code="engine_error")
    if update.finish_reason == "abort" and not job.cancelled:
        raise ApiError(503, "the server shut down before the request had finished", code="draining")


def _event(chunk: dict[str, object]) -> str:
    return f"data: {json.dumps(chunk, ensure_ascii=False, allow_nan=False, separators=(',', ':'))}\n\n"


@contextlib.asynccontextmanager
async def _watch(job: Job, receive: Receive) -> AsyncIterator[None]:
    """While the block runs, tells the job when its client closes the connection (the body has been read before)."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        job.client_gone()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher
