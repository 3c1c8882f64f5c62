"""Toka as real processes: started with settings, waited for, ended, and checked to have left nothing behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 90.0
END_SECONDS = 45.0
POLL_SECONDS = 0.02


def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait until `condition` holds; AssertionError naming `what` where it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(POLL_SECONDS)


def free_port() -> int:
    """A port whose successor is free as well."""
    for _ in range(100):
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port
    raise AssertionError("no free ports")


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without Toka's settings, and with the checkout first on PYTHONPATH."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("TOKA_")}
    return {**kept, "PYTHONPATH": str(ROOT), **(extra or {})}


class Running:
    """A `python -m module key=value ...` whose output is read along."""

    def __init__(
        self, module: str, settings: Mapping[str, object], cwd: Path = ROOT, env: Mapping[str, str] | None = None
    ) -> None:
        self.module = module
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *(f"{key}={value}" for key, value in settings.items())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=cwd,
            env=environment(env),
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._seen: dict[int, psutil.Process] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, pattern: str, seconds: float = START_SECONDS, after: int = 0) -> re.Match[str]:
        """The first match of `pattern` in a line of output from line `after` on."""
        found: list[re.Match[str]] = []

        def look() -> bool:
            found.extend(filter(None, (re.search(pattern, line) for line in self.lines[after:])))
            assert found or self.process.poll() is None, f"{self.module} ended before {pattern!r}:\n{self.output}"
            return bool(found)

        until(look, seconds, f"{pattern!r} in the output of {self.module}:\n{self.output}")
        return found[0]

    def parts(self) -> dict[str, psutil.Process]:
        """The processes it has started and that run, by what `ps` calls them ("toka: broker")."""
        parts: dict[str, psutil.Process] = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self._seen[child.pid] = child
                with contextlib.suppress(psutil.NoSuchProcess):
                    parts[" ".join(child.cmdline()).strip()] = child
        return parts

    def part(self, title: str, seconds: float = START_SECONDS) -> psutil.Process:
        """The child that `ps` shows as `title`, once it is there."""
        until(lambda: title in self.parts(), seconds, f"a process named {title!r}")
        return self.parts()[title]

    def wait(self, seconds: float = END_SECONDS) -> int:
        """The exit status, once it has ended."""
        status = self.process.wait(seconds)
        self._reader.join(5.0)
        return status

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the end; the exit status."""
        self.parts()
        self.process.send_signal(number)
        return self.wait()

    def kill(self) -> None:
        """`kill -9`, and wait until what it has started has ended as well."""
        self.parts()
        self.process.kill()
        self.wait()
        until(lambda: not self.left(), 10, f"the parts of {self.module} ended with it")

    def left(self) -> list[str]:
        """What it has started and that still runs though it ended."""
        return [title for each in self._seen.values() if (title := _title(each))]

    def end(self) -> None:
        """Kill whatever is left."""
        self.parts()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for each in self._seen.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


def _title(process: psutil.Process) -> str:
    """What `ps` calls a process that runs; empty where it has ended, reaped or not."""
    try:
        return " ".join(process.cmdline()) if process.is_running() else ""
    except psutil.NoSuchProcess:
        return ""


def gone(processes: Iterable[psutil.Process], seconds: float = 10.0) -> None:
    """Wait until these have ended, whether or not whoever has them now has noticed."""
    until(lambda: not any(map(_title, processes)), seconds, "processes have ended")


@contextlib.contextmanager
def running(
    module: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None, **settings: object
) -> Iterator[Running]:
    """A part (or `toka`) as a process, killed at the end if it still runs."""
    process = Running(module, settings, cwd, env)
    try:
        yield process
    finally:
        process.end()


class Server(Running):
    """All of Toka."""

    url: str


@contextlib.contextmanager
def serve(*, cwd: Path = ROOT, env: Mapping[str, str] | None = None, **settings: object) -> Iterator[Server]:
    """All of Toka on a free port, ready. At the end it has to drain, exit with 0 and leave no process behind."""
    server = Server("toka", {"port": 0, **settings}, cwd, env)
    try:
        server.url = server.wait_for(r"curl .*(http://[^/]+:\d+)/v1")[1]
        server.parts()
        yield server
        if server.process.poll() is None:
            assert server.stop() == 0, server.output
        assert not server.left(), server.output
    finally:
        server.end()
