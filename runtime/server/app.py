"""The routes. `create_app` puts an engine and a model behind them; `serve` (in serve.py) puts them on a
port.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from llmc.runtime.engine import Engine
from llmc.runtime.request import RequestError
from llmc.runtime.server import chat_completions, completions
from llmc.runtime.server.api_key import is_authorized, usable_key
from llmc.runtime.server.http import InternalError, Unauthorized, error_response, json_response
from llmc.runtime.server.metrics import CONTENT_TYPE, Metrics
from llmc.runtime.server.model import ServedModel
from llmc.runtime.server.service import Service

DEFAULT_MAX_BODY = 8 * 2**20


def create_app(
    engine: Engine, model: ServedModel, *, api_key: str | None = None, max_body_bytes: int = DEFAULT_MAX_BODY
) -> FastAPI:
    """The application over a started engine. With an `api_key`, /v1 asks for it as a bearer token; raises UserError for
    one that no client could send."""
    service = Service(engine, model, max_body_bytes)
    metrics = Metrics(engine, model.name)
    engine.observer = metrics

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        service.close()

    # Without the interactive pages: they load scripts from elsewhere.
    app = FastAPI(title="llmc", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.state.engine = engine
    _add_error_handlers(app)
    app.include_router(_operations(engine, metrics))
    app.include_router(_api(service, api_key))
    return app


def _operations(engine: Engine, metrics: Metrics) -> APIRouter:
    router = APIRouter()

    @router.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        """Alive: the engine's thread runs."""
        return json_response({"status": "ok"}) if engine.is_alive else json_response({"status": "dead"}, 503)

    @router.api_route("/health/ready", methods=["GET", "HEAD"])
    async def ready() -> Response:
        """Ready: alive and taking requests."""
        if engine.is_alive and not engine.is_draining:
            return json_response({"status": "ok"})
        return json_response({"status": "draining" if engine.is_alive else "dead"}, 503)

    @router.get("/metrics")
    async def prometheus() -> Response:
        return Response(metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    return router


def _api(service: Service, api_key: str | None) -> APIRouter:
    key = None if api_key is None else usable_key(api_key)

    async def authorize(request: Request) -> None:
        if key is not None and not is_authorized(request.headers.get("authorization", ""), key):
            raise Unauthorized("Incorrect API key provided.", code="invalid_api_key")

    router = APIRouter(prefix="/v1", dependencies=[Depends(authorize)])
    model = service.model
    card: dict[str, Any] = {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "llmc",
        "max_model_len": service.engine.max_model_len,
    }

    @router.get("/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [card]})

    # A name may hold slashes.
    @router.get("/models/{name:path}")
    async def one_model(name: str) -> Response:
        service.check_model(name)
        return json_response(card)

    @router.post("/completions")
    async def post_completions(request: Request) -> Response:
        return await completions.completions(service, request)

    @router.post("/chat/completions")
    async def post_chat_completions(request: Request) -> Response:
        return await chat_completions.chat_completions(service, request)

    return router


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(RequestError)
    async def request_error(_: Request, error: RequestError) -> Response:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        problem = RequestError(f"{error.detail}: {request.method} {request.url.path}")
        problem.status = error.status_code
        response = error_response(problem)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(ClientDisconnect)
    async def client_left(_: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # for nobody but the log

    @app.exception_handler(Exception)
    async def our_fault(_: Request, error: Exception) -> Response:
        # The traceback is logged by the server, to which the exception goes on.
        return error_response(InternalError("internal error", code="internal_error"))
