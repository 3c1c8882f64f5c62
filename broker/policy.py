"""Which replica a shard goes to."""

from __future__ import annotations

from collections.abc import Iterable

from broker.registry import Replica, Shard


def choose(shard: Shard, replicas: Iterable[Replica]) -> Replica | None:
    """The replica with the most free credits of those that have enough; None if the shard has to wait.

    A shard of more sequences than any replica's credits goes to one that is empty, or it would never run.
    """
    best: Replica | None = None
    most = 0
    for replica in replicas:
        free = replica.credits - replica.used
        enough = free >= shard.sequences or replica.used == 0
        if free > most and enough and replica.reachable:
            best, most = replica, free
    return best
