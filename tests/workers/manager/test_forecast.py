from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from workers.manager.forecast import Forecast, LengthPredictor, Need, class_of

CLASS = class_of(200, 1024, stops=True)


def column(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def alive(predictor: LengthPredictor, length_class: int, have: int, steps: int) -> float:
    predictor.learn(column(), column())
    return float(predictor.alive(column(length_class), column(have), column(0, steps))[0, 1])


def test_nothing_is_known_to_stop_before_any_has():
    predictor = LengthPredictor()
    assert alive(predictor, CLASS, 0, 1000) == 1
    for _ in range(50):
        predictor.observe(CLASS, 1024, stopped=False)
    assert alive(predictor, CLASS, 0, 1000) == 1, "what reaches its limit has not stopped"


def test_constant_rates_are_found():
    predictor, rng = LengthPredictor(), np.random.default_rng(0)
    for length in rng.geometric(1 / 200, 3000).tolist():
        predictor.observe(CLASS, min(length, 1024), stopped=length <= 1024)
    for have, steps in ((0, 200), (100, 200), (400, 100)):
        assert abs(alive(predictor, CLASS, have, steps) - np.exp(-steps / 200)) < 0.04


def test_fixed_lengths_are_found():
    predictor = LengthPredictor()
    for _ in range(300):
        predictor.observe(CLASS, 50, stopped=True)
    assert alive(predictor, CLASS, 0, 40) > 0.9 and alive(predictor, CLASS, 0, 60) < 0.25


def test_short_ones_that_finish_first_do_not_mislead():
    """200 start together, lengths are around 200: when the first 20 have finished, most are still running."""
    predictor, lengths = LengthPredictor(), np.sort(np.random.default_rng(0).geometric(1 / 200, 200))
    now = int(lengths[20])
    for length in lengths[:20].tolist():
        predictor.observe(CLASS, length, stopped=True)
    running = np.full(180, now, np.int32)
    predictor.learn(np.full(180, CLASS, np.int32), running)
    expected = predictor.alive(column(CLASS), column(0), column(0, 200))[0, 1]
    assert 0.3 < expected < 0.7, "truly 0.37; by the finished ones alone it would be 0"


def test_classes_learn_from_their_family_and_then_from_themselves():
    predictor = LengthPredictor()
    other, new = class_of(3000, 1024, stops=True), class_of(20, 1024, stops=True)
    for _ in range(200):
        predictor.observe(other, 100, stopped=True)
    predictor.observe(new, 300, stopped=True)
    assert alive(predictor, new, 0, 250) < 0.2
    for _ in range(200):
        predictor.observe(new, 300, stopped=True)
    assert alive(predictor, new, 0, 250) > 0.8
    assert alive(predictor, class_of(20, 1024, stops=False), 0, 250) == 1, "nothing stops those"


def test_what_was_long_ago_is_forgotten():
    predictor = LengthPredictor()
    for length in (400, 20):
        for _ in range(10_000):
            predictor.observe(CLASS, length, stopped=True)
    assert alive(predictor, CLASS, 0, 60) < 0.3


def test_no_ages_are_kept_beyond_the_limit_of_a_class():
    predictor = LengthPredictor()
    predictor.observe(CLASS, 1000, stopped=True)
    alive(predictor, CLASS, 0, 10)
    assert len(predictor._log_alive) <= 2 + 2048


@given(
    st.lists(st.tuples(st.integers(0, 2000), st.booleans()), max_size=60),
    st.lists(st.integers(0, 3000), max_size=5),
    st.lists(st.integers(1, 3000), min_size=1, max_size=5, unique=True).map(sorted),
)
def test_chances_are_chances(observed, have, steps):
    predictor = LengthPredictor()
    for length, stopped in observed:
        predictor.observe(CLASS, length, stopped)
    classes = np.full(len(have), CLASS, np.int32)
    predictor.learn(classes, column(*have))
    chances = predictor.alive(classes, column(*have), column(0, *steps))
    assert (chances[:, 0] == 1).all() and (chances >= 0).all() and (np.diff(chances, axis=1) <= 0).all()


SEQUENCES = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 3), st.integers(0, 40)), min_size=1, max_size=8)


@given(SEQUENCES, st.integers(0, 5), st.integers(1, 8), st.integers(0, 120))
def test_what_is_said_to_fit_fits_where_lengths_are_known(sequences, held, page_size, pages):
    def pages_at(step: int, count: int) -> int:
        total = held
        for tokens, shared, left in sequences[:count]:
            if left >= step:
                total += -(-(tokens + step) // page_size) - min(shared, tokens // page_size)
        return total

    forecast = Forecast(LengthPredictor(), pages, page_size, 64)
    none = column()
    forecast.begin(held, none, none, none, none, none)
    for count, (tokens, shared, left) in enumerate(sequences, start=1):
        own = -(-tokens // page_size) - min(shared, tokens // page_size)
        peak = max(pages_at(step, count) for step in range(42))
        fits = forecast.fitting(1, Need(tokens, own, CLASS, 0, left))
        assert not (fits and peak > pages)
        # A span of steps counts as one, so it may refuse what would just fit.
        assert fits or peak + sum(each[2] // page_size + 1 for each in sequences[:count]) > pages
        forecast.add(column(tokens), column(own), column(CLASS), column(0), column(left))


def test_several_fit_as_one_by_one():
    predictor = LengthPredictor()
    for length in np.random.default_rng(0).geometric(1 / 50, 500).tolist():
        predictor.observe(CLASS, length, stopped=True)
    forecast, none = Forecast(predictor, 400, 16, 2048), column()
    forecast.begin(10, none, none, none, none, none)
    together = forecast.fitting(100, Need(100, 7, CLASS, 0, 1000))
    alone = 0
    while forecast.fitting(1, Need(100, 7, CLASS, 0, 1000)):
        forecast.add(column(100), column(7), column(CLASS), column(0), column(1000))
        alone += 1
    assert together == alone and 10 < together <= 390 // 7


def test_the_margin_covers_most_outcomes():
    """As many as are said to fit are run, with lengths drawn anew: the cache overflows in few of the runs."""
    rng, predictor = np.random.default_rng(0), LengthPredictor()
    for length in rng.geometric(1 / 200, 2000).tolist():
        predictor.observe(CLASS, length, stopped=True)
    forecast, none = Forecast(predictor, 2000, 16, 4096), column()
    forecast.begin(0, none, none, none, none, none)
    count = forecast.fitting(500, Need(64, 4, CLASS, 0, 4000))
    steps = np.arange(1, 1500)
    lengths = rng.geometric(1 / 200, (300, count, 1))
    used = np.zeros((300, len(steps)))
    for number in range(count):
        used += np.where(lengths[:, number] >= steps, -(-(64 + steps) // 16), 0)
    assert (used.max(axis=1) > 2000).mean() < 0.25
    assert np.median(used.max(axis=1)) > 0.85 * 2000
