"""Activations and sampled ids between the GPUs of a pipeline, by NCCL.

What is received is posted before the compute that needs it, on a stream of its own; a communicator for each pair and
direction, since what is posted on one is done in order: a receive of ids would hold up the activations behind it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from workers.stage.cuda.ranks import TIMEOUT


@dataclass(frozen=True, slots=True)
class Coming:
    """A tensor that is on its way."""

    tensor: Tensor
    arrived: torch.cuda.Event

    def get(self) -> Tensor:
        """The tensor, for what the current stream does from now on."""
        stream = torch.cuda.current_stream()
        stream.wait_event(self.arrived)
        self.tensor.record_stream(stream)
        return self.tensor


class NcclPipe:
    """The links of one stage: from the stage before it, and to the one behind it; the last one's is the first."""

    def __init__(self, stage: int, stages: int, ranks: int) -> None:
        """Of stage number `stage` of `stages`, which have met; ranks: of tensor parallelism. All make one at a time."""
        device = torch.device("cuda", torch.cuda.current_device())
        groups = [dist.new_group([each, (each + ranks) % stages], timeout=TIMEOUT) for each in range(stages)]
        self._from, self._to = (stage - ranks) % stages, (stage + ranks) % stages
        self._in, self._out = groups[self._from], groups[stage]
        self._device = device
        self._receiving, self._sending = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
        self._meet(first=stage < ranks)

    def _meet(self, first: bool) -> None:
        """Pass a number round, so that no communicator has to be made within a step."""
        word = torch.zeros(1, device=self._device)
        if first:
            self.send(word)
            self.receive(1, dtype=word.dtype)
        else:
            self.send(self.receive(1, dtype=word.dtype).get())
        torch.cuda.synchronize()

    def receive(self, *shape: int, dtype: torch.dtype) -> Coming:
        """The next tensor that the stage before this one sends."""
        with torch.cuda.stream(self._receiving):
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
            work = dist.irecv(tensor, self._from, group=self._in)
            assert work is not None
            work.wait()
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        return Coming(tensor, arrived)

    def send(self, tensor: Tensor) -> None:
        """Send `tensor`, which nobody may write to any more, when the current stream has made it."""
        self._sending.wait_stream(torch.cuda.current_stream())
        tensor.record_stream(self._sending)
        with torch.cuda.stream(self._sending):
            work = dist.isend(tensor, self._to, group=self._out)
            assert work is not None
            work.wait()
