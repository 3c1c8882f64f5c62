"""The routes of batches. `frontend.batch_runner` does what they ask for."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from aiohttp import web
from msgspec import Meta, Struct

from frontend.answer_schema import BatchList
from frontend.errors import ApiError, wrong
from frontend.files import ExpirySeconds
from frontend.parse import parse, parse_fields
from frontend.records import Batch, Progress, new_id, now
from frontend.service import Service
from frontend.status import json_response
from frontend.stored import After, opened, page, stored
from toka.batch_lines import ENDPOINTS

MOST_WINDOW = 90 * 86_400
"""Seconds."""
_WINDOW = re.compile(r"(\d{1,9})([smhd])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class ExpiresAfter(Struct, kw_only=True, forbid_unknown_fields=True):
    anchor: Literal["created_at"]
    seconds: ExpirySeconds


class BatchRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    input_file_id: Annotated[str, Meta(min_length=1)]
    endpoint: str
    """The path that all its lines are for, as /v1/chat/completions."""
    completion_window: str
    """After which it ends with what is done: 30m, 24h, 7d."""
    metadata: (
        Annotated[dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]
        | None
    ) = None
    output_expires_after: ExpiresAfter | None = None


class BatchQuery(Struct, kw_only=True, forbid_unknown_fields=True):
    after: After = ""
    limit: Annotated[int, Meta(ge=1, le=100)] = 20


class BatchRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, request: web.Request) -> web.Response:
        store = opened(self._service)
        asked = await parse(await request.read(), BatchRequest)
        served = {each.resource.canonical for each in request.app.router.routes() if each.resource is not None}
        endpoints = [each for each in ENDPOINTS if each in served]
        if asked.endpoint not in endpoints:
            raise wrong("endpoint", f"expected one of {', '.join(endpoints)}")
        seconds, created = _seconds(asked.completion_window), now()
        batch = Batch(
            id=new_id("batch_"),
            endpoint=asked.endpoint,
            input_file_id=asked.input_file_id,
            completion_window=asked.completion_window,
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
        query = parse_fields(request.query, BatchQuery)
        batches = await stored(store, store.batches, query.after, query.limit + 1)
        if batches is None:
            raise wrong("after", f"there is no batch {query.after!r}")
        return json_response(BatchList(**page(batches, query.limit)))

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


def _seconds(window: str) -> int:
    """The seconds of a completion_window such as 24h."""
    found = _WINDOW.fullmatch(window)
    seconds = int(found[1]) * _UNITS[found[2]] if found else 0
    if not 1 <= seconds <= MOST_WINDOW:
        raise wrong("completion_window", f"expected a time such as 24h, at most {MOST_WINDOW // 86_400}d")
    return seconds
