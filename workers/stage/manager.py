"""A stage's sockets to its manager, and what they say to each other beside plans and results."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from typing import TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from toka.config import Config
from toka.messages import Meet, Message, Peers, Plan, StageHello, Stop
from toka.sockets import open_socket, parse, prepare, send
from workers import endpoints

log = logging.getLogger(__name__)

LOST_SECONDS = 5.0
"""For a stage to end by itself after its manager has gone: it may have said Stop."""

M = TypeVar("M", bound=Message)


class Manager:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], config: Config, stage: int) -> None:
        """ValueError where a key file is bad."""
        self.stage = stage
        self._plans, self._results = open_socket(context, zmq.PULL), open_socket(context, zmq.PUSH)
        if config.rendezvous:
            # On one host the supervisor sees to it that a replica begins and ends as one.
            self._end_with(self._plans)
        for socket, endpoint in (
            (self._plans, endpoints.plans(config, stage)),
            (self._results, endpoints.results(config)),
        ):
            prepare(socket, endpoint, config.keys)
            socket.connect(endpoint)

    def _end_with(self, plans: zmq.Socket[bytes]) -> None:
        """End the process when the manager has gone: what this stage holds is nothing to the next one."""
        events = plans.get_monitor_socket(zmq.EVENT_DISCONNECTED)

        def watch() -> None:
            recv_monitor_message(events)
            time.sleep(LOST_SECONDS)
            log.error("the manager is gone")
            os._exit(1)

        threading.Thread(target=watch, daemon=True).start()

    def send(self, message: Message) -> None:
        send(self._results, message)

    def meet(self) -> str:
        """The token of this start of the replica; waits for the manager."""
        self.send(StageHello(stage=self.stage))
        return self._wait(Meet).token

    def peers(self) -> list[str]:
        """The inboxes of all stages, when they are ready."""
        return self._wait(Peers).inboxes

    def _wait(self, kind: type[M]) -> M:
        while not isinstance(message := parse(self._plans.recv_multipart()), kind):
            log.warning("message dropped: too early", extra={"message": type(message).__name__})
        return message

    def plans(self) -> Iterator[Plan]:
        """Plans as they come, until the manager says Stop."""
        while not isinstance(message := parse(self._plans.recv_multipart()), Stop):
            if isinstance(message, Plan):
                yield message
            elif message is not None:
                log.warning("message dropped: not for a stage", extra={"message": type(message).__name__})
