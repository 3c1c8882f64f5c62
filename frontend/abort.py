"""Ends requests with what they have."""

from __future__ import annotations

from aiohttp import web
from msgspec import Struct

from frontend.answer_schema import Aborted
from frontend.errors import ApiError, wrong
from frontend.parse import parse
from frontend.service import Service
from frontend.status import json_response
from toka.messages import Finish


class AbortRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    request_id: str | None = None
    """The `id` of its answer."""
    all: bool | None = None


class AbortRoute:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def abort(self, request: web.Request) -> web.Response:
        """Answers how many requests it ended, of those that this frontend has."""
        service = self._service
        body = await service.bodies.read(request)
        try:
            asked = await parse(body, AbortRequest)
        finally:
            service.bodies.forget(len(body))
        if (asked.request_id is not None) == bool(asked.all):
            raise wrong("request_id", "give either this or all: true")
        calls = [call for call, name in service.calls.items() if asked.all or name == asked.request_id]
        if not calls and not asked.all:
            raise ApiError(404, f"no request {asked.request_id!r} is running", param="request_id", code="not_found")
        for call in calls:
            call.end(Finish.ABORT)
            service.engine.close(call)
        return json_response(Aborted(aborted=len(calls)))
