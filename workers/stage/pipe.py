"""How the stages of a pipeline pass on what they compute: hidden states to the next, sampled ids back to the first.

Every stage executes the same plans in the same order, so what comes is what is due.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import zmq
from torch import Tensor

from toka.config import Config
from toka.messages import Activations, Int32, Message, Sampled
from toka.sockets import listen, open_socket, parse, prepare, send, unlink
from workers import endpoints
from workers.stage.partition import Seat


class Pipe(Protocol):
    def receive(self, step: int, tokens: int) -> Tensor:
        """The stage before's hidden states of a step: [tokens, hidden]; waits for them."""
        ...

    def send(self, step: int, x: Tensor) -> None: ...

    def sampled(self, step: int) -> list[tuple[Int32, Int32]]:
        """Slots and the ids sampled for them, of steps up to `step`, waited for, and of later ones that are here."""
        ...

    def send_sampled(self, step: int, slots: Int32, tokens: Int32) -> None: ...


class Dry:
    """Stands in while no other stage listens: blank hidden states come, nothing goes."""

    def __init__(self, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        self._hidden, self._dtype, self._device = hidden, dtype, device

    def receive(self, step: int, tokens: int) -> Tensor:
        return torch.zeros(tokens, self._hidden, dtype=self._dtype, device=self._device)

    def send(self, step: int, x: Tensor) -> None:
        pass

    def sampled(self, step: int) -> list[tuple[Int32, Int32]]:
        return []

    def send_sampled(self, step: int, slots: Int32, tokens: Int32) -> None:
        pass


class ZmqPipe:
    """Over ZeroMQ, through the host's memory: what CPUs have, and GPUs that NCCL does not join.

    A stage binds an inbox, and connects to that of its rank's next stage, the last one to that of the first.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        config: Config,
        seat: Seat,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """hidden, dtype: of what is passed on. ValueError where no inbox can be had."""
        self._seat, self._keys = seat, config.keys
        self._hidden, self._dtype, self._device = hidden, dtype, device
        self._inbox, self._next = open_socket(context, zmq.PULL), open_socket(context, zmq.PUSH)
        self.endpoint = listen(self._inbox, endpoints.inbox(config, seat.stage), config.keys)
        self._given = 0
        """The last step whose ids were given."""

    def connect(self, inboxes: Sequence[str]) -> None:
        """inboxes: of every stage of the replica."""
        endpoint = inboxes[(self._seat.stage + self._seat.ranks) % self._seat.stages]
        prepare(self._next, endpoint, self._keys)
        self._next.connect(endpoint)

    def receive(self, step: int, tokens: int) -> Tensor:
        message = self._wait()
        assert isinstance(message, Activations) and message.step == step, "another step's activations came"
        (frame,) = message.payload
        x = torch.frombuffer(bytearray(frame), dtype=self._dtype).view(tokens, self._hidden)
        return x.to(self._device)

    def send(self, step: int, x: Tensor) -> None:
        data = x.contiguous().view(torch.uint8).cpu().numpy().data
        self._pass_on(Activations(step=step, payload=[data]))

    def sampled(self, step: int) -> list[tuple[Int32, Int32]]:
        found = []
        while self._given < step or self._inbox.poll(0):
            message = self._wait()
            assert isinstance(message, Sampled)
            self._given = message.step
            found.append((message.slots, message.tokens))
        return found

    def send_sampled(self, step: int, slots: Int32, tokens: Int32) -> None:
        self._pass_on(Sampled(step=step, slots=slots, tokens=np.ascontiguousarray(tokens, np.int32)))

    def _pass_on(self, message: Message) -> None:
        if not send(self._next, message):
            raise RuntimeError("the next stage is gone")

    def _wait(self) -> Message:
        message = None
        while message is None:
            message = parse(self._inbox.recv_multipart())
        return message

    def close(self) -> None:
        self._inbox.close()
        self._next.close()
        unlink(self.endpoint)
