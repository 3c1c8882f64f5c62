"""Log-probabilities of a prompt's ids, as they come from the engine."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class ScoreRow(NamedTuple):
    """Of a run of ids, the first at `first`; 0 is the prompt's second id, the first that has one."""

    request: bytes
    first: int
    chosen: NDArray[np.float32]
    """[ids]."""
    top_ids: NDArray[np.int32]
    """[ids, likely]."""
    top_values: NDArray[np.float32]


class PromptScores:
    """The columns are those of ScoreRow, of all ids of the prompt but its first. `have`: so many have come."""

    def __init__(self, ids: int, likely: int) -> None:
        self.likely = likely
        self.have = 0
        self.chosen = np.empty(ids, np.float32)
        self.top_ids = np.empty((ids, likely), np.int32)
        self.top_values = np.empty((ids, likely), np.float32)

    @property
    def complete(self) -> bool:
        return self.have == len(self.chosen)

    def fits(self, row: ScoreRow) -> bool:
        """Whether a row can be of this prompt."""
        return row.top_ids.shape[1] == self.likely and row.first + len(row.chosen) <= len(self.chosen)

    def take(self, row: ScoreRow) -> None:
        """What is new of a row that fits and leaves no gap."""
        assert row.first <= self.have
        new, end = slice(self.have - row.first, None), row.first + len(row.chosen)
        if end > self.have:
            place = slice(self.have, end)
            self.chosen[place] = row.chosen[new]
            self.top_ids[place], self.top_values[place] = row.top_ids[new], row.top_values[new]
            self.have = end
