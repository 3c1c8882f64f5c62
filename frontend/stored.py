"""What the routes of files and of batches share: the store as they see it, and lists in pages."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, TypeVar

from aiohttp import web

from frontend.errors import ApiError, wrong
from frontend.records import Batch, File
from frontend.service import Service
from frontend.status import json_response
from frontend.store import Store, explain

P = ParamSpec("P")
T = TypeVar("T")


def opened(service: Service) -> Store:
    """The store; ApiError where there is none."""
    if service.store is None:
        raise ApiError(501, "files and batches are off: the server was started without data_dir", code="not_supported")
    return service.store


async def stored(store: Store, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What a method of the store returns; ApiError where the disk is at fault."""
    try:
        return await store.call(method, *args, **kwargs)
    except (OSError, sqlite3.Error) as error:
        raise ApiError(500, explain(error, store.folder)) from None


def checked_query(request: web.Request, *known: str) -> dict[str, str]:
    for name in request.query:
        if name not in known:
            raise wrong(name, "unknown field", "unknown_parameter")
    return dict(request.query)


def limit_of(query: Mapping[str, str], default: int, most: int) -> int:
    text = query.get("limit", str(default))
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise wrong("limit", f"expected a whole number from 1 to {most}, got {text!r}")
    return int(text)


def page(found: Sequence[File | Batch], limit: int) -> web.Response:
    """A list of up to `limit` objects; `found` has one more where there is more."""
    data = found[:limit]
    ids = [each.id for each in data]
    ends = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
    return json_response({"object": "list", "data": data, "has_more": len(found) > limit} | ends)
