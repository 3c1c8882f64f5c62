from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.manager import groups
from workers.manager.groups import Grouping, find_groups, worth
from workers.manager.slots import Slots

SIZE = 4096


def table(*rows: list[int]) -> tuple[np.ndarray, np.ndarray]:
    width = max(len(r) for r in rows)
    padded = np.array([[*r, *[0] * (width - len(r))] for r in rows], np.int32)
    return padded, np.array([len(r) for r in rows], np.int32)


def found(rows: list[list[int]], page_size: int = SIZE) -> list[tuple[list[int], list[int]]]:
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


def test_one_branch_may_go_deeper_alone():
    deep = [[1, *range(10, 20), 100 + i] for i in range(8)]
    flat = [[1, 200 + i] for i in range(9)]
    assert sorted(found([*deep, *flat])) == [(list(range(8)), [1, *range(10, 20)]), (list(range(8, 17)), [1])]


@pytest.mark.parametrize(
    ("rows", "tokens", "pays"), [(2, 256, False), (2, 2048, True), (8, 256, True), (64, 16, False)]
)
def test_few_rows_need_a_longer_prefix(rows, tokens, pays):
    pages = [[*range(1, 1 + tokens // 16), 10_000 + row] for row in range(rows)]
    assert bool(found(pages, page_size=16)) == pays


def test_small_groups_pay_together_for_the_kernel():
    one = [[1, 10 + i] for i in range(2)]
    assert not found(one, page_size=512)
    assert len(found([[1 + 100 * g, 10 + 100 * g + i] for g in range(4) for i in range(2)], page_size=512)) == 4


def test_many_turns_of_one_conversation_do_not_recurse_without_end():
    assert found([list(range(1, 2 + i)) for i in range(1500)])


PATHS = st.lists(st.lists(st.integers(1, 2), max_size=6), max_size=10)


def numbered(paths: list[list[int]]) -> list[list[int]]:
    """A page number stands for the whole path to it, as in a real page table."""
    numbers: dict[tuple[int, ...], int] = {}
    return [[numbers.setdefault(tuple(p[: i + 1]), len(numbers) + 1) for i in range(len(p))] for p in paths]


@given(PATHS, st.sampled_from([1, 16, 128, 1024, 8192]))
def test_groups_are_disjoint_truly_shared_and_never_dearer_than_none(paths, page_size):
    rows = numbered(paths)
    seen: set[int] = set()
    total = 0
    for members, pages in found([*rows, []], page_size):
        assert len(members) > 1 and not seen & set(members)
        seen |= set(members)
        assert all(rows[m][: len(pages)] == pages for m in members)
        assert worth(len(members), len(pages) * page_size) > 0
        total += worth(len(members), len(pages) * page_size)
    assert not seen or total > groups.PER_STEP


@given(PATHS)
def test_no_single_level_saves_more(paths):
    """Neither one group of all rows that share a page, nor the rows of any page alone."""
    rows = [row for row in numbered(paths) if row]
    if not rows:
        return
    chosen = sum(worth(len(members), len(pages) * SIZE) for members, pages in found(rows))
    for page in {page for row in rows for page in row}:
        sharing = [row for row in rows if page in row]
        assert chosen >= worth(len(sharing), (sharing[0].index(page) + 1) * SIZE)


EVENTS = st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(1, 2), min_size=1, max_size=5)), max_size=60)


@given(EVENTS)
def test_groups_kept_from_step_to_step_stay_true(events):
    """Rows come, prefill a page a step, and go; their slots are taken again."""
    slots, grouping = Slots(10), Grouping(10, SIZE)
    numbers: dict[tuple[int, ...], int] = {}
    held: dict[int, int] = {}
    for step, (slot, path) in enumerate(events):
        if slot in held:
            del held[slot]
        else:
            pages = [numbers.setdefault(tuple(path[: i + 1]), len(numbers) + 1) for i in range(len(path))]
            slots.table[slot, : len(pages)], slots.num_pages[slot] = pages, len(pages)
            slots.age[slot], slots.target[slot], held[slot] = step, len(pages) * SIZE, 0
        for running in held:
            held[running] = min(held[running] + 1, int(slots.num_pages[running]))
        refs = np.zeros(len(numbers) + 1, np.int32)
        for running in held:
            refs[slots.table[running, : slots.num_pages[running]]] += 1
        rows = np.array(sorted(held), np.int32)
        starts = np.array([held[running] * SIZE for running in sorted(held)], np.int32)
        seen: set[int] = set()
        for group in grouping.rows(slots, refs, rows, starts, rows[:0]):
            members = group.rows.tolist()
            assert len(members) > 1 and not seen & set(members)
            seen |= set(members)
            for row in members:
                assert slots.table[rows[row], : len(group.pages)].tolist() == group.pages.tolist()
                assert starts[row] >= len(group.pages) * SIZE


def test_rows_that_come_join_at_once():
    slots, grouping = Slots(64), Grouping(64, SIZE)
    slots.table[:, :2] = [1, 2]
    slots.table[:, 2] = np.arange(10, 74)
    slots.num_pages[:], slots.age[:] = 3, np.arange(64)
    refs = np.array([0, 64, 64, *[1] * 80], np.int32)
    for count in (60, 61, 62, 40):
        rows = np.arange(count, dtype=np.int32)
        (group,) = grouping.rows(slots, refs, rows, np.full(count, 3 * SIZE, np.int32), rows[:0])
        assert sorted(group.rows.tolist()) == list(range(count)) and group.pages.tolist() == [1, 2]
