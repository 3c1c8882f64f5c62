"""The body of a request to one of the structs of `frontend.schema`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import sys
from array import array
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from frontend.errors import ApiError, wrong
from frontend.schema import CompletionRequest

LARGE_BYTES = 262_144
"""A body larger than this is parsed off the event loop, its ids prompt by prompt."""
BUSY_SECONDS = 1

_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>.*?)`(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<field>.*?)`(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL)
_WRONG = re.compile(r"(?P<message>.*) - at (?:`key` in )?`\$\.?(?P<path>.*)`", re.DOTALL)

Body = bytes | bytearray
S = TypeVar("S", bound=msgspec.Struct)


class Bodies:
    """Reads request bodies, of `most_each` bytes at most, and of `most` bytes at most held at once.

    A body counts until its request has been answered: it stands for what was made of it as well.
    """

    def __init__(self, most_each: int, most: int) -> None:
        self.held = 0
        self._most_each, self._most = most_each, most

    async def read(self, request: web.Request) -> bytearray:
        """The whole body, counted until `forget`; raises ApiError 413 or 429."""
        if (request.content_length or 0) > self._most_each:
            raise self._too_large()
        body = bytearray()
        try:
            async for piece in request.content.iter_any():
                body += piece
                self.held += len(piece)
                if len(body) > self._most_each:
                    raise self._too_large()
                if self.held > self._most:
                    raise ApiError(429, "too many bytes of requests are waiting", retry_after=BUSY_SECONDS)
        except web.RequestPayloadError as error:
            self.held -= len(body)
            reason = " ".join(str(error).split())
            raise ApiError(400, f"the body is not as its headers say: {reason}", code="invalid_body") from None
        except BaseException:
            self.held -= len(body)
            raise
        return body

    def forget(self, size: int) -> None:
        self.held -= size

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._most_each} bytes", code="request_too_large")


async def parse(body: Body, kind: type[S], most_prompts: int = sys.maxsize) -> S:
    """`body` as a `kind`; raises ApiError that names the field which is wrong.

    A large body with more than `most_prompts` is refused before they are made.
    """
    if len(body) > LARGE_BYTES:
        return await asyncio.to_thread(_parse_large, body, kind, most_prompts)
    return _parse(body, kind)


class _LargeCompletion(CompletionRequest, kw_only=True, forbid_unknown_fields=True):
    prompt: msgspec.Raw = msgspec.Raw(b"null")  # type: ignore[assignment]


def _parse_large(body: Body, kind: type[S], most_prompts: int) -> S:
    """As `_parse`. A thread alone is no help: one call over 64 MiB of ids holds the interpreter for half a second."""
    if kind is CompletionRequest:
        with contextlib.suppress(msgspec.DecodeError, RecursionError, OverflowError):
            large = msgspec.json.decode(body, type=_LargeCompletion)
            raw = bytes(large.prompt)
            if (count := _prompts_at_least(raw)) > most_prompts:
                raise wrong("prompt", f"at least {count} prompts in one request; at most {most_prompts}")
            prompt = _lists_of_ids(raw)
            fields = {name: getattr(large, name) for name in kind.__struct_fields__}
            return kind(**(fields | {"prompt": prompt}))
    return _parse(body, kind)


def _prompts_at_least(raw: bytes) -> int:
    """How many prompts JSON holds, or fewer where texts have quotes: millions of them take gigabytes to make."""
    if not raw.strip().startswith(b"["):
        return 1
    if quotes := raw.count(b'"'):
        return (quotes - raw.count(b'\\"')) // 2
    return raw.count(b"]") - 1


def _lists_of_ids(raw: bytes) -> list[array[int]]:
    """`[[1, 2], [3]]` with a call for each inner list; msgspec.DecodeError for anything else.

    Arrays, as it takes long to free millions of integers, too.
    """
    inner = raw.strip()[1:-1].strip()
    if not inner.startswith(b"[") or b'"' in inner:
        raise msgspec.DecodeError("not lists of ids")
    first, *others = inner.removesuffix(b"]").split(b"]")
    lists = [first, *(each.lstrip(b" \t\r\n").removeprefix(b",").lstrip(b" \t\r\n") for each in others)]
    return [array("q", msgspec.json.decode(each + b"]", type=list[int])) for each in lists]


def parse_fields(values: Mapping[str, str], kind: type[S]) -> S:
    """The fields of a query or a form as a `kind`; raises ApiError that names the field which is wrong."""
    try:
        return msgspec.convert(dict(values), kind, strict=False)
    except msgspec.ValidationError as error:
        raise _named(str(error), kind) from None


def _parse(body: Body, kind: type[S]) -> S:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _named(str(error), kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _broken(body, str(error)) from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None


def _named(message: str, kind: type[msgspec.Struct]) -> ApiError:
    """The ApiError for what msgspec says is wrong about a field."""
    if match := _UNKNOWN.fullmatch(message):
        return wrong(_joined(match), "unknown field", "unknown_parameter")
    if match := _MISSING.fullmatch(message):
        return wrong(_joined(match), "missing")
    if match := _WRONG.fullmatch(message):
        if "Expected `null`" in match["message"]:
            return wrong(match["path"], "not supported", "unsupported_parameter")
        return wrong(match["path"], match["message"][0].lower() + match["message"][1:].replace(" | null", ""))
    return ApiError(400, f"the body: {message}", code="invalid_json")


def _joined(match: re.Match[str]) -> str:
    return ".".join(filter(None, (match["path"], match["field"])))


def _broken(body: Body, message: str) -> ApiError:
    """The ApiError for a body that is no JSON, or JSON with what JSON cannot hold: NaN, half a surrogate pair."""
    try:
        for path, value in _leaves(json.loads(body)):
            if isinstance(value, float) and not math.isfinite(value):
                return wrong(path, f"{value} is not a number that JSON has")
            if isinstance(value, str) and not _encodable(value):
                return wrong(path, "half of a surrogate pair is not text")
    except (ValueError, RecursionError):
        pass
    return ApiError(400, f"the body is not JSON: {message}", code="invalid_json")


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield path or "body", key
            yield from _leaves(each, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _leaves(each, f"{path}[{index}]")
    else:
        yield path, value


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
