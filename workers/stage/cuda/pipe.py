"""Hidden states and sampled ids between the GPUs of a pipeline, by NCCL.

What is received is posted before the compute that needs it, on a stream of its own; a communicator for each pair and
direction, since what is posted on one is done in order: a receive of ids would hold up the hidden states behind it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from workers.stage.cuda.ranks import TIMEOUT
from workers.stage.partition import Seat

TURNS = 2
"""Steps whose hidden states have memory of their own on either side: one is sent while the next is computed."""


@dataclass(frozen=True, slots=True)
class Coming:
    """A tensor that is on its way, and the event that says when its memory may be used again."""

    tensor: Tensor
    arrived: torch.cuda.Event
    taken: torch.cuda.Event

    def put(self, into: Tensor) -> None:
        """Copy it, for what the current stream does from now on."""
        stream = torch.cuda.current_stream()
        stream.wait_event(self.arrived)
        into.copy_(self.tensor)
        self.taken.record()
        self.tensor.record_stream(stream)


@dataclass(slots=True)
class _Ring:
    """Memory for hidden states, and when each turn's is free."""

    memory: list[Tensor]
    free: list[torch.cuda.Event] = field(default_factory=list)
    turn: int = 0

    def __post_init__(self) -> None:
        self.free = [torch.cuda.Event() for _ in self.memory]  # type: ignore[no-untyped-call]

    def next(self, tokens: int) -> tuple[Tensor, torch.cuda.Event]:
        self.turn = (self.turn + 1) % len(self.memory)
        return self.memory[self.turn][:tokens], self.free[self.turn]


class NcclPipe:
    """The links of one stage: from the stage before it, and to the one behind it; the last one's is the first."""

    def __init__(self, seat: Seat, tokens: int, hidden: int, dtype: torch.dtype) -> None:
        """Of stages that have met; all make theirs at a time. tokens: most of a step; dtype: of hidden states."""
        device = torch.device("cuda", torch.cuda.current_device())
        stage, stages, ranks = seat.stage, seat.stages, seat.ranks
        groups = [dist.new_group([each, (each + ranks) % stages], timeout=TIMEOUT) for each in range(stages)]
        self._from, self._to = (stage - ranks) % stages, (stage + ranks) % stages
        self._in, self._out = groups[self._from], groups[stage]
        self._device = device
        self._receiving, self._sending = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
        self._incoming, self._outgoing = (
            _Ring([torch.empty(tokens, hidden, dtype=dtype, device=device) for _ in range(TURNS)]) for _ in range(2)
        )
        self._meet(first=stage < ranks)

    def _meet(self, first: bool) -> None:
        """Pass a number round, so that no communicator has to be made within a step."""
        word = torch.zeros(1, dtype=torch.int64, device=self._device)
        if first:
            self.send_ids(word)
            self.receive_ids(1).put(word)
        else:
            self.receive_ids(1).put(word)
            self.send_ids(word)
        torch.cuda.synchronize()

    def receive(self, tokens: int) -> Coming:
        """The next hidden states that the stage before this one sends: [tokens, hidden]."""
        tensor, free = self._incoming.next(tokens)
        self._receiving.wait_event(free)
        return self._receive(tensor, free)

    def receive_ids(self, count: int) -> Coming:
        """The next ids that the last stage sends: [count] int64."""
        with torch.cuda.stream(self._receiving):
            ids = torch.empty(count, dtype=torch.int64, device=self._device)
        return self._receive(ids, torch.cuda.Event())  # type: ignore[no-untyped-call]

    def _receive(self, tensor: Tensor, taken: torch.cuda.Event) -> Coming:
        with torch.cuda.stream(self._receiving):
            work = dist.irecv(tensor, self._from, group=self._in)
            assert work is not None
            work.wait()
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        return Coming(tensor, arrived, taken)

    def send(self, x: Tensor) -> None:
        """Send hidden states that the current stream has made: [tokens, hidden]."""
        tensor, free = self._outgoing.next(len(x))
        torch.cuda.current_stream().wait_event(free)
        tensor.copy_(x)
        self._send(tensor)
        free.record(self._sending)

    def send_ids(self, ids: Tensor) -> None:
        """ids: [count] int64, of the current stream, which nobody may write to any more."""
        ids.record_stream(self._sending)
        self._send(ids)

    def _send(self, tensor: Tensor) -> None:
        self._sending.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._sending):
            work = dist.isend(tensor, self._to, group=self._out)
            assert work is not None
            work.wait()
