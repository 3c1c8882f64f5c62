"""Log-probabilities of prompts: what is planned and what has come, once for all samples of a shard."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from toka.messages import Int32


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Of ids of a prompt that follow one another. `first`: the first one's place, 0 being the prompt's second id.

    chosen: [ids]; top_ids, top_values: as many for each id as the request asks for.
    """

    first: int
    chosen: NDArray[np.float32]
    top_ids: Int32
    top_values: NDArray[np.float32]

    def since(self, place: int) -> Run:
        """Without what stands before `place`."""
        skip = min(max(0, place - self.first), len(self.chosen))
        likely = len(self.top_ids) // max(1, len(self.chosen))
        rest = self.top_ids[skip * likely :], self.top_values[skip * likely :]
        return Run(self.first + skip, self.chosen[skip:], *rest)


class PromptScores:
    """Of a prompt of `tokens` tokens. A token gives that of the id behind it, so the last one gives none."""

    def __init__(self, tokens: int, likely: int) -> None:
        """likely: how many of the most likely ids are named with each."""
        self.likely = likely
        self.planned = 0
        """Tokens that are scored by plans which were sent: what is in the KV cache of these is of use again."""
        self._tokens = tokens
        self._arrived = 0
        self._runs: list[Run] = []

    @property
    def all_planned(self) -> bool:
        return self.planned == self._tokens

    @property
    def complete(self) -> bool:
        return self._arrived == self._tokens

    def take(self, tokens: int, run: Run) -> Run:
        """Keep what a step found behind the prompt's first `tokens` tokens; the part of it that is new."""
        new = run.since(sum(len(each.chosen) for each in self._runs))
        # Copies: what they are of holds a whole step's.
        self._runs.append(Run(new.first, new.chosen.copy(), new.top_ids.copy(), new.top_values.copy()))
        self._arrived = max(self._arrived, tokens)
        return new

    def since(self, place: int) -> Run:
        """All that has come, from `place` on."""
        columns = [(each.chosen, each.top_ids, each.top_values) for each in self._runs]
        return Run(0, *(np.concatenate(column) for column in zip(*columns))).since(place) if columns else _NOTHING


_NOTHING = Run(0, np.empty(0, np.float32), np.empty(0, np.int32), np.empty(0, np.float32))
