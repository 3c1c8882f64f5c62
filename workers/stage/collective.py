"""What the ranks of tensor parallelism tell each other: sums, and tensors of all side by side."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, Store
from torch.distributed.rendezvous import rendezvous

from workers.stage.partition import Partition

START, ANSWER = 600.0, 120.0
"""Seconds that `join` waits for the other ranks, which may be loading weights, and that each call waits for them."""


class Collective(Protocol):
    """Every rank makes the same calls in the same order, with tensors of the same shapes.

    RuntimeError where another rank is gone, or does not make the call in time.
    """

    @property
    def ranks(self) -> int: ...

    def sum(self, x: Tensor) -> Tensor:
        """x, which holds the sum over all ranks afterwards, the same bits on each. x: contiguous."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """[ranks, ...]: every rank's x."""
        ...


class Alone:
    """One rank."""

    ranks = 1

    def sum(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> Tensor:
        return x[None]


class Group:
    """The ranks of a process group of torch.distributed."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.ranks = group.size()

    def sum(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self._group)
        return x

    def gather(self, x: Tensor) -> Tensor:
        out = x.new_empty(self.ranks, *x.shape)
        dist.all_gather(list(out), x.contiguous(), group=self._group)
        return out


ALONE = Alone()


def meeting_store(address: str, rank: int, ranks: int, seconds: float) -> Store:
    """Where processes of torch.distributed find each other; waits so many seconds for it."""
    if address.startswith("file://"):
        # As a URL, a path with # or ? in it would be another one.
        return FileStore(address.removeprefix("file://"), ranks)
    store: Store = next(iter(rendezvous(address, rank, ranks, timeout=timedelta(seconds=seconds))))[0]
    return store


def join(part: Partition, address: str, backend: str, *, start: float = START, answer: float = ANSWER) -> Collective:
    """Meet the other ranks of `part`: once in a process, when it can take part in calls.

    address: file:///path on the one host, which did not exist before, or tcp://host:port, where rank 0 listens.
    backend: gloo or nccl.
    RuntimeError where not all are there after `start` seconds; `answer`: seconds after which a call gives up.
    """
    if part.ranks == 1:
        return ALONE
    if address.startswith("file:"):
        # gloo listens where the host's name points to otherwise, open to all who reach that.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = meeting_store(address, part.rank, part.ranks, start)
    store.set(f"rank {part.rank}", "is here")
    store.wait([f"rank {rank}" for rank in range(part.ranks)], timedelta(seconds=start))
    # All are here: from now on nobody has cause to be slow.
    timeout = timedelta(seconds=answer)
    store.set_timeout(timeout)
    dist.init_process_group(backend, store=store, rank=part.rank, world_size=part.ranks, timeout=timeout)
    group = dist.group.WORLD
    assert group is not None
    return Group(group)
