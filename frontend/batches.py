"""The routes of batches. `frontend.batch_runner` does what they ask for."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from aiohttp import web
from msgspec import Meta, Struct

from frontend.errors import ApiError, wrong
from frontend.files import LEAST_EXPIRY, MOST_EXPIRY
from frontend.parse import parse
from frontend.records import Batch, Progress, new_id, now
from frontend.service import Service
from frontend.status import json_response
from frontend.stored import checked_query, limit_of, opened, page, stored
from toka.batch_lines import ENDPOINTS

DEFAULT_LIST, MOST_LIST = 20, 100
"""Batches in one list."""
MOST_WINDOW = 90 * 86_400
"""Seconds."""
_WINDOW = re.compile(r"(\d{1,9})([smhd])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class _ExpiresAfter(Struct, kw_only=True, forbid_unknown_fields=True):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=LEAST_EXPIRY, le=MOST_EXPIRY)]


class _Create(Struct, kw_only=True, forbid_unknown_fields=True):
    input_file_id: str | None = None
    endpoint: str | None = None
    completion_window: str | None = None
    metadata: (
        Annotated[dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]
        | None
    ) = None
    output_expires_after: _ExpiresAfter | None = None


class BatchRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, request: web.Request) -> web.Response:
        store = opened(self._service)
        asked: _Create = await parse(await request.read(), _Create)
        served = {each.resource.canonical for each in request.app.router.routes() if each.resource is not None}
        endpoints = [each for each in ENDPOINTS if each in served]
        if asked.endpoint not in endpoints:
            raise wrong("endpoint", f"expected one of {', '.join(endpoints)}")
        if not asked.input_file_id:
            raise wrong("input_file_id", "missing")
        seconds, created = _seconds(asked.completion_window), now()
        batch = Batch(
            id=new_id("batch_"),
            endpoint=asked.endpoint,
            input_file_id=asked.input_file_id,
            completion_window=asked.completion_window or "",
            created_at=created,
            expires_at=created + seconds,
            metadata=asked.metadata,
        )
        kept = asked.output_expires_after
        progress = Progress(expires_after=kept.seconds if kept else None)
        if not await stored(store, store.add_batch, batch, progress):
            raise wrong("input_file_id", f"there is no file {asked.input_file_id!r} with the purpose batch")
        self._service.batch_news.set()
        return json_response(batch)

    async def list(self, request: web.Request) -> web.Response:
        store = opened(self._service)
        query = checked_query(request, "after", "limit")
        limit, after = limit_of(query, DEFAULT_LIST, MOST_LIST), query.get("after", "")
        batches = await stored(store, store.batches, after, limit + 1)
        if batches is None:
            raise wrong("after", f"there is no batch {after!r}")
        return page(batches, limit)

    async def retrieve(self, request: web.Request) -> web.Response:
        store, name = opened(self._service), request.match_info["batch"]
        return json_response(_found(name, await stored(store, store.batch, name)))

    async def cancel(self, request: web.Request) -> web.Response:
        store, name = opened(self._service), request.match_info["batch"]
        batch = _found(name, await stored(store, store.change, name, _cancel))
        if batch.status not in ("cancelling", "cancelled"):
            raise ApiError(409, f"batch {name!r} is {batch.status} and cannot be cancelled", code="batch_not_active")
        self._service.batch_news.set()
        return json_response(batch)


def _cancel(batch: Batch, progress: Progress) -> None:
    if batch.status in ("validating", "in_progress"):
        batch.status, batch.cancelling_at = "cancelling", now()


def _found(name: str, batch: Batch | None) -> Batch:
    if batch is None:
        raise ApiError(404, f"batch {name!r} does not exist", param="batch_id", code="batch_not_found")
    return batch


def _seconds(window: str | None) -> int:
    """The seconds of a completion_window such as 24h."""
    found = _WINDOW.fullmatch(window or "")
    seconds = int(found[1]) * _UNITS[found[2]] if found else 0
    if not 1 <= seconds <= MOST_WINDOW:
        raise wrong("completion_window", f"expected a time such as 24h, at most {MOST_WINDOW // 86_400}d")
    return seconds
