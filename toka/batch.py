"""`toka-batch`: answers a file of requests, as OpenAI's batches have them, without a server or with one that runs."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from msgspec import Struct

from toka.batch_journal import Journal, Line
from toka.batch_lines import UNREADABLE, LineError, refusal, result
from toka.batch_progress import Progress, Shown, shown
from toka.client import Client
from toka.config import Config, pairs
from toka.display import Bars, Quiet
from toka.private import PrivateServer
from toka.process import USAGE_ERROR, begin, command_line, raise_file_limit

PROGRAM = "toka-batch"
BATCH = "offline"
"""What stands for the batch in the ids of its answers."""
OWN = ("errors", "url", "api_key")
WITH_URL = {"batch_items", "max_body_bytes", "log_level"}
"""Settings that mean something where the server is another one."""
USAGE = """toka-batch: answers a file of requests, as OpenAI's batches have them

usage: toka-batch IN.jsonl OUT.jsonl [key=value | --key value] ...

A line of IN is {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}; its answer is added
to OUT. Started again with the same files, it goes on with what is not answered yet. Status 0: every line was answered;
1: some failed, or it could not go on; 130: interrupted.

  errors=FILE    answers to lines that failed go there; by default to OUT, too
  url=URL        a server that runs; by default one is started, for this alone
  api_key=KEY    for that server; better as TOKA_API_KEY in the environment

