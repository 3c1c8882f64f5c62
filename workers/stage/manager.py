"""A stage's sockets to its manager, and what they say to each other beside plans and results."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from typing import TypeVar

import zmq

from toka.config import Config
from toka.messages import Meet, Message, Peers, Plan, StageHello, Stop
from toka.sockets import open_socket, parse, prepare, send
from workers import endpoints

log = logging.getLogger(__name__)

LOST_SECONDS = 5.0
"""For a stage to end by itself after its manager has gone: it may have said Stop."""
HELLO_MS = 2000
"""Between hellos: the manager that one went to may have ended before it answered."""
POLL_MS = 200

M = TypeVar("M", bound=Message)


class Manager:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], config: Config, stage: int) -> None:
        """ValueError where a key file is bad."""
        self.stage, self._config = stage, config
        self._plans, self._results = open_socket(context, zmq.PULL), open_socket(context, zmq.PUSH)
        self._ended, self._watch = threading.Event(), threading.Thread()
        for socket, endpoint in (
            (self._plans, endpoints.plans(config, stage)),
            (self._results, endpoints.results(config)),
        ):
            prepare(socket, endpoint, config.keys)
            socket.connect(endpoint)

    def meet(self, settings: dict[str, str]) -> str:
        """The token of this start of the replica; waits for the manager. ValueError where it refuses this stage.

        settings: what the two must have in common, where they are on several hosts. From now on this process ends
        when such a manager has gone: what a stage holds is nothing to the next one. On one host the supervisor sees
        to that.
        """
        while True:
            self.send(StageHello(stage=self.stage, settings=settings))
            if self._plans.poll(HELLO_MS):
                break
        if self._config.rendezvous:
            events = self._plans.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._watch = threading.Thread(target=self._end_with, args=(events,), daemon=True)
            self._watch.start()
        answer = self._wait(Meet)
        if answer.refusal:
            raise ValueError(answer.refusal)
        return answer.token

    def _end_with(self, events: zmq.Socket[bytes]) -> None:
        """End the process when the manager has gone."""
        while not self._ended.is_set():
            if events.poll(POLL_MS):
                if not self._ended.wait(LOST_SECONDS):
                    log.error("the manager is gone")
                    os._exit(1)
                break

    def close(self) -> None:
        self._ended.set()
        if self._watch.ident is not None:
            self._watch.join()
            self._plans.disable_monitor()
        self._plans.close()
        self._results.close()

    def send(self, message: Message) -> None:
        send(self._results, message)

    def peers(self) -> list[str]:
        """The inboxes of all stages, when they are ready."""
        return self._wait(Peers).inboxes

    def _wait(self, kind: type[M]) -> M:
        while not isinstance(message := parse(self._plans.recv_multipart()), kind):
            if not isinstance(message, Meet):
                log.warning("message dropped: too early", extra={"message": type(message).__name__})
        return message

    def plans(self) -> Iterator[Plan]:
        """Plans as they come, until the manager says Stop."""
        while not isinstance(message := parse(self._plans.recv_multipart()), Stop):
            if isinstance(message, Plan):
                yield message
            elif message is not None:
                log.warning("message dropped: not for a stage", extra={"message": type(message).__name__})
