"""Whether the server can serve, and what."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web
from msgspec import UNSET

from frontend.answer_schema import Health, Model, ModelList, Ready
from frontend.errors import ApiError
from frontend.service import RETRY_SECONDS, Service

HEALTH_SECONDS = 2.0
"""A replica has so long to answer."""


class StatusRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self, request: web.Request) -> web.Response:
        """Asks a manager, whose scheduling loop answers: 200 with what it says, 503 with the reason why not."""
        reason = self._service.unavailable
        pong = None if reason else await self._service.engine.ping(HEALTH_SECONDS)
        if pong is None:
            return _unavailable(reason or f"no replica answered within {HEALTH_SECONDS:g} s")
        state = self._service.engine.state
        assert state is not None, "a pong came through the broker"
        return json_response(
            Health(
                frontend=self._service.number,
                replicas=state.replicas,
                queued=state.queued,
                running=pong.running,
                waiting=pong.waiting,
                pages_used=pong.pages_used,
                pages=pong.pages,
            )
        )

    async def ready(self, request: web.Request) -> web.Response:
        """200 if a new request would run; asks nobody."""
        reason = self._service.unavailable
        return _unavailable(reason) if reason else json_response(Ready(frontend=self._service.number))

    async def models(self, request: web.Request) -> web.Response:
        return json_response(ModelList(data=[self._model(self._service.model.name)]))

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        self._service.check_name(name)
        return json_response(self._model(name))

    def _model(self, name: str) -> Model:
        card = self._service.engine.card
        return Model(id=name, created=self._service.started, max_model_len=card.context_length if card else UNSET)


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    body = msgspec.json.encode(value)
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


def _unavailable(reason: str) -> web.Response:
    error = ApiError(503, reason, retry_after=RETRY_SECONDS)
    return json_response({"status": "unavailable", "reason": reason} | error.body, 503, error.headers)
