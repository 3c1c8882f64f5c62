"""The ranks of tensor parallelism that share a stage's layers, on GPUs of one host.

Every rank launches the same kernels in the same order, within CUDA graphs too.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from workers.stage.collective import meeting_store
from workers.stage.layers import Linear, PlainLinear

TIMEOUT = timedelta(seconds=600)
"""For the stages of a replica to find each other, which may still be loading weights, and for one message."""


class Ranks(Protocol):
    rank: int
    ranks: int

    def product(self, linear: Linear, x: Tensor) -> Tensor:
        """linear(x): [tokens, hidden], summed over the ranks; holds until the next product."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """[ranks, ...]: every rank's x."""
        ...


class Alone:
    """One rank."""

    rank, ranks = 0, 1

    def product(self, linear: Linear, x: Tensor) -> Tensor:
        return linear(x)

    def gather(self, x: Tensor) -> Tensor:
        return x[None]


ALONE = Alone()


class Group:
    """Products are written where all ranks can read them, and summed by each rank for a part of the numbers, which it
    writes to all (a two-shot all-reduce)."""

    def __init__(self, group: dist.ProcessGroup, tokens: int, hidden: int, dtype: torch.dtype) -> None:
        """tokens: most of a product."""
        # Not at the top: it takes its time, and most stages are alone.
        import torch.distributed._symmetric_memory as symmetric

        self.rank, self.ranks = group.rank(), group.size()
        self._group = group
        self._sum = symmetric.empty(
            tokens, hidden, dtype=dtype, device=torch.device("cuda", torch.cuda.current_device())
        )
        symmetric.rendezvous(self._sum, group)

    def product(self, linear: Linear, x: Tensor) -> Tensor:
        assert isinstance(linear, PlainLinear)
        out = self._sum[: len(x)]
        if linear.bias is None:
            torch.mm(x, linear.weight.t(), out=out)
        else:
            torch.addmm(linear.bias, x, linear.weight.t(), out=out)
        if out.dtype == torch.float16:
            # Which the other does not know.
            dist.all_reduce(out, group=self._group)
            return out
        summed: Tensor = torch.ops.symm_mem.two_shot_all_reduce_(out, "sum", self._group.group_name)
        return summed

    def gather(self, x: Tensor) -> Tensor:
        return gathered(self._group, x)


def gathered(group: dist.ProcessGroup, x: Tensor) -> Tensor:
    out = x.new_empty(group.size(), *x.shape)
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def meet(address: str, stage: int, stages: int) -> None:
    """Find the other stages of the replica; once in a process. All do it at the same time."""
    device = torch.device("cuda", torch.cuda.current_device())
    store = meeting_store(address, stage, stages, TIMEOUT.total_seconds())
    dist.init_process_group("nccl", store=store, rank=stage, world_size=stages, timeout=TIMEOUT, device_id=device)


def neighbours(stage: int, stages: int, ranks: int) -> dist.ProcessGroup | None:
    """The ranks of stage number `stage`, itself among them; None where it is alone. All stages call it."""
    if ranks == 1:
        return None
    groups = [dist.new_group(list(range(first, first + ranks)), timeout=TIMEOUT) for first in range(0, stages, ranks)]
    mine: dist.ProcessGroup = groups[stage // ranks]
    return mine
