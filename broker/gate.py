"""Who is admitted over tcp: the broker's answer to clients that show a key, and a word about those that have none."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import zmq

from toka.keys import ZAP_ENDPOINT, Whitelist
from toka.sockets import Handshakes, Port, Seldom, open_socket

WATCH_SECONDS = 0.25
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


class Gate:
    """Make it before the sockets of `context` that have keys are bound. `run` must be running.

    Raises ValueError where a key file cannot be read.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: str) -> None:
        self._context = context
        self._whitelist = Whitelist(keys)
        self._port = Port(open_socket(context, zmq.REP))
        self._port.socket.bind(ZAP_ENDPOINT)
        self._handshakes: list[Handshakes] = []
        self._not_admitted = Seldom("a client was refused: its key is not in the clients folder")
        self._failed = Seldom("a handshake failed: the peer has no key, or not this broker's server.key")

    def watch(self, sockets: Sequence[zmq.Socket[bytes]]) -> None:
        """Log what fails at these before a key was shown."""
        self._handshakes += [Handshakes(self._context, socket, _FAILED) for socket in sockets]

    async def run(self) -> None:
        """Serve until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._answer())
            tasks.create_task(self._watch())

    def close(self) -> None:
        for each in self._handshakes:
            each.close()
        self._port.socket.close()

    async def _answer(self) -> None:
        async for request in self._port.messages():
            answer, refused = self._whitelist.answer(request)
            self._port.send_frames(answer)
            if refused:
                self._not_admitted.warn(key=refused.decode(), address=request[3].decode())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            for _ in [event for each in self._handshakes for event in each.failed()]:
                self._failed.warn()
