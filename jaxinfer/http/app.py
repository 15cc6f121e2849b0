"""The FastAPI application: routes, and errors in OpenAI's form."""

import time
from collections.abc import Callable

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from jaxinfer.http.answers import answer
from jaxinfer.http.middleware import ApiKey, RequestName, error_response
from jaxinfer.http.service import Phase, Service
from jaxinfer.protocol import ENDPOINTS, ApiError


def create_app(service: Service) -> FastAPI:
    """The application over a service, which may still be loading."""
    # Bodies are checked by jaxinfer.protocol, so the schema that FastAPI could show would be empty.
    app = FastAPI(title="jaxinfer", openapi_url=None)
    # The last one added is the outermost: the name is there before the key is asked for.
    if service.settings.api_key is not None:
        app.add_middleware(ApiKey, key=service.settings.api_key)
    app.add_middleware(RequestName)
    _add_error_handlers(app)
    _add_monitoring(app, service)
    _add_api(app, service, created=int(time.time()))
    return app


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        where = f"{request.method} {request.url.path}"
        messages = {404: f"there is no {where}", 405: f"{where} is not allowed; expected {_allowed(error)}"}
        response = error_response(ApiError(error.status_code, messages.get(error.status_code, str(error.detail))))
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(ClientDisconnect)
    async def client_gone(_: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # nobody reads it

    @app.exception_handler(Exception)
    async def other_error(_: Request, error: Exception) -> Response:
        # Starlette logs the traceback after this.
        return error_response(ApiError(500, f"internal error: {type(error).__name__}", code="internal_error"))


def _allowed(error: HTTPException) -> str:
    return dict(error.headers or {}).get("Allow", "another method")


def _add_monitoring(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"}) if service.healthy else JSONResponse({"status": service.status}, 503)

    @app.get("/ready")
    async def ready() -> Response:
        up = service.phase is Phase.READY and service.healthy
        return JSONResponse({"status": service.status}, 200 if up else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)


def _add_api(app: FastAPI, service: Service, created: int) -> None:
    def model() -> dict[str, object]:
        return {
            "id": service.model_name,
            "object": "model",
            "created": created,
            "owned_by": "jaxinfer",
            "max_model_len": service.engine.capacity.max_context,
        }

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [model()]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        if name != service.model_name:
            message = f"model: expected {service.model_name!r}, the model served here, got {name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return JSONResponse(model())

    def endpoint(url: str) -> Callable[..., object]:
        async def serve(http_request: Request) -> Response:
            return await answer(service, http_request, url)

        return serve

    for url in ENDPOINTS:
        app.add_api_route(url, endpoint(url), methods=["POST"], response_model=None)

    @app.delete("/v1/requests/{name}")
    async def cancel(name: str) -> Response:
        if not service.jobs.cancel(name):
            raise ApiError(404, f"there is no running request named {name!r}", code="request_not_found")
        return JSONResponse({"id": name, "object": "request", "cancelled": True})
