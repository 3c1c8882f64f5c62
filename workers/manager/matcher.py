"""The manager's socket to the matcher of its replica."""

from __future__ import annotations

import zmq

from toka import sockets
from toka.config import Config
from toka.messages import Compile, Constrain, GrammarFailed, Message, Stop
from workers import endpoints
from workers.manager.stages import StageLost


class Matcher:
    """Not waited for at a start: what is sent before it is there reaches it later. ValueError for a bad key file."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], config: Config) -> None:
        self.socket = sockets.open_socket(context, zmq.DEALER, endpoints.MANAGER)
        endpoint = endpoints.matcher(config)
        sockets.prepare(self.socket, endpoint, config.keys)
        self.socket.connect(endpoint)

    def send(self, message: Compile | Constrain | GrammarFailed | Stop) -> None:
        """StageLost where it takes nothing any more."""
        if not sockets.send(self.socket, message):
            raise StageLost("the matcher takes nothing any more")

    def arrived(self) -> list[Message]:
        """The messages that wait."""
        messages = []
        while (frames := sockets.receive(self.socket)) is not None:
            if (message := sockets.parse(frames)) is not None:
                messages.append(message)
        return messages

    def close(self) -> None:
        self.socket.close()
