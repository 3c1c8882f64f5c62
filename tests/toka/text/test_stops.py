from __future__ import annotations

import time

from hypothesis import example, given
from hypothesis import strategies as st

from toka.text.stops import StopFinder

TEXT = st.text("ab\n", max_size=30)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=4)


def naive(text: str, stops: list[str]) -> str | None:
    """The text before the stop string that is complete first, looked for character by character."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))]
    return None


@given(text=TEXT, stops=STOPS, cuts=st.lists(st.integers(0, 30), max_size=8))
@example(text="aabab", stops=["abab"], cuts=[1, 2, 3, 4])
@example(text="xaby", stops=["ab", "b"], cuts=[])
def test_the_text_ends_at_the_same_place_wherever_it_is_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    finder, given_out = StopFinder(stops), ""
    before = naive(text, stops)
    places = sorted(min(cut, len(text)) for cut in cuts)
    for start, end in zip([0, *places], [*places, len(text)]):
        given_out += finder.feed(text[start:end])
        assert (before if before is not None else text).startswith(given_out), "what was given out stays"
    assert finder.found == (before is not None)
    assert given_out + finder.flush() == (text if before is None else before)


@given(text=TEXT, stops=STOPS)
def test_no_more_is_held_back_than_may_become_a_stop_string(text: str, stops: list[str]) -> None:
    finder, given_out = StopFinder(stops), ""
    for char in text:
        given_out += finder.feed(char)
        if finder.found:
            return
    held = text[len(given_out) :]
    assert not held or any(stop.startswith(held) for stop in stops)


def test_long_stop_strings_that_nearly_match_do_not_slow_it_down() -> None:
    finder = StopFinder(["a" * 1023 + "b"] * 16)
    began = time.perf_counter()
    for _ in range(2000):
        finder.feed("a")
    assert time.perf_counter() - began < 2
