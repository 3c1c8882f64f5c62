"""The lines of a batch: of its input, and of the files that answer them. The server and `toka-batch` have the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

ENDPOINTS = ("/v1/responses", "/v1/chat/completions", "/v1/embeddings", "/v1/completions", "/v1/moderations")
"""Those that OpenAI has batches for; here, where the server has them."""
KEY_BYTES = 16
_PROMPTS = ("instructions", "messages", "prompt", "input")
"""The fields by which requests share their beginning."""
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for JSON that is none, or is something else than was asked for."""
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
    url: str
    body: msgspec.Raw

    @property
    def key(self) -> bytes:
        """What stands for the custom_id, in few bytes."""
        return key_of(self.custom_id)

    def fields(self) -> dict[str, msgspec.Raw]:
        """The body's; none where it is no object, of which the server says so. LineError where it wants a stream."""
        try:
            fields = msgspec.json.decode(self.body, type=dict[str, msgspec.Raw])
        except UNREADABLE:
            return {}
        if bytes(fields.get("stream", b"null")).strip() not in (b"null", b"false"):
            raise LineError("unsupported_parameter", "stream: an answer in a batch is never streamed", self.custom_id)
        return fields


def key_of(name: str, person: bytes = b"") -> bytes:
    """KEY_BYTES that stand for a name; others for another `person`."""
    return hashlib.blake2b(name.encode(), digest_size=KEY_BYTES, person=person).digest()


def order(fields: Mapping[str, msgspec.Raw]) -> bytes:
    """By what bodies are sorted, so that shared prefixes run together."""
    return b"".join(bytes(fields.get(name, b"")) for name in _PROMPTS)


def read_item(line: bytes, number: int, endpoints: Sequence[str]) -> Item:
    """Check a line of the input, which is for one of `endpoints`; `number` counts from 1. Raises LineError."""
    try:
        fields = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except UNREADABLE as error:
        raise LineError("invalid_json_line", f"line {number} is not a JSON object: {error}") from None
    custom_id = _text(fields, "custom_id")
    if not custom_id:
        raise LineError("missing_required_parameter", f"line {number}: custom_id: expected a text that is not empty")
    for name in fields:
        if name not in _FIELDS:
            raise LineError("unknown_parameter", f"line {number}: {name}: unknown field", custom_id)
    if _text(fields, "method") != "POST":
        raise LineError("invalid_method", f'line {number}: method: expected "POST"', custom_id)
    url = _text(fields, "url")
    if url is None or url not in endpoints:
        expected = " or ".join(map(repr, endpoints))
        raise LineError("mismatched_url", f"line {number}: url: expected {expected}", custom_id)
    if "body" not in fields:
        raise LineError("missing_required_parameter", f"line {number}: body: missing", custom_id)
    return Item(custom_id, url, fields["body"])


def custom_id_of(line: bytes) -> str | None:
    """That of a line of the input; None where `read_item` would not find one."""
    try:
        return _text(msgspec.json.decode(line, type=dict[str, msgspec.Raw]), "custom_id") or None
    except UNREADABLE:
        return None


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
    except UNREADABLE:
        return None
