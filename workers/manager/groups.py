"""Shared-prefix groups: which rows of a step read the same KV pages, so that they are read once for all.

Hydragen (arXiv 2402.05099) computes attention over a prefix once with all the queries that share it. Groups
are found from page numbers alone: sequences that share a prefix share its pages. The stage merges one prefix into
a row, so a row is in one group at most, and where prefixes nest the level is chosen that saves the most.

What a group is worth is counted in tokens of KV that need not be read, of one layer. Its members' reads of the
prefix are spared, and the stage reads it once for every TILE members instead. Against that stand a product and a
merge that were not there before: PER_GROUP, the tiles' start; PER_MEMBER, a float32 output and its log-sum-exp
written and read again, as many bytes as the KV of so many tokens at four query heads to a KV head, in a few parts;
and PER_STEP, once for all groups together, the launch of one more kernel in each layer: what few rows have to save
before any group is worth it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from toka.messages import Int32
from workers.manager.slots import Slots

TILE = 32
PER_GROUP = 128
PER_MEMBER = 24
PER_STEP = 1024
MAX_FORKS = 32
"""Forks of the page tree followed below one another; rows that fork deeper stay one group."""
LOOK_EVERY = 16
"""Steps after which groups are looked for anew where a row has come or gone; ..."""
LOOK_SHARE = 16
"""... sooner where one in so many has."""


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    rows: Int32
    pages: Int32
    """The shared pages, first to last."""

    def worth(self, page_size: int) -> int:
        return worth(len(self.rows), len(self.pages) * page_size)


def worth(members: int, tokens: int) -> int:
    """What a group saves of tokens read, were others there to pay for PER_STEP."""
    return (members - -(-members // TILE)) * tokens - PER_GROUP - PER_MEMBER * members


def worthwhile(groups: list[Group], page_size: int) -> list[Group]:
    """Those of `groups` that pay, if together they pay for themselves."""
    paying = [group for group in groups if group.worth(page_size) > 0]
    return paying if sum(group.worth(page_size) for group in paying) > PER_STEP else []


def find_groups(table: Int32, depth: Int32, page_size: int) -> list[Group]:
    """Disjoint groups of rows, chosen on the tree of their pages to save the most.

    table: [rows, pages] page numbers; depth: [rows] how many leading pages of a row are wholly in the KV
    cache before this step.
    """
    tree = _Tree(table, depth, page_size)
    return worthwhile(tree.branches(np.flatnonzero(depth > 0).astype(np.int32), 0, 0)[0], page_size)


@dataclass(frozen=True, slots=True)
class _Tree:
    table: Int32
    depth: Int32
    page_size: int

    def branches(self, rows: Int32, level: int, forks: int) -> tuple[list[Group], list[tuple[Int32, int, list[Group]]]]:
        """Of `rows`, which share their first `level` pages: the best groups below that level, and for each branch
        its rows, the worth of its groups and the groups."""
        rows = rows[self.depth[rows] > level]
        if len(rows) < 2 or forks == MAX_FORKS:
            return [], []
        pages = self.table[rows, level]
        order = np.argsort(pages, kind="stable")
        rows, pages = rows[order], pages[order]
        bounds = [0, *(np.flatnonzero(pages[1:] != pages[:-1]) + 1).tolist(), len(rows)]
        found: list[tuple[Int32, int, list[Group]]] = []
        for first, end in itertools.pairwise(bounds):
            if end - first > 1:
                groups = self._node(rows[first:end], level, forks)
                found.append((rows[first:end], sum(g.worth(self.page_size) for g in groups), groups))
        return [group for _, _, groups in found for group in groups], found

    def _node(self, rows: Int32, level: int, forks: int) -> list[Group]:
        """The best groups among `rows`, which share the page at `level` and all before it.

        Either all rows are one group, or each branch keeps its own groups, or those that gain by it do and the
        other rows are one group.
        """
        shallowest = int(self.depth[rows].min())
        ahead = self.table[rows, level:shallowest]
        same = (ahead == ahead[0]).all(axis=0)
        shared = shallowest if same.all() else level + int(np.argmin(same))
        pages = self.table[rows[0], :shared].copy()
        parts, branches = self.branches(rows, shared, forks + 1)
        tokens = shared * self.page_size
        apart = [b for b in branches if b[1] > len(b[0]) * (tokens * (TILE - 1) // TILE - PER_MEMBER)]
        rest = np.setdiff1d(rows, np.concatenate([rows[:0], *(b[0] for b in apart)]), assume_unique=True)
        options = [
            [Group(np.sort(rows), pages)],
            parts,
            [Group(rest, pages), *(group for b in apart for group in b[2])] if len(rest) > 1 else parts,
        ]
        options = [[group for group in option if group.worth(self.page_size) > 0] for option in options]
        return max(options, key=lambda option: sum(group.worth(self.page_size) for group in option))


class Grouping:
    """The groups of running slots, kept from step to step: rows that come join them, rows that go leave them."""

    def __init__(self, slots: int, page_size: int) -> None:
        self._size = page_size
        self._groups: list[Group] = []
        """Of slots."""
        self._seen = np.full(slots, -1, np.int64)
        """The age of each slot's sequence when it was last looked at; -1: it prefilled, more of it may be shared."""
        self._looked = 0
        """Rows in the cache when groups were last looked for, ..."""
        self._steps = 0
        """... and steps since then."""

    def rows(self, slots: Slots, refs: Int32, row_slots: Int32, starts: Int32, others: Int32) -> list[Group]:
        """The groups of a step's rows that are worth it.

        refs: [pages] how many hold each; row_slots, starts: of the rows, `starts` tokens of each in the KV cache;
        others: slots that decode, but not in this step.
        """
        self._steps += 1
        rows = len(row_slots)
        row_slots, starts = np.concatenate([row_slots, others]), np.concatenate([starts, slots.planned[others]])
        shared = np.flatnonzero((refs[slots.table[row_slots, 0]] > 1) & (starts >= self._size)).astype(np.int32)
        mine, depth = row_slots[shared], starts[shared] // self._size
        new = np.flatnonzero(self._seen[mine] != slots.age[mine])
        changed = len(new) + abs(self._looked - len(mine))
        if changed * LOOK_SHARE > len(mine) or (changed and self._steps >= LOOK_EVERY):
            found = find_groups(slots.table[mine, : int(depth.max(initial=0))], depth, self._size)
            self._groups = [Group(mine[group.rows], group.pages) for group in found]
            self._looked, self._steps = len(mine), 0
        elif len(new):
            self._groups = self._joined(slots.table, mine[new], depth[new])
        self._seen[mine] = np.where(starts[shared] >= slots.target[mine], slots.age[mine], -1)
        row_of = np.full(slots.count, -1, np.int32)
        row_of[mine] = np.where(shared < rows, shared, -1)
        present = [Group(found[found >= 0], g.pages) for g in self._groups for found in (row_of[g.rows],)]
        return worthwhile(present, self._size)

    def _joined(self, table: Int32, slots: Int32, depth: Int32) -> list[Group]:
        """The groups with those of `slots` that begin with their pages, each in the one of the longest prefix."""
        groups: list[Group] = []
        for group in sorted(self._groups, key=lambda group: -len(group.pages)):
            length = len(group.pages)
            joins = (depth >= length) & (table[slots, length - 1] == group.pages[-1])
            joins[joins] = (table[slots[joins], :length] == group.pages).all(axis=1)
            old = group.rows[~np.isin(group.rows, slots)]
            groups.append(Group(np.concatenate([old, slots[joins]]), group.pages))
            slots, depth = slots[~joins], depth[~joins]
        return groups
