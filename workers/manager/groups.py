"""Shared-prefix groups: which rows of a step read the same KV pages, so that they are read once for all.

Hydragen (arXiv 2402.05099) computes attention over a prefix once with all the queries that share it. Groups
are found from page numbers alone: sequences that share a prefix share its pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.int32]

MIN_SAVED_TOKENS = 256
"""KV reads that a group has to save to be worth its extra product and merge."""
MAX_FORKS = 32
"""Forks of the page tree followed below one another; rows that fork deeper stay one group."""


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    rows: NDArray[np.int32]
    pages: NDArray[np.int32]
    """The shared pages, first to last."""

    @property
    def saved(self) -> int:
        """Page reads that the group spares."""
        return (len(self.rows) - 1) * len(self.pages)


def find_groups(table: NDArray[np.int32], depth: NDArray[np.int32], page_size: int) -> list[Group]:
    """Disjoint groups of rows, chosen on the tree of their pages to save the most reads.

    table: [rows, pages] page numbers; depth: [rows] how many leading pages of a row are wholly in the KV
    cache before this step. Every group saves at least MIN_SAVED_TOKENS. The walk is greedy: at a node of
    the tree its rows form one group, or the best groups of its branches, whichever saves more.
    """
    rows = np.flatnonzero(depth > 0).astype(np.int32)
    groups = _branches(table, depth, rows, 0, 0)
    return [g for g in groups if g.saved * page_size >= MIN_SAVED_TOKENS]


def _branches(table: Table, depth: NDArray[np.int32], rows: NDArray[np.int32], level: int, forks: int) -> list[Group]:
    """The best groups among `rows`, which share their first `level` pages."""
    rows = rows[depth[rows] > level]
    if len(rows) < 2 or forks == MAX_FORKS:
        return []
    order = rows[np.argsort(table[rows, level], kind="stable")]
    cuts = np.flatnonzero(np.diff(table[order, level])) + 1
    found: list[Group] = []
    for members in np.split(order, cuts):
        if len(members) > 1:
            found += _node(table, depth, members, level, forks)
    return found


def _node(table: Table, depth: NDArray[np.int32], rows: NDArray[np.int32], level: int, forks: int) -> list[Group]:
    """The best groups among `rows`, which share the page at `level` and all before it."""
    shallowest = int(depth[rows].min())
    same = (table[rows, level:shallowest] == table[rows[0], level:shallowest]).all(axis=0)
    shared = shallowest if same.all() else level + int(np.argmin(same))
    whole = Group(np.sort(rows), table[rows[0], :shared].copy())
    parts = _branches(table, depth, rows, shared, forks + 1)
    return parts if sum(g.saved for g in parts) > whole.saved else [whole]
