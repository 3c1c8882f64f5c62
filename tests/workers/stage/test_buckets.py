"""Every step has a graph, and is filled up by little."""

from __future__ import annotations

import pytest

from workers.stage.cuda.buckets import FINE, Kind, filled, kinds, sizes_up_to


@pytest.mark.parametrize("rows", [1, 2, 3, 22, 100, 256, 300, 938, 1818, 3000, 4096])
def test_every_step_has_a_graph(rows: int) -> None:
    sizes = sizes_up_to(max(rows, 2048))
    there = set(kinds(sizes, rows))
    for count in range(1, max(rows, 2048) + 1):
        for grouped in (False, True):
            assert Kind(filled(sizes, count), grouped, True) in there
            assert count > rows or Kind(filled(sizes, count), grouped, False) in there
    assert max(kind.size for kind in there if not kind.chunked) == filled(sizes, rows)


def test_steps_are_filled_up_by_little() -> None:
    sizes = sizes_up_to(8192)
    assert sizes == sorted(set(sizes)) and sizes[-1] == 8192
    for count in range(1, 8193):
        size = filled(sizes, count)
        assert count <= size <= max(count + 3, count * (17 / 16 if count > FINE else 9 / 8))
