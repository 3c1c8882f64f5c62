"""One batch from its input to its two files, one status after another. It may die at any point and start over."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from frontend.batch_lines import request
from frontend.batch_usage import Tokens, add_usage, tokens_of
from frontend.in_process import InProcess
from frontend.records import Batch, File, Progress, now
from frontend.service import RETRY_SECONDS, Service
from frontend.store import Line, Store, explain
from toka.batch_lines import Item, LineError, read_item, read_lines, refusal, result

LINES_AT_ONCE = 2000
"""Read and sorted together."""
INDEXED_AT_ONCE = 5_000
"""Lines of the input looked at in one transaction."""
BYTES_AT_ONCE = 64 << 20
"""Of lines that are read and sorted together."""
WAIT_SECONDS = 5.0
"""Before the disk is tried again."""
BUSY = (429, 503)
"""Answers that say nothing about a request: it is made again."""

P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Ready:
    """A line that runs next."""

    number: int
    custom_id: str
    body: bytes
    order: bytes


@dataclass(slots=True)
class _Result:
    number: int
    good: bool
    line: bytes
    usage: Tokens


class BatchRun:
    """`slots`: the requests that all batches together may have in the engine."""

    def __init__(self, service: Service, store: Store, post: InProcess, slots: asyncio.Semaphore, batch: str) -> None:
        self._store, self._post, self._slots, self._id = store, post, slots, batch
        self._longest = service.config.max_body_bytes
        self._stopped = asyncio.Event()
        self._results: list[_Result] = []
        self._writing = asyncio.Lock()

    def stop(self) -> None:
        """The batch is being cancelled: look at its status."""
        self._stopped.set()

    async def run(self) -> None:
        """Take the batch to its end."""
        steps = {
            "validating": self._validate,
            "in_progress": self._answer,
            "finalizing": self._finish,
            "cancelling": self._cancel,
        }
        try:
            while step := steps.get((await self._stored(self._store.progress, self._id))[0].status):
                await step()
        except FileNotFoundError as error:
            await self._fail("input_file_missing", f"the input file is gone: {error}")
        except Exception:
            log.exception("a batch failed", extra={"batch": self._id})
            await self._fail("internal_error", "internal error")

    async def _stored(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What a method that touches the disk returns, as soon as the disk lets it."""
        while True:
            try:
                return await self._store.call(method, *args, **kwargs)
            except FileNotFoundError:
                raise
            except (OSError, sqlite3.Error) as error:
                log.warning("%s; batches wait", explain(error, self._store.folder), extra={"batch": self._id})
                await asyncio.sleep(WAIT_SECONDS)

    async def _change(self, change: Callable[[Batch, Progress], None]) -> None:
        await self._stored(self._store.change, self._id, change)

    async def _fail(self, code: str, message: str) -> None:
        """End the batch here, with what was answered."""
        await self._stored(self._store.forget_lines, self._id)
        await self._stored(self._publish, "failed", (code, message))

    # --- validating

    async def _validate(self) -> None:
        """Look at some more lines of the input."""
        await self._stored(self._index)

    def _index(self) -> None:
        """Put lines that may run on the list, and say of the others in the error file what is wrong."""
        batch, progress = self._store.progress(self._id)
        lines: dict[bytes, Line] = {}
        errors: list[bytes] = []
        path, end, last = self._store.path(batch.input_file_id), progress.input_offset, progress.input_lines
        for number, start, size, content in read_lines(path, end, last + 1, self._longest, INDEXED_AT_ONCE):
            end, last = start + size, number
            try:
                if content.strip():
                    key = self._check(batch, number, content, lines)
                    lines[key] = Line(number, start, size, key)
            except LineError as error:
                errors.append(refusal(self._id, number, error))

        def change(batch: Batch, progress: Progress) -> None:
            counts = batch.request_counts
            counts.total, counts.failed = counts.total + len(lines) + len(errors), counts.failed + len(errors)
            whole = end == progress.input_offset
            progress.input_offset, progress.input_lines = end, last
            if whole and batch.status == "validating":
                batch.status, batch.in_progress_at = "in_progress", now()
                if not counts.total:
                    batch.fail("empty_file", "the input file has no lines")

        self._store.append(self._id, b"", b"".join(errors), change, new=list(lines.values()))

    def _check(self, batch: Batch, number: int, content: bytes, lines: dict[bytes, Line]) -> bytes:
        """The key of a line that may run."""
        if len(content) > self._longest:
            raise LineError("request_too_large", f"line {number} is larger than {self._longest} bytes")
        item = read_item(content, number, [batch.endpoint])
        request(item)
        if item.key in lines or self._store.has_key(self._id, item.key):
            raise LineError("duplicate_custom_id", f"line {number}: custom_id: given before", item.custom_id)
        return item.key

    # --- in_progress

    async def _answer(self) -> None:
        """Have all lines answered that are left, as long as there is time and nobody cancels."""
        batch, _ = await self._stored(self._store.progress, self._id)
        await self._stored(self._store.path(batch.input_file_id).stat)
        work = asyncio.create_task(self._work(batch))
        stopped = asyncio.create_task(self._stopped.wait())
        try:
            left = max(0.0, batch.expires_at - time.time())
            await asyncio.wait({work, stopped}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended = work.done()
            for task in (work, stopped):
                task.cancel()
            await asyncio.wait({work, stopped})
        if ended:
            work.result()
        elif self._stopped.is_set():
            return
        else:
            await self._drop("batch_expired", "the completion window ended before this request was answered")
        ending = "completed" if ended else "expired"

        def change(batch: Batch, progress: Progress) -> None:
            if batch.status == "in_progress":
                batch.status, batch.finalizing_at, progress.ending = "finalizing", now(), ending

        await self._change(change)

    async def _work(self, batch: Batch) -> None:
        """Send the lines through a window: those read together in an order in which shared prefixes meet."""
        after = 0
        async with asyncio.TaskGroup() as group:
            while lines := await self._stored(self._load, batch, after):
                after = max(each.number for each in lines)
                for each in sorted(lines, key=lambda line: line.order):
                    await self._slots.acquire()
                    group.create_task(self._one(batch.endpoint, each))

    def _load(self, batch: Batch, after: int) -> list[_Ready]:
        ready: list[_Ready] = []
        size = 0
        with self._store.path(batch.input_file_id).open("rb") as file:
            for line in self._store.lines(self._id, after, LINES_AT_ONCE):
                file.seek(line.start)
                item = read_item(file.read(line.size), line.number, [batch.endpoint])
                ready.append(_Ready(line.number, item.custom_id, *request(item)))
                size += line.size
                if size >= BYTES_AT_ONCE:
                    break
        return ready

    async def _one(self, endpoint: str, line: _Ready) -> None:
        try:
            status, body, later = await self._post.post(endpoint, line.body)
            while status in BUSY:
                await asyncio.sleep(later or RETRY_SECONDS)
                status, body, later = await self._post.post(endpoint, line.body)
            good = status == 200
            written = result(self._id, line.number, line.custom_id, status, body)
            await self._record(_Result(line.number, good, written, tokens_of(body)))
        finally:
            self._slots.release()

    async def _record(self, result: _Result) -> None:
        """Write a result; those that come while others are being written go together."""
        self._results.append(result)
        async with self._writing:
            if not self._results:
                return
            results, self._results = self._results, []
            output = b"".join(each.line for each in results if each.good)
            errors = b"".join(each.line for each in results if not each.good)
            done = [each.number for each in results]

            def change(batch: Batch, progress: Progress) -> None:
                counts = batch.request_counts
                for each in results:
                    counts.completed, counts.failed = counts.completed + each.good, counts.failed + (not each.good)
                    add_usage(batch.usage, each.usage)

            await self._stored(self._store.append, self._id, output, errors, change, done=done)

    # --- The end

    async def _cancel(self) -> None:
        await self._drop("batch_cancelled", "the batch was cancelled before this request was answered")
        await self._stored(self._publish, "cancelled")

    async def _finish(self) -> None:
        _, progress = await self._stored(self._store.progress, self._id)
        await self._stored(self._publish, progress.ending)

    async def _drop(self, code: str, message: str) -> None:
        """Say of all lines that are left why they were not run."""
        batch, _ = await self._stored(self._store.progress, self._id)
        while await self._stored(self._drop_some, batch, code, message):
            pass

    def _drop_some(self, batch: Batch, code: str, message: str) -> bool:
        errors: list[bytes] = []
        lines = self._store.lines(self._id, 0, LINES_AT_ONCE)
        with self._store.path(batch.input_file_id).open("rb") as file:
            for line in lines:
                file.seek(line.start)
                item: Item = read_item(file.read(line.size), line.number, [batch.endpoint])
                errors.append(refusal(self._id, line.number, LineError(code, message, item.custom_id)))

        def change(batch: Batch, progress: Progress) -> None:
            batch.request_counts.failed += len(errors)

        self._store.append(self._id, b"", b"".join(errors), change, done=[line.number for line in lines])
        return bool(lines)

    def _publish(self, ending: str, error: tuple[str, str] | None = None) -> None:
        """Make files of what was written. The ids are the batch's, so that it may be done twice."""
        _, progress = self._store.progress(self._id)
        expires = None if progress.expires_after is None else now() + progress.expires_after
        files: list[str | None] = []
        for kind, content, size in (
            ("output", self._store.output(self._id), progress.output_bytes),
            ("errors", self._store.errors(self._id), progress.error_bytes),
        ):
            name = f"{self._id}_{kind}"
            file = File(
                id=f"file-{name.removeprefix('batch_')}",
                bytes=size,
                created_at=now(),
                filename=f"{name}.jsonl",
                purpose="batch_output",
                expires_at=expires,
            )
            if size:
                self._store.publish(file, content)
            content.unlink(missing_ok=True)
            files.append(file.id if size else None)

        def change(batch: Batch, progress: Progress) -> None:
            batch.output_file_id, batch.error_file_id = files
            batch.status = ending
            setattr(batch, f"{ending}_at", now())
            if error:
                batch.fail(*error)

        self._store.change(self._id, change)
