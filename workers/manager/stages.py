"""The manager's sockets to the stages of its replica."""

from __future__ import annotations

import time
from pathlib import Path

import zmq

from toka import sockets
from toka.messages import Message, Plan, StageReady, StepResult, Stop, encode


class Stages:
    """Binds where the stages connect: `plans-N` for each of them and `results` for all, in `run_dir`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], run_dir: Path, count: int) -> None:
        self.results = sockets.open_socket(context, zmq.PULL)
        self._plans = [sockets.open_socket(context, zmq.PUSH) for _ in range(count)]
        self._endpoints = [f"ipc://{run_dir}/results", *(f"ipc://{run_dir}/plans-{n}" for n in range(count))]
        for socket, endpoint in zip([self.results, *self._plans], self._endpoints):
            socket.bind(endpoint)

    def wait(self, timeout: float) -> list[StageReady]:
        """What every stage says of itself once it is ready; TimeoutError after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        ready: dict[int, StageReady] = {}
        while len(ready) < len(self._plans):
            left = deadline - time.monotonic()
            if left <= 0 or not self.results.poll(int(left * 1000)):
                raise TimeoutError
            message = self.receive()
            if isinstance(message, StageReady):
                ready[message.stage] = message
        return list(ready.values())

    def receive(self) -> Message | None:
        """The next message of a stage, or None where none waits."""
        frames = sockets.receive(self.results)
        return None if frames is None else sockets.parse(frames)

    def arrived(self) -> list[StepResult]:
        """Every result that waits, in the order of the plans."""
        results = []
        while (message := self.receive()) is not None:
            if isinstance(message, StepResult):
                results.append(message)
        return results

    def send(self, message: Plan | Stop) -> None:
        """The same message to every stage."""
        frames = encode(message)
        for socket in self._plans:
            sent = sockets.send_frames(socket, frames)
            assert sent, "a stage has thousands of plans unread"

    def close(self) -> None:
        for socket, endpoint in zip([self.results, *self._plans], self._endpoints):
            socket.close()
            sockets.unlink(endpoint)
