"""The HTTP application: routes as they are declared, and errors in OpenAI's shape."""

from __future__ import annotations

import logging

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from frontend.errors import ApiError
from frontend.routes import routes
from frontend.service import Service

log = logging.getLogger(__name__)


def make_app(service: Service) -> web.Application:
    app = web.Application(middlewares=[_errors(service)])
    app.add_routes([web.RouteDef(each.method, each.path, each.handler, {}) for each in routes(service)])
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
