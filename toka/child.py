"""One part as a child process: start it, hear what it tells, learn why it ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from toka import config as settings
from toka.display import Display
from toka.listen import LISTEN_FDS, Sockets
from toka.process import HOME, NOTIFY_FD, PARENT

CHUNK_BYTES = 1 << 16
LINE_BYTES = 1 << 20
"""The longest line of a part that is passed on whole."""
LAST_WORDS_SECONDS = 0.5
"""How long to wait for what a process wrote before it ended; a child of its own may keep the pipes open."""


class PartFailed(Exception):
    """A part did not become ready, or died; the message is one sentence that names it."""


@dataclass(slots=True)
class Part:
    """How to start a part: `python -P -m module args`, with `env` on top of the environment."""

    name: str
    module: str
    args: list[str]
    env: dict[str, str] = field(default_factory=dict)
    sockets: Sockets = field(default_factory=list)
    """Listening sockets that it inherits. They are kept open here as long as it may be started again."""

    def close(self) -> None:
        """It is not started again: what waits in its sockets is its own, and nothing else may come in."""
        for each in self.sockets:
            each.close()
        self.sockets.clear()


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """A child's environment: the folder that holds `toka` comes first, and its settings are its arguments alone."""
    own = {f"TOKA_{name.upper()}" for name in settings.settings()}
    kept = {key: value for key, value in os.environ.items() if key not in own}
    path = [str(HOME), *filter(None, [kept.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(path), PARENT: str(os.getpid()), **extra}


class Child:
    """A running part. Its session is its own, so that a terminal's Ctrl-C reaches the supervisor alone."""

    def __init__(self, part: Part, display: Display) -> None:
        """Start `part`; raises PartFailed where its package is not there."""
        if not (HOME / part.module.partition(".")[0]).is_dir():
            raise PartFailed(f"{part.name}: the package {part.module!r} is not beside toka in {HOME}")
        self.part = part
        self._display = display
        self._sentence = ""
        self._last_line = ""
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[str] = loop.create_future()
        self._exited = asyncio.Event()
        (notes, notify), (lines, output) = os.pipe(), os.pipe()
        listening = [each.fileno() for each in part.sockets]
        given = {**part.env, NOTIFY_FD: str(notify), LISTEN_FDS: ",".join(map(str, listening))}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", part.module, *part.args],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(notify, *listening),
                start_new_session=True,
                env=environment(given),
            )
        finally:
            os.close(notify)
            os.close(output)
        threading.Thread(target=self._wait, args=(loop,), daemon=True).start()
        self._ended = asyncio.create_task(self._follow(notes, lines))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def status(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    @property
    def served(self) -> bool:
        """Whether it has become ready."""
        return self._ready.done()

    async def ready(self, seconds: float) -> str:
        """Wait until the part is ready; its text. Raises PartFailed where it ends first or takes too long."""
        either: list[asyncio.Future[Any]] = [self._ready, self._ended]
        await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if self.served:
            return self._ready.result()
        if self._ended.done():
            raise PartFailed(self.epitaph())
        raise PartFailed(f"{self.part.name} was not ready within {seconds:g} s")

    async def ended(self) -> None:
        """Wait until the process has ended and all it said has been heard."""
        await asyncio.shield(self._ended)

    async def end(self, seconds: float) -> None:
        """Ask it to drain and end, and kill it where it has not after so long."""
        self.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.ended()
        self.kill()
        await self.ended()

    def epitaph(self) -> str:
        """Which part ended and why, in one sentence."""
        if self._sentence:
            return f"{self.part.name} failed: {self._sentence}"
        status = self.status or 0
        if status in (-signal.SIGKILL, -signal.SIGTERM):
            # From outside: what it last wrote has nothing to do with it.
            return f"{self.part.name} was killed by {signal.Signals(-status).name}"
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return f"{self.part.name} {how}" + (f": {self._last_line}" if self._last_line else "")

    def terminate(self) -> None:
        """Ask it to drain and end."""
        self._process.terminate()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(self._exited.set)

    async def _follow(self, notes: int, lines: int) -> None:
        """Read all that the process writes, and return when it has ended."""
        readers = [
            asyncio.create_task(_read_lines(notes, self._note)),
            asyncio.create_task(_read_lines(lines, self._line)),
        ]
        await self._exited.wait()
        await asyncio.wait(readers, timeout=LAST_WORDS_SECONDS)
        for reader in readers:
            reader.cancel()
        # Its session is gone unless it left children of its own behind.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def _note(self, raw: bytes) -> None:
        note = json.loads(raw)
        if "progress" in note:
            self._display.progress(note.get("part", self.part.name), note["text"], note["progress"])
        elif "fail" in note:
            self._sentence = note["fail"]
        elif not self.served:
            self._display.ready(self.part.name)
            self._ready.set_result(note["ready"])

    def _line(self, raw: bytes) -> None:
        line = raw.decode(errors="replace").rstrip()
        self._display.line(line)
        self._last_line = line.strip() or self._last_line


async def _read_lines(descriptor: int, take: Callable[[bytes], None]) -> None:
    """Hand each line that comes through a pipe to `take`, until its end."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb")
    )
    rest = b""
    try:
        while chunk := await reader.read(CHUNK_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > LINE_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                take(line)
        if rest:
            take(rest)
    finally:
        transport.close()
