"""Which token ids end which sequence, looked up for a whole step at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from toka.messages import Int32


class StopSets:
    """Sets of stop ids, each stored once however many requests use it, and numbered."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._number: dict[frozenset[int], int] = {}
        self._sets: dict[int, frozenset[int]] = {}
        self._users: dict[int, int] = {}
        self._next = 0
        self._keys: NDArray[np.int64] = np.empty(0, np.int64)

    def intern(self, ids: frozenset[int]) -> int:
        """The number of the set `ids`; give it back with `release`."""
        number = self._number.get(ids)
        if number is None:
            number = self._next
            self._next += 1
            self._number[ids] = number
            self._sets[number] = ids
            self._users[number] = 0
            added = np.array(sorted(ids), np.int64) + number * self._vocab_size
            self._keys = np.concatenate([self._keys, added])  # numbers only grow, so it stays sorted
        self._users[number] += 1
        return number

    def release(self, number: int) -> None:
        self._users[number] -= 1
        if self._users[number] == 0:
            del self._users[number], self._number[self._sets.pop(number)]
            low, high = np.searchsorted(self._keys, [number * self._vocab_size, (number + 1) * self._vocab_size])
            self._keys = np.delete(self._keys, slice(low, high))

    def contain(self, numbers: Int32, tokens: Int32) -> NDArray[np.bool_]:
        """For each token, whether it is in the set of that number. Both [n]."""
        if not len(self._keys):
            return np.zeros(len(tokens), np.bool_)
        wanted = numbers.astype(np.int64) * self._vocab_size + tokens
        at = np.minimum(np.searchsorted(self._keys, wanted), len(self._keys) - 1)
        found: NDArray[np.bool_] = self._keys[at] == wanted
        return found
