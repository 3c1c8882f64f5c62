"""What steps take of the running sequences in a pipeline: none twice at a time, none left behind, equal costs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.manager.microbatches import ROW_TOKENS, Microbatches
from workers.manager.slots import Slots


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 4000), min_size=1, max_size=200),
    count=st.integers(2, 6),
    began=st.integers(1, 3),
)
def test_steps_even_out(lengths: list[int], count: int, began: int) -> None:
    """However many steps the sequences were prefilled in, and results being accounted as late as can be."""
    slots, batches = Slots(len(lengths)), Microbatches(count, passes=2)
    every = np.arange(len(lengths), dtype=np.int32)
    slots.planned[:], slots.last_step[:] = lengths, every % began
    step, costs, taken = began, [], np.zeros(len(lengths), np.int64)
    for _ in range(12 * count):
        rows, step = batches.ready(slots, every, step + 1, waiting=False)
        assert len(rows) and (step - slots.last_step[rows] >= count).all()
        slots.last_step[rows] = step
        taken[rows] += 1
        costs.append(int((ROW_TOKENS + slots.planned[rows]).sum()))
    total, largest = int((ROW_TOKENS + slots.planned).sum()), ROW_TOKENS + max(lengths)
    # The first steps are as full as those that came before let them be.
    assert max(costs[2 * count :]) < total / count + largest
    assert taken.min() >= 5, "a sequence is left behind"


def test_a_sequence_has_so_many_passes_under_way() -> None:
    slots, batches = Slots(3), Microbatches(3, passes=2)
    slots.in_flight[:] = [2, 1, 2]
    rows, _ = batches.ready(slots, np.arange(3, dtype=np.int32), 9, waiting=False)
    assert rows.tolist() == [1]
    slots.in_flight[1] = 2
    assert not len(batches.ready(slots, np.arange(3, dtype=np.int32), 10, waiting=False)[0])


def test_one_stage_takes_all() -> None:
    slots, batches = Slots(3), Microbatches(1, passes=2)
    slots.in_flight[:], slots.last_step[:] = 2, 4
    rows, step = batches.ready(slots, np.arange(3, dtype=np.int32), 5, waiting=False)
    assert rows.tolist() == [0, 1, 2] and step == 5 and batches.prefill(900, 64) == 64


@pytest.mark.parametrize(("waiting", "takes"), [(30_000, 8192), (9000, 3000), (100, 512), (0, 512)])
def test_prompts_are_spread_over_the_microbatches(waiting: int, takes: int) -> None:
    assert Microbatches(3, passes=2).prefill(waiting, 8192) == takes
