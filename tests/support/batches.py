"""Batches as tests send them, and what came of them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import Any

import openai
from openai.types import Batch

COMPLETIONS = "/v1/completions"
OVER = ("completed", "failed", "expired", "cancelled")


def line(custom_id: Any, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    """A request for eight tokens, with an own seed."""
    fields = {"prompt": "x", "max_tokens": 8, "ignore_eos": True} | body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": fields}


def jsonl(lines: Iterable[dict[str, Any] | str]) -> bytes:
    """A file of lines; texts stand for themselves."""
    return b"".join((each if isinstance(each, str) else json.dumps(each)).encode() + b"\n" for each in lines)


def start(sdk: openai.OpenAI, content: bytes, window: str = "24h", endpoint: Any = COMPLETIONS) -> Batch:
    """Upload a file and create a batch of it."""
    file = sdk.files.create(file=("in.jsonl", content), purpose="batch")
    return sdk.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window=window, metadata={"run": "1"}  # type: ignore[arg-type]
    )  # fmt: skip


def wait(sdk: openai.OpenAI, batch: Batch, until: Callable[[Batch], bool], seconds: float = 60.0) -> Batch:
    """The batch once `until` holds of it."""
    end = time.monotonic() + seconds
    while not until(batch):
        assert time.monotonic() < end, batch
        time.sleep(0.02)
        batch = sdk.batches.retrieve(batch.id)
    return batch


def over(batch: Batch) -> bool:
    return batch.status in OVER


def results(sdk: openai.OpenAI, file: str | None) -> list[dict[str, Any]]:
    """The lines of an output or error file; none where there is no file."""
    return [json.loads(each) for each in sdk.files.content(file).text.splitlines()] if file else []
