"""Uploaded files, and those that batches leave: streamed to disk and from it."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from aiohttp import BodyPartReader, web
from aiohttp.http import HttpProcessingError

from frontend.errors import ApiError, wrong
from frontend.records import File, new_id, now
from frontend.service import Service
from frontend.status import json_response
from frontend.store import PART, explain
from frontend.stored import checked_query, limit_of, opened, page, stored

PIECE_BYTES = 1 << 20
"""Written to disk at once."""
FIELD_BYTES = 1024
"""The longest of the fields beside the file."""
ENVELOPE_BYTES = 65_536
"""Of an upload beside its file."""
LEAST_EXPIRY, MOST_EXPIRY = 3600, 30 * 86_400
"""Seconds, as OpenAI's."""
MOST_FILES = 10_000
"""In one list."""
_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")


class FileRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, request: web.Request) -> web.Response:
        store, most = opened(self._service), self._service.config.max_file_size
        if request.content_type != "multipart/form-data":
            raise ApiError(400, "the body: expected multipart/form-data", code="invalid_body")
        if (request.content_length or 0) > most + ENVELOPE_BYTES:
            raise _too_large(most)
        file_id = new_id("file-")
        content = store.path(file_id + PART)
        try:
            fields, name, size = await _read_upload(request, content, most)
            expires = _expiry(fields)
            file = File(
                id=file_id,
                bytes=size,
                created_at=now(),
                filename=name,
                purpose=fields["purpose"],
                expires_at=None if expires is None else now() + expires,
            )
            await store.call(store.add_file, file, content)
        except (OSError, sqlite3.Error) as error:
            raise ApiError(500, explain(error, store.folder)) from None
        except (ValueError, HttpProcessingError, web.RequestPayloadError) as error:
            raise ApiError(400, f"the body is no form: {' '.join(str(error).split())}", code="invalid_body") from None
        finally:
            content.unlink(missing_ok=True)
        return json_response(file)

    async def list(self, request: web.Request) -> web.Response:
        store = opened(self._service)
        query = checked_query(request, "after", "limit", "order", "purpose")
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise wrong("order", f"expected asc or desc, got {order!r}")
        limit = limit_of(query, MOST_FILES, MOST_FILES)
        after, purpose = query.get("after", ""), query.get("purpose", "")
        files = await stored(store, store.files, after, limit + 1, order == "desc", purpose)
        if files is None:
            raise wrong("after", f"there is no file {after!r}")
        return page(files, limit)

    async def retrieve(self, request: web.Request) -> web.Response:
        return json_response(await self._file(request))

    async def delete(self, request: web.Request) -> web.Response:
        store, file = opened(self._service), await self._file(request)
        if batch := await stored(store, store.delete_file, file.id):
            raise ApiError(409, f"file {file.id!r} is read by {batch}, which is not over", code="file_in_use")
        return json_response({"id": file.id, "object": "file", "deleted": True})

    async def content(self, request: web.Request) -> web.FileResponse:
        file = await self._file(request)
        return web.FileResponse(opened(self._service).path(file.id), headers={"Content-Type": "application/jsonl"})

    async def _file(self, request: web.Request) -> File:
        store, name = opened(self._service), request.match_info["file"]
        file = await stored(store, store.file, name)
        if file is None:
            raise ApiError(404, f"file {name!r} does not exist", param="file_id", code="file_not_found")
        return file


async def _read_upload(request: web.Request, content: Path, most: int) -> tuple[dict[str, str], str, int]:
    """The fields of a form, and the name and size of its file, which is written to `content`."""
    fields: dict[str, str] = {}
    name, size = "", -1
    async for part in await request.multipart():
        if not isinstance(part, BodyPartReader) or part.name not in ("file", *_FIELDS):
            raise wrong(
                (isinstance(part, BodyPartReader) and part.name) or "body", "unknown field", "unknown_parameter"
            )
        if part.name != "file":
            value = b"".join([piece async for piece in _pieces(part, FIELD_BYTES, wrong(part.name, "too long"))])
            fields[part.name] = value.decode()
        elif size >= 0:
            raise wrong("file", "there may be one")
        else:
            name, size = part.filename or "file", await _save(part, content, most)
    if size <= 0:
        raise wrong("file", "missing" if size < 0 else "must not be empty")
    if fields.get("purpose") != "batch":
        raise wrong("purpose", 'only "batch" is supported' if "purpose" in fields else "missing")
    return fields, name, size


async def _save(part: BodyPartReader, content: Path, most: int) -> int:
    """Write a part to a file; its size in bytes."""
    size = 0
    with await asyncio.to_thread(content.open, "wb") as file:
        async for piece in _pieces(part, most, _too_large(most)):
            await asyncio.to_thread(file.write, piece)
            size += len(piece)
    return size


async def _pieces(part: BodyPartReader, most: int, too_long: ApiError) -> AsyncIterator[bytes]:
    """A part's bytes, many at a time; `too_long` is raised where there are more than `most`."""
    size, held = 0, bytearray()
    while piece := await part.read_chunk(65_536):
        size += len(piece)
        if size > most:
            raise too_long
        held += piece
        if len(held) >= PIECE_BYTES:
            yield bytes(held)
            held.clear()
    yield bytes(held)


def _expiry(fields: Mapping[str, str]) -> int | None:
    """The seconds of expires_after; None where it was not given."""
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise wrong("expires_after.anchor", 'expected "created_at"')
    if not (seconds or "").isdecimal() or not LEAST_EXPIRY <= int(seconds or 0) <= MOST_EXPIRY:
        raise wrong("expires_after.seconds", f"expected a whole number from {LEAST_EXPIRY} to {MOST_EXPIRY}")
    return int(seconds or 0)


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"file: larger than max_file_size, {most} bytes", param="file", code="request_too_large")
