"""Uploaded files, and those that batches leave: streamed to disk and from it."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Literal

from aiohttp import BodyPartReader, web
from aiohttp.http import HttpProcessingError
from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import fields as fields_of

from frontend.answer_schema import FileDeleted, FileList
from frontend.errors import ApiError, wrong
from frontend.parse import parse_fields
from frontend.records import File, new_id, now
from frontend.service import Service
from frontend.status import json_response
from frontend.store import PART, explain
from frontend.stored import After, opened, page, stored

PIECE_BYTES = 1 << 20
"""Written to disk at once."""
FIELD_BYTES = 1024
"""The longest of the fields beside the file."""
ENVELOPE_BYTES = 65_536
"""Of an upload beside its file."""
ExpirySeconds = Annotated[int, Meta(ge=3600, le=30 * 86_400)]
"""As OpenAI's."""
MOST_FILES = 10_000
"""In one list."""


class FileForm(
    Struct,
    kw_only=True,
    forbid_unknown_fields=True,
    rename={"anchor": "expires_after[anchor]", "seconds": "expires_after[seconds]"},
):
    """What stands beside the file."""

    purpose: Literal["batch"]
    anchor: Literal["created_at"] | UnsetType = UNSET
    seconds: ExpirySeconds | UnsetType = UNSET
    """After which the file is deleted; never where this and the anchor are left out."""


class FileQuery(Struct, kw_only=True, forbid_unknown_fields=True):
    after: After = ""
    limit: Annotated[int, Meta(ge=1, le=MOST_FILES)] = MOST_FILES
    order: Literal["asc", "desc"] = "desc"
    purpose: str = ""


_FIELDS = tuple(each.encode_name for each in fields_of(FileForm))


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
            form, name, size = await _read_upload(request, content, most)
            file = File(
                id=file_id,
                bytes=size,
                created_at=now(),
                filename=name,
                purpose=form.purpose,
                expires_at=None if form.seconds is UNSET else now() + form.seconds,
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
        query = parse_fields(request.query, FileQuery)
        descending = query.order == "desc"
        files = await stored(store, store.files, query.after, query.limit + 1, descending, query.purpose)
        if files is None:
            raise wrong("after", f"there is no file {query.after!r}")
        return json_response(FileList(**page(files, query.limit)))

    async def retrieve(self, request: web.Request) -> web.Response:
        return json_response(await self._file(request))

    async def delete(self, request: web.Request) -> web.Response:
        store, file = opened(self._service), await self._file(request)
        if batch := await stored(store, store.delete_file, file.id):
            raise ApiError(409, f"file {file.id!r} is read by {batch}, which is not over", code="file_in_use")
        return json_response(FileDeleted(id=file.id))

    async def content(self, request: web.Request) -> web.FileResponse:
        file = await self._file(request)
        return web.FileResponse(opened(self._service).path(file.id), headers={"Content-Type": "application/jsonl"})

    async def _file(self, request: web.Request) -> File:
        store, name = opened(self._service), request.match_info["file"]
        file = await stored(store, store.file, name)
        if file is None:
            raise ApiError(404, f"file {name!r} does not exist", param="file_id", code="file_not_found")
        return file


async def _read_upload(request: web.Request, content: Path, most: int) -> tuple[FileForm, str, int]:
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
    form = parse_fields(fields, FileForm)
    if (form.anchor is UNSET) != (form.seconds is UNSET):
        raise wrong("expires_after[anchor]" if form.anchor is UNSET else "expires_after[seconds]", "missing")
    return form, name, size


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


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"file: larger than max_file_size, {most} bytes", param="file", code="request_too_large")
