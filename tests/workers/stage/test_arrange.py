"""The tiles of attention: every query sees every key it should exactly once, in so many tiles as there is room for."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.support.plans import Row, plan
from workers.stage.cuda.arrange import MOST_PARTS, MOST_PIECES, TILE_FIELDS, Arranged, Arranger, extra_tiles

PAGE, KV_HEADS, PROCESSORS, MOST = 16, 2, 12, 4096


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Row], list[tuple[list[int], list[int]]]]:
    """Rows of one or several tokens; the members of each group stand behind its pages."""
    rows: list[Row] = []
    groups = []
    for _ in range(draw(st.integers(0, 3))):
        pages = draw(st.integers(1, 60))
        members = [
            Row(slot=0, start=pages * PAGE + draw(st.integers(0, 400)), tokens=[0] * draw(st.sampled_from([1, 1, 40])))
            for _ in range(draw(st.integers(2, 40)))
        ]
        groups.append((list(range(pages)), list(range(len(rows), len(rows) + len(members)))))
        rows += members
    for _ in range(draw(st.integers(0 if rows else 1, 30))):
        rows.append(Row(slot=0, start=draw(st.integers(0, 9000)), tokens=[0] * draw(st.sampled_from([1, 1, 1, 70]))))
    return [Row(slot=slot, start=row.start, tokens=row.tokens) for slot, row in enumerate(rows)], groups


def tiles(values: NDArray[np.int64]) -> list[list[int]]:
    found: list[list[int]] = values.reshape(-1, TILE_FIELDS).tolist()
    return found


def arrange(rows: list[Row], groups: Any = ()) -> Arranged:
    return Arranger(PAGE, 4 * KV_HEADS, KV_HEADS, PROCESSORS, MOST).arrange(plan(rows=rows, groups=groups))


@given(steps())
def test_every_key_once(step: tuple[list[Row], Any]) -> None:
    rows, groups = step
    arranged = arrange(rows, groups)
    seen = [np.zeros(position + 1, np.int64) for position in arranged.positions.tolist()]
    pieces: dict[int, list[int]] = {}
    for row, slot, low, high, count, which, first, _ in tiles(arranged.decode_tiles):
        assert slot == arranged.slots[row]
        assert low * PAGE < high
        seen[row][low * PAGE : high] += 1
        if count > 1:
            pieces.setdefault(row, []).append(first + which)
    for _, token, count, position, low, *_ in tiles(arranged.chunk_tiles):
        for i in range(count):
            assert arranged.positions[token + i] == position + i
            seen[token + i][low * PAGE : position + i + 1] += 1
    parts: set[tuple[int, int]] = set()
    for _, low, high, member, count, part, *_ in tiles(arranged.prefix_tiles):
        for token in arranged.members[member : member + count].tolist():
            assert part < arranged.prefix_count[token] <= MOST_PARTS
            parts.add((token, int(arranged.prefix_first[token]) + part))
            seen[token][low * PAGE : high * PAGE] += 1
    assert all((each == 1).all() for each in seen)
    assert len({part for _, part in parts}) == len(parts) == arranged.prefix_count.sum() <= MOST
    extra = extra_tiles(PROCESSORS, KV_HEADS)
    assert len(arranged.decode_tiles) // TILE_FIELDS <= arranged.rows + extra
    # Pieces have places of their own, and a row's stand together.
    places = [place for each in pieces.values() for place in each]
    assert len(set(places)) == len(places) and all(place < 2 * extra for place in places)
    for each in pieces.values():
        assert each == list(range(each[0], each[0] + len(each))) and len(each) <= MOST_PIECES


def test_a_long_row_is_cut_where_it_would_be_waited_for() -> None:
    alone = tiles(arrange([Row(slot=0, start=8191, tokens=[0])]).decode_tiles)
    assert len(alone) > 8
    short = [Row(slot=slot, start=300, tokens=[0]) for slot in range(200)]
    among = arrange([*short, Row(slot=200, start=8191, tokens=[0])])
    found = [tile for tile in tiles(among.decode_tiles) if tile[0] == 200]
    assert 4 < len(found) < len(alone) and len(tiles(among.decode_tiles)) == 200 + len(found)
    even = arrange([Row(slot=slot, start=8191, tokens=[0]) for slot in range(200)])
    assert len(tiles(even.decode_tiles)) == 200


def test_there_are_never_more_tiles_than_programs() -> None:
    lengths = [15_873] * 51 + [3_068]
    rows = [Row(slot=slot, start=length - 1, tokens=[0]) for slot, length in enumerate(lengths)]
    arranged = Arranger(PAGE, 4, 1, 132, MOST).arrange(plan(rows=rows))
    assert len(tiles(arranged.decode_tiles)) <= len(rows) + extra_tiles(132, 1)


def test_parts_of_a_prefix_keep_the_programs_busy() -> None:
    """12 tiles for each KV head are 24 programs' work, and 24 run at once: whole, or in even parts."""
    rows = [Row(slot=slot, start=8192, tokens=[0]) for slot in range(384)]
    few = arrange(rows[:32], [(list(range(512)), list(range(32)))])
    assert few.prefix_count[0] >= 12
    assert arrange(rows, [(list(range(512)), list(range(384)))]).prefix_count[0] == 1
