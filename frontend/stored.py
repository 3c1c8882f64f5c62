"""What the routes of files and of batches share: the store as they see it, and lists in pages."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ParamSpec, TypeVar

from msgspec import Meta

from frontend.errors import ApiError
from frontend.records import Batch, File
from frontend.service import Service
from frontend.store import Store, explain

After = Annotated[str, Meta(description="The id behind which the page begins; empty: at the beginning.")]

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


def page(found: Sequence[File] | Sequence[Batch], limit: int) -> dict[str, Any]:
    """The fields of a list of up to `limit` objects; `found` has one more where there is more."""
    data = found[:limit]
    ids = [each.id for each in data]
    ends = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
    return {"data": data, "has_more": len(found) > limit} | ends
