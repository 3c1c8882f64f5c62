"""A real frontend process in front of an EnginePeer."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]


class FrontendProcess:
    """`python -P -m frontend` on a free port; `settings` are key=value arguments."""

    def __init__(self, broker: str, *settings: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-P", "-m", "frontend", f"broker={broker}", "port=0", *settings]
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self.url = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> FrontendProcess:
        if not self._ready.wait(30) or not self.url:
            self.process.kill()
            raise AssertionError("the frontend did not start: " + "".join(self.lines))
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join(5)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def wait_until_serving(self, seconds: float = 10.0) -> None:
        end = time.monotonic() + seconds
        while httpx.get(f"{self.url}/ready").status_code != 200:
            assert time.monotonic() < end, "the frontend does not serve"
            time.sleep(0.02)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.search(r" ready at=(\S+)", line):
                self.url = found[1]
                self._ready.set()
        self._ready.set()
