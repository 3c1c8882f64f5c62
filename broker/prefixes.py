"""Which pages of prompts a replica has cached, as far as the broker knows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class Prefixes(OrderedDict[bytes, None]):
    """At most `most` page keys: those that the replica told of, and those of prompts that are on their way to it.

    Beyond that the ones that were longest not asked for are forgotten, as a replica gives its own pages away. They
    stand in that order, and of a prompt the last page before the first: a page is there only with those before it.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def add(self, keys: Sequence[bytes]) -> None:
        """The replica has these pages, or will have before another prompt gets there; parents before children."""
        for key in reversed(keys):
            self[key] = None
            self.move_to_end(key)
        while len(self) > self._most:
            self.popitem(last=False)

    def remove(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.pop(key, None)

    def match(self, keys: Sequence[bytes]) -> int:
        """How many of a prompt's first pages are there."""
        if not keys or keys[0] not in self:
            return 0
        low, high = 1, len(keys)
        while low < high:
            middle = (low + high + 1) // 2
            if keys[middle - 1] in self:
                low = middle
            else:
                high = middle - 1
        return low
