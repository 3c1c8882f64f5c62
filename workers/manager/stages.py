"""The manager's sockets to the stages of its replica."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

import zmq

from toka import sockets
from toka.config import Config
from toka.messages import (
    Meet,
    Message,
    Peers,
    Plan,
    StageHello,
    StageLoad,
    StageReady,
    StepResult,
    Stop,
    encode,
)
from workers import endpoints
from workers.agreement import difference

CONNECT_MS = 10_000
"""For a stage that has said hello to be connected to its socket for plans as well."""


class StageLost(RuntimeError):
    """The replica has to start over: a stage has lost its state."""


class Stages:
    """Binds where the stages connect: a socket for the plans of each of them, and one for the results of all.

    ValueError where an address cannot be bound, or a key file is bad.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], config: Config, settings: dict[str, str] | None = None
    ) -> None:
        """settings: what every stage has to have, too, where they are on several hosts."""
        count = config.pp_size * config.tp_size
        self.results = sockets.open_socket(context, zmq.PULL)
        self._plans = [sockets.open_socket(context, zmq.PUSH) for _ in range(count)]
        self._endpoints = [endpoints.results(config), *(endpoints.plans(config, stage) for stage in range(count))]
        for socket, endpoint in zip([self.results, *self._plans], self._endpoints):
            sockets.listen(socket, endpoint, config.keys)
        self._settings, self._token = settings or {}, secrets.token_hex(8)
        self._folder = Path(config.run_dir)
        self._forget_meetings()
        self.busy = [0.0] * count
        """Of each stage, the share of the last second or so that it computed."""

    def wait(self, timeout: float) -> list[StageReady]:
        """What every stage says of itself once it is ready.

        The stages of a pipeline are told of each other. TimeoutError, with those that are missing, after `timeout`
        seconds; ValueError where one cannot take part.
        """
        deadline = time.monotonic() + timeout
        ready: dict[int, StageReady] = {}
        while len(ready) < len(self._plans):
            left = deadline - time.monotonic()
            if left <= 0 or not self.results.poll(int(left * 1000)):
                missing = sorted(set(range(len(self._plans))) - ready.keys())
                raise TimeoutError(f"not ready within {timeout:g} s: stage {', '.join(map(str, missing))}")
            message = self.receive()
            if isinstance(message, StageHello):
                self._greet(message)
            elif isinstance(message, StageReady) and 0 <= message.stage < len(self._plans):
                ready[message.stage] = message
        found = [ready[number] for number in range(len(self._plans))]
        if any(stage.inbox for stage in found):
            self.send(Peers(inboxes=[stage.inbox for stage in found]))
        return found

    def _greet(self, hello: StageHello) -> None:
        other = difference(self._settings, hello.settings)
        refusal = f"stage {hello.stage}: its worker has {other}, as node_rank=0 has" if other else ""
        if 0 <= hello.stage < len(self._plans):
            socket = self._plans[hello.stage]
            # Without a peer yet, a PUSH socket would drop what it is given.
            if socket.poll(CONNECT_MS, zmq.POLLOUT):
                sockets.send(socket, Meet(token=self._token, refusal=refusal))
        if refusal:
            raise ValueError(refusal)

    def receive(self) -> Message | None:
        """The next message of a stage, or None where none waits."""
        frames = sockets.receive(self.results)
        return None if frames is None else sockets.parse(frames)

    def arrived(self) -> list[StepResult]:
        """Every result that waits, in the order of the plans. StageLost where a stage no longer knows them."""
        results = []
        while (message := self.receive()) is not None:
            if isinstance(message, StepResult):
                results.append(message)
            elif isinstance(message, StageLoad) and 0 <= message.stage < len(self.busy):
                self.busy[message.stage] = message.busy
            elif isinstance(message, StageHello):
                raise StageLost(f"stage {message.stage} has started over")
        return results

    def send(self, message: Plan | Peers | Stop) -> None:
        """The same message to every stage. StageLost where one has gone."""
        frames = encode(message)
        for stage, socket in enumerate(self._plans):
            if not sockets.send_frames(socket, frames):
                raise StageLost(f"stage {stage} is gone")

    def close(self) -> None:
        for socket, endpoint in zip([self.results, *self._plans], self._endpoints):
            socket.close()
            sockets.unlink(endpoint)
        self._forget_meetings()

    def _forget_meetings(self) -> None:
        """Remove the files of this start and of earlier ones, which may have been killed."""
        for path in self._folder.glob("meet-*"):
            path.unlink(missing_ok=True)
