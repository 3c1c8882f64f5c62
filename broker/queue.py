"""Shards that wait for a replica: first in, first out within a priority, bounded in number and bytes."""

from __future__ import annotations

import math
from bisect import insort
from collections import OrderedDict

from broker.registry import Key, Shard

RATE_SECONDS = 5.0
"""Time constant of the smoothed rate at which shards leave."""
RETRY_SHARE = 0.1
"""A refused client comes back when this share of the queue has left: there is room then, and still work."""
RETRY_MOST = 60
"""Seconds."""
RETRY_UNKNOWN = 5
"""Seconds, while nothing has left yet that a rate could be told from."""


class WaitingQueue:
    def __init__(self, most: int, most_bytes: int) -> None:
        self.bytes = 0
        self._most, self._most_bytes = most, most_bytes
        self._levels: dict[int, OrderedDict[Key, Shard]] = {}
        self._priorities: list[int] = []
        self._count = self._left = 0
        self._rate = 0.0

    def __len__(self) -> int:
        return self._count

    def fits(self, shard: Shard) -> bool:
        return self._count < self._most and self.bytes + size(shard) <= self._most_bytes

    def put(self, shard: Shard) -> None:
        level = self._levels.get(shard.priority)
        if level is None:
            level = self._levels[shard.priority] = OrderedDict()
            insort(self._priorities, shard.priority)
        level[shard.key] = shard
        self._count += 1
        self.bytes += size(shard)

    def first(self) -> Shard | None:
        """The shard whose turn it is."""
        return next(iter(self._levels[self._priorities[0]].values())) if self._priorities else None

    def remove(self, shard: Shard) -> None:
        level = self._levels[shard.priority]
        del level[shard.key]
        if not level:
            del self._levels[shard.priority]
            self._priorities.remove(shard.priority)
        self._count -= 1
        self._left += 1
        self.bytes -= size(shard)

    def measure(self, seconds: float) -> None:
        """Count what left in the `seconds` since the last call towards the rate."""
        weight = 1.0 - math.exp(-seconds / RATE_SECONDS)
        self._rate += weight * (self._left / seconds - self._rate)
        self._left = 0

    def retry_after(self) -> int:
        """Whole seconds after which a refused client may hope for a place, at the present rate."""
        wait = RETRY_SHARE * self._count / self._rate if self._rate > 0 else RETRY_UNKNOWN
        return max(1, min(RETRY_MOST, math.ceil(wait)))


def size(shard: Shard) -> int:
    """The bytes a waiting shard takes, its payload included."""
    return len(shard.page_hashes) + sum(len(frame) for frame in shard.frames)
