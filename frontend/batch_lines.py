"""The lines of a batch: of its input, and of the two files that answer them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from frontend.schema import INT32

KEY_BYTES = 16
PRIORITY = 1 << 20
"""Of a batch's requests: later than any interactive one that does not ask for worse ..."""
PRIORITY_RANGE = PRIORITY - 1
"""... and so far from it is what a line asks for counted."""
_PROMPTS = ("instructions", "messages", "prompt", "input")
"""The fields by which requests share their beginning."""
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_FIELDS = ("custom_id", "method", "url", "body")


class LineError(Exception):
    """A line that is not run, and why."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.custom_id = code, message, custom_id


@dataclass(slots=True)
class Item:
    """A line that may run."""

    custom_id: str
    body: msgspec.Raw

    @property
    def key(self) -> bytes:
        """What stands for the custom_id, in few bytes."""
        return hashlib.blake2b(self.custom_id.encode(), digest_size=KEY_BYTES).digest()

    def request(self) -> tuple[bytes, bytes]:
        """The body to post, at a batch's priority, and by what it is sorted. LineError where it cannot be posted."""
        try:
            fields = msgspec.json.decode(self.body, type=dict[str, msgspec.Raw])
        except _UNREADABLE:
            return bytes(self.body), b""
        if bytes(fields.get("stream", b"null")).strip() not in (b"null", b"false"):
            raise LineError("unsupported_parameter", "stream: an answer in a batch is never streamed", self.custom_id)
        order = b"".join(bytes(fields.get(name, b"")) for name in _PROMPTS)
        try:
            own = msgspec.json.decode(fields.get("priority", b"null"), type=int | None) or 0
        except _UNREADABLE:
            own = INT32 + 1
        if abs(own) > INT32:
            return bytes(self.body), order  # The server says what is wrong with it.
        priority = PRIORITY + max(-PRIORITY_RANGE, min(PRIORITY_RANGE, own))
        return msgspec.json.encode(fields | {"priority": priority}), order


def read_item(line: bytes, number: int, endpoint: str) -> Item:
    """Check a line of the input; `number` counts from 1. Raises LineError."""
    try:
        fields = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except _UNREADABLE as error:
        raise LineError("invalid_json_line", f"line {number} is not a JSON object: {error}") from None
    custom_id = _text(fields, "custom_id")
    if not custom_id:
        raise LineError("missing_required_parameter", f"line {number}: custom_id: expected a text that is not empty")
    for name in fields:
        if name not in _FIELDS:
            raise LineError("unknown_parameter", f"line {number}: {name}: unknown field", custom_id)
    if _text(fields, "method") != "POST":
        raise LineError("invalid_method", f'line {number}: method: expected "POST"', custom_id)
    if _text(fields, "url") != endpoint:
        raise LineError("mismatched_url", f"line {number}: url: expected {endpoint!r}, the batch's", custom_id)
    if "body" not in fields:
        raise LineError("missing_required_parameter", f"line {number}: body: missing", custom_id)
    return Item(custom_id, fields["body"])


def read_lines(path: Path, start: int, number: int, longest: int, count: int) -> Iterator[tuple[int, int, int, bytes]]:
    """Up to `count` lines from offset `start` on, the first of which has this number: number, offset, size, content.

    One longer than `longest` bytes comes cut after the next byte: it is never held as a whole.
    """
    with path.open("rb") as file:
        file.seek(start)
        for each in range(number, number + count):
            offset = file.tell()
            line = file.readline(longest + 1)
            if not line:
                return
            rest = line
            while len(rest) > longest and not rest.endswith(b"\n"):
                rest = file.readline(longest + 1)
            yield each, offset, file.tell() - offset, line


def result(batch: str, number: int, custom_id: str, status: int, body: bytes) -> bytes:
    """The line of the output or the error file for a request that was answered."""
    request = f"{batch.removeprefix('batch_')}_{number}"
    response = {"status_code": status, "request_id": f"req_{request}", "body": msgspec.Raw(body)}
    return _line({"id": f"batch_req_{request}", "custom_id": custom_id, "response": response, "error": None})


def refusal(batch: str, number: int, error: LineError) -> bytes:
    """The line of the error file for one that was not run."""
    said = {"code": error.code, "message": error.message}
    name = f"batch_req_{batch.removeprefix('batch_')}_{number}"
    return _line({"id": name, "custom_id": error.custom_id, "response": None, "error": said})


def _line(value: dict[str, Any]) -> bytes:
    return msgspec.json.encode(value) + b"\n"


def _text(fields: dict[str, msgspec.Raw], name: str) -> str | None:
    """A field that is a text; None where it is missing or something else."""
    try:
        return msgspec.json.decode(fields[name], type=str) if name in fields else None
    except _UNREADABLE:
        return None
