"""Which replica a shard goes to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from broker.registry import Replica, Shard

SEQUENCE_TOKENS = 64
"""Cached tokens of a prompt for which a replica may have one sequence more than another. A sequence costs more to run,
but about as much on either: only the difference counts that the longer step makes."""
WORTH_MOST = 1 / 8
"""What a cached prefix may be worth at most, as a share of the credits: by so much may loads differ for its sake."""


OVERDRAFT = 2
"""An urgent shard goes to a replica that has less than so many times its credits."""


def choose(shard: Shard, replicas: Collection[Replica]) -> Replica | None:
    """Where the shard goes; None if it has to wait.

    Where no replica has credits left, less urgent sequences do not count: managers preempt them.
    """
    found = _least_loaded(shard, replicas, lambda replica: replica.used)
    if found is None:
        within = [each for each in replicas if each.used < OVERDRAFT * each.credits]
        found = _least_loaded(shard, within, lambda replica: replica.as_urgent(shard.priority))
    return found


def _least_loaded(shard: Shard, replicas: Iterable[Replica], used_of: Callable[[Replica], int]) -> Replica | None:
    """The replica with the least load for its credits, of those that have enough.

    One that would run the shard at once goes before one where it would queue. Among these, the pages of the prompt
    that a replica has cached make its load count for less. A shard of more sequences than any replica's credits goes
    to one that is empty, or it would never run.
    """
    keys, sequences = shard.keys(), shard.sequences
    best: Replica | None = None
    least, queues = float("inf"), True
    for replica in replicas:
        used, credits = used_of(replica), replica.credits
        if credits <= used or not replica.reachable or (credits < used + sequences and used):
            continue
        waits = used > 0 and 2 * (used + sequences) > credits  # beyond `slots`
        if waits > queues:
            continue
        load = used / credits
        if waits == queues and load >= least and not _may_be_less(replica, keys, load - least):
            continue
        if keys:
            load -= min(replica.prefixes.match(keys) / _pages_of_credits(replica), WORTH_MOST)
        if waits < queues or load < least:
            best, least, queues = replica, load, waits
    return best


def _may_be_less(replica: Replica, keys: list[bytes], load: float) -> bool:
    """Whether cached pages of the prompt may be worth more than `load`: the last page they would need is there."""
    if not keys or load >= WORTH_MOST:
        return False
    needed = int(load * _pages_of_credits(replica))
    return needed < len(keys) and keys[needed] in replica.prefixes


def _pages_of_credits(replica: Replica) -> float:
    """Cached pages that are worth as much as all of the replica's credits."""
    return replica.credits * SEQUENCE_TOKENS / replica.card.page_size
