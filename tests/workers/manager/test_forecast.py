from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from workers.manager.forecast import WARM, LengthPredictor, length_class, peak_pages

SEQUENCES = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 3), st.integers(0, 40)), max_size=8)


@given(SEQUENCES, st.integers(0, 5), st.integers(1, 8))
def test_the_peak_equals_a_simulation(sequences, held, page_size):
    def pages_at(step: int) -> int:
        total = held
        for tokens, shared, steps in sequences:
            if steps >= step:
                total += -(-(tokens + step) // page_size) - shared
        return total

    expected = max((pages_at(step) for step in range(42)), default=held)
    columns = np.array(sequences, np.int64).reshape(-1, 3)
    own = -(-columns[:, 0] // page_size) - columns[:, 1]
    # Sequences that are all shared may own less than nothing by this arithmetic; the real ones never do.
    if (own >= 0).all():
        assert peak_pages(held, columns[:, 0], own, columns[:, 2], page_size) == max(expected, held)


def test_prediction_is_the_limit_until_warm_and_always_possible():
    predictor = LengthPredictor()
    name = length_class(100, 1000)
    ask = lambda have: int(  # noqa: E731
        predictor.predict(np.array([name], np.int32), np.array([have], np.int32), np.array([1000], np.int32))[0]
    )
    for _ in range(WARM - 1):
        predictor.observe(name, 50)
    assert ask(0) == 1000
    predictor.observe(name, 50)
    assert ask(0) == 50
    assert ask(49) == 50
    assert ask(50) == 1000, "longer than all that was seen: nothing is known"
    assert ask(1000) == 1000


def test_classes_do_not_mix():
    predictor = LengthPredictor()
    for _ in range(WARM):
        predictor.observe(length_class(100, 1000), 900)
    classes = np.array([length_class(100, 4), length_class(5000, 1000)], np.int32)
    assert predictor.predict(classes, np.zeros(2, np.int32), np.array([4, 1000], np.int32)).tolist() == [4, 1000]


@given(st.lists(st.integers(1, 60), min_size=WARM, max_size=40), st.integers(0, 60), st.integers(1, 60))
def test_prediction_stays_within_bounds(lengths, have, limit):
    predictor = LengthPredictor()
    for length in lengths:
        predictor.observe(1, length)
    (value,) = predictor.predict(
        np.array([1], np.int32), np.array([min(have, limit)], np.int32), np.array([limit], np.int32)
    )
    assert min(min(have, limit) + 1, limit) <= value <= limit
