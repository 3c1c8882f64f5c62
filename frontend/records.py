"""What is kept of files and batches: OpenAI's objects, and how far a batch is."""

from __future__ import annotations

import secrets
import time
from typing import Literal

from msgspec import Struct, field

ACTIVE = ("validating", "in_progress", "finalizing", "cancelling")
"""The statuses of batches that are not over."""


def new_id(kind: str) -> str:
    """`kind`: file- or batch_, as OpenAI's ids begin."""
    return f"{kind}{secrets.token_hex(16)}"


def now() -> int:
    """Whole seconds, as OpenAI's objects have them."""
    return int(time.time())


class File(Struct, kw_only=True):
    """OpenAI's file object."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: str = "processed"
    expires_at: int | None = None


class Counts(Struct, kw_only=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchError(Struct, kw_only=True):
    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(Struct, kw_only=True):
    """Why a batch as a whole has failed."""

    object: Literal["list"] = "list"
    data: list[BatchError]


class Usage(Struct, kw_only=True):
    """Tokens of all answers."""

    input_tokens: int = 0
    input_tokens_details: dict[str, int] = field(default_factory=lambda: {"cached_tokens": 0})
    output_tokens: int = 0
    output_tokens_details: dict[str, int] = field(default_factory=lambda: {"reasoning_tokens": 0})
    total_tokens: int = 0


class Batch(Struct, kw_only=True):
    """OpenAI's batch object."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None
    status: str = "validating"
    """validating, in_progress, finalizing, completed; or failed, expired, cancelling, cancelled."""
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    """Answers that are errors, and lines that were not run."""
    errors: BatchErrors | None = None
    request_counts: Counts = field(default_factory=Counts)
    usage: Usage = field(default_factory=Usage)

    def fail(self, code: str, message: str) -> None:
        self.status, self.failed_at = "failed", now()
        self.errors = BatchErrors(data=[BatchError(code=code, message=message)])


class Progress(Struct, kw_only=True):
    """How far a batch is, beside its object: what lies behind it in the two files is not done."""

    expires_after: int | None = None
    """Seconds that the two files are kept; None: until they are deleted."""
    input_offset: int = 0
    """Bytes of the input that were looked at."""
    input_lines: int = 0
    output_bytes: int = 0
    error_bytes: int = 0
    ending: str = ""
    """The status after finalizing; empty before."""