Every setting of `toka --help` is one of the server that is started; batch_items is how many requests it has at once."""


@dataclass(frozen=True, slots=True)
class Own:
    """What the command line says beside the settings of Toka."""

    source: Path
    output: Path
    errors: Path | None
    url: str
    api_key: str


class _Usage(Struct):
    completion_tokens: int = 0
    output_tokens: int = 0


class _Used(Struct):
    usage: _Usage = msgspec.field(default_factory=_Usage)


_used = msgspec.json.Decoder(_Used)


def main() -> None:
    own, rest = arguments(sys.argv[1:])
    config = command_line(PROGRAM, "", None, ["log_level=warning", *rest])
    begin("batch", "toka: batch", config)
    raise_file_limit()
    try:
        with Journal(own.source, own.output, own.errors, config.max_body_bytes) as journal:
            status = uvloop.run(run(journal, own, config))
    except ValueError as error:
        _say(str(error))
        status = USAGE_ERROR
    sys.exit(status)


def arguments(args: Sequence[str]) -> tuple[Own, list[str]]:
    """The command line apart: what is ours, and the settings. Answers `--help`, and ends where it is wrong."""
    if "--help" in args or "-h" in args:
        print(USAGE)
        sys.exit(0)
    if "--version" in args:
        command_line(PROGRAM, "", args=["--version"])
    try:
        files = list(itertools.takewhile(lambda each: "=" not in each and not each.startswith("--"), args[:2]))
        if len(files) < 2:
            raise ValueError("expected two files, IN.jsonl and OUT.jsonl, and then settings; see --help")
        given = pairs(args[2:])
        own = {"api_key": os.environ.get("TOKA_API_KEY", "")} | {key: value for key, value in given if key in OWN}
        rest = [(key, value) for key, value in given if key not in OWN]
        if own.get("url") and (useless := {key for key, _ in rest} - WITH_URL):
            raise ValueError(f"{min(useless)}: a setting of a server that is started here, and url= names another")
        if own.get("url") and not own["url"].startswith(("http://", "https://")):
            raise ValueError(f"url: expected http://HOST:PORT, got {own['url']!r}")
    except ValueError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        sys.exit(USAGE_ERROR)
    errors = Path(own["errors"]) if own.get("errors") else None
    url = own.get("url", "").rstrip("/").removesuffix("/v1")
    return Own(Path(files[0]), Path(files[1]), errors, url, own["api_key"]), [f"{key}={value}" for key, value in rest]


async def run(journal: Journal, own: Own, config: Config) -> int:
    """Answer what is left, and say what came of it; the exit status."""
    stopped: asyncio.Future[signal.Signals] = asyncio.get_running_loop().create_future()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, _stop, stopped, number)
    why = ""
    try:
        if journal.done < journal.total and not await _unless(stopped, _answer(journal, own, config)):
            why = f"stopped by {stopped.result().name}"
    except (RuntimeError, OSError) as error:
        why = str(error)
    answered = f"{journal.done:,} of {journal.total:,} lines are answered"
    if journal.failed:
        answered += f", {journal.failed:,} of them with an error, in {own.errors or own.output}"
    if journal.done < journal.total:
        _say(f"{why or 'the input has become shorter'}; {answered}; the same command goes on from there")
        return 128 + stopped.result() if stopped.done() else 1
    _say(answered)
    return 1 if journal.failed else 0


async def _answer(journal: Journal, own: Own, config: Config) -> None:
    """Answer what is left. RuntimeError or OSError, in one sentence, where that cannot go on."""
    if own.url:
        async with Client([own.url], own.api_key) as client:
            await _Sender(journal, client, config.batch_items).send_all()
        return
    server = PrivateServer(config, Bars() if sys.stderr.isatty() else Quiet())
    ended = asyncio.create_task(server.ended())
    try:
        async with Client(await server.ready()) as client:
            sender = _Sender(journal, client, config.batch_items * config.dp_size)
            if not await _unless(ended, sender.send_all()):
                raise RuntimeError(ended.result())
    finally:
        ended.cancel()
        await server.stop()


class _Sender:
    """`window`: requests that may be under way at once."""

    def __init__(self, journal: Journal, client: Client, window: int) -> None:
        self._journal, self._client = journal, client
        self._room = asyncio.Semaphore(window)
        self._progress = Progress(journal.total, journal.done, journal.failed)

    async def send_all(self) -> None:
        with shown(self._progress) as display:
            showing = asyncio.create_task(self._show(display))
            try:
                async with asyncio.TaskGroup() as group:
                    for lines in self._journal.left():
                        for line in lines:
                            await self._room.acquire()
                            group.create_task(self._one(line))
            except ExceptionGroup as failed:
                raise failed.exceptions[0] from None
            finally:
                showing.cancel()

    async def _one(self, line: Line) -> None:
        try:
            if isinstance(line.item, LineError):
                self._write(refusal(BATCH, line.number, line.item), False)
                return
            status, body = await self._client.post(line.item.url, bytes(line.item.body))
            tokens, body = _read(body)
            self._progress.tokens += tokens
            self._write(result(BATCH, line.number, line.item.custom_id, status, body), status == 200)
        finally:
            self._room.release()

    def _write(self, answer: bytes, good: bool) -> None:
        self._journal.write(answer, good)
        self._progress.done, self._progress.failed = self._journal.done, self._journal.failed

    async def _show(self, display: Shown) -> None:
        while True:
            await asyncio.sleep(display.seconds)
            display.update()


async def _unless(other: asyncio.Future[Any], work: Coroutine[Any, Any, None]) -> bool:
    """Do the work. False where `other` was done first, and the work was given up."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task, other}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        task.cancel()
        await asyncio.wait({task})


def _stop(stopped: asyncio.Future[signal.Signals], number: signal.Signals) -> None:
    if not stopped.done():
        stopped.set_result(number)


def _read(body: bytes) -> tuple[int, bytes]:
    """The output tokens that an answer counts, and itself on one line: a text where what came is no JSON object."""
    try:
        usage = _used.decode(body).usage
    except UNREADABLE:
        return 0, msgspec.json.encode(body.decode(errors="replace"))
    return usage.completion_tokens + usage.output_tokens, msgspec.json.format(
        body, indent=-1
    ) if b"\n" in body else body


def _say(sentence: str) -> None:
    print(f"{PROGRAM}: {sentence}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
