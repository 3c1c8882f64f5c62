"""What attention has to know of a step: which sequences its tokens belong to, and what they share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from toka.messages import Plan

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Group:
    """Rows whose sequences start with the same whole pages, attention over which is computed once for all."""

    pages: Ints
    rows: Ints


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one step; a row is one sequence's tokens. A row is in one group at most."""

    slots: Ints
    starts: Ints
    """Position of each row's first token; everything before it is in the cache."""
    counts: Ints
    groups: tuple[Group, ...] = ()

    @property
    def offsets(self) -> Ints:
        """[rows + 1]: where each row's tokens begin among all of the step."""
        return np.concatenate([[0], np.cumsum(self.counts)])

    @property
    def positions(self) -> Ints:
        """[tokens]: each token's position in its sequence."""
        first = np.repeat(self.starts - self.offsets[:-1], self.counts)
        return first + np.arange(len(first))


def from_plan(plan: Plan) -> Batch:
    pages = np.split(plan.group_pages.astype(np.int64), np.cumsum(plan.group_page_counts)[:-1])
    rows = np.split(plan.group_rows.astype(np.int64), np.cumsum(plan.group_row_counts)[:-1])
    groups = tuple(Group(*pair) for pair in zip(pages, rows)) if len(plan.group_page_counts) else ()
    row_slots, starts, counts = (each.astype(np.int64) for each in (plan.row_slots, plan.row_starts, plan.row_counts))
    return Batch(row_slots, starts, counts, groups)
