from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from workers.manager import groups
from workers.manager.groups import find_groups


def table(*rows: list[int]) -> tuple[np.ndarray, np.ndarray]:
    width = max(len(r) for r in rows)
    padded = np.array([[*r, *[0] * (width - len(r))] for r in rows], np.int32)
    return padded, np.array([len(r) for r in rows], np.int32)


def found(rows: list[list[int]], page_size: int = 256) -> list[tuple[list[int], list[int]]]:
    return [(g.rows.tolist(), g.pages.tolist()) for g in find_groups(*table(*rows), page_size)]


def test_one_prefix():
    assert found([[1, 2, 3], [1, 2, 4], [5, 6]]) == [([0, 1], [1, 2])]


def test_deeper_groups_win_where_they_save_more():
    shots = [1]
    a, b = [10, 11, 12, 13], [20, 21, 22, 23]
    rows = [[*shots, *a, 100 + i] for i in range(3)] + [[*shots, *b, 200 + i] for i in range(3)]
    assert found(rows) == [([0, 1, 2], [*shots, *a]), ([3, 4, 5], [*shots, *b])]


def test_the_common_prefix_wins_where_branches_are_small():
    rows = [[1, 2, 3, 4, 50 + i // 2, 100 + i] for i in range(6)]
    assert found(rows) == [([0, 1, 2, 3, 4, 5], [1, 2, 3, 4])]


def test_too_little_saved_is_no_group():
    assert found([[1], [1]], page_size=groups.MIN_SAVED_TOKENS - 1) == []
    assert len(found([[1], [1]], page_size=groups.MIN_SAVED_TOKENS)) == 1


def test_many_turns_of_one_conversation_do_not_recurse_without_end():
    assert found([list(range(1, 2 + i)) for i in range(1500)])


@given(st.lists(st.lists(st.integers(1, 2), max_size=6), max_size=10))
def test_groups_are_disjoint_and_truly_shared(paths):
    # A page number stands for the whole path to it, as in a real page table.
    numbers: dict[tuple[int, ...], int] = {}
    rows = [[numbers.setdefault(tuple(p[: i + 1]), len(numbers) + 1) for i in range(len(p))] for p in paths]
    seen: set[int] = set()
    for members, pages in found([*rows, []]):
        assert len(members) > 1 and not seen & set(members)
        seen |= set(members)
        assert all(rows[m][: len(pages)] == pages for m in members)
