"""The routes, and errors in OpenAI's shape."""

from __future__ import annotations

import logging

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from frontend.abort import AbortRoute
from frontend.batches import BatchRoutes
from frontend.errors import ApiError
from frontend.files import FileRoutes
from frontend.generate import GenerationRoutes
from frontend.service import Service
from frontend.status import StatusRoutes
from frontend.tokenization import TokenizationRoutes

log = logging.getLogger(__name__)


def make_app(service: Service) -> web.Application:
    generation, status, tokenization = GenerationRoutes(service), StatusRoutes(service), TokenizationRoutes(service)
    files, batches = FileRoutes(service), BatchRoutes(service)
    app = web.Application(middlewares=[_errors(service)])
    app.add_routes(
        [
            web.post("/v1/completions", generation.completions),
            web.post("/v1/chat/completions", generation.chat),
            web.post("/v1/responses", generation.responses),
            web.post("/v1/abort", AbortRoute(service).abort),
            web.get("/v1/models", status.models),
            web.get("/v1/models/{name:.+}", status.model),
            web.post("/v1/files", files.create),
            web.get("/v1/files", files.list),
            web.get("/v1/files/{file}", files.retrieve),
            web.delete("/v1/files/{file}", files.delete),
            web.get("/v1/files/{file}/content", files.content),
            web.post("/v1/batches", batches.create),
            web.get("/v1/batches", batches.list),
            web.get("/v1/batches/{batch}", batches.retrieve),
            web.post("/v1/batches/{batch}/cancel", batches.cancel),
            web.get("/tokenizer_info", tokenization.info),
            web.post("/tokenize", tokenization.tokenize),
            web.post("/detokenize", tokenization.detokenize),
            web.get("/health", status.health),
            web.get("/ready", status.ready),
        ]
    )
    return app


def _errors(service: Service) -> Middleware:
    @web.middleware
    async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ApiError as error:
            log.debug("refused", extra={"path": request.path, "status": error.status, "why": error.message})
            response = _response(error)
        except web.HTTPException as error:
            response = _response(_http_error(request, error))
            if "Allow" in error.headers:
                response.headers["Allow"] = error.headers["Allow"]
        except ConnectionError:
            raise
        except Exception:
            log.exception("a request failed", extra={"path": request.path})
            response = _response(ApiError(500, "internal error"))
        if service.draining:
            response.force_close()
        return response

    return errors


def _response(error: ApiError) -> web.Response:
    body = msgspec.json.encode(error.body)
    return web.Response(body=body, status=error.status, headers=error.headers, content_type="application/json")


def _http_error(request: web.Request, error: web.HTTPException) -> ApiError:
    if error.status == 404:
        return ApiError(404, f"there is nothing at {request.path}", code="not_found")
    if error.status == 405:
        return ApiError(405, f"{request.path} does not take {request.method}", code="method_not_allowed")
    return ApiError(error.status, error.reason)
