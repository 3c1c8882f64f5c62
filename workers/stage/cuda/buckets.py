"""What steps are filled up to, so that a graph for each such size serves all steps."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

FINE = 1024
"""From so many tokens on, steps are filled up by a sixteenth at most, below by an eighth."""
WIDTHS = (0, 32, 1024)
"""How many of the most likely ids a row of a portion has room for; what a step names most of decides."""


class Kind(NamedTuple):
    """Of a step: its tokens, filled up; whether any has a shared prefix; whether any row has several tokens."""

    size: int
    grouped: bool
    chunked: bool


def sizes_up_to(most: int) -> list[int]:
    """Numbers of tokens, or samples, that steps are filled up to."""
    sizes = [1, 2, 4]
    while sizes[-1] < most:
        octave = sizes[-1].bit_length() - 1
        sizes.append(sizes[-1] + (1 << max(2, octave - (4 if sizes[-1] >= FINE else 3))))
    return [*(size for size in sizes if size < most), most]


def filled(sizes: Sequence[int], count: int) -> int:
    return sizes[bisect_left(sizes, count)]


def kinds(sizes: Sequence[int], rows: int) -> list[Kind]:
    """Of all steps of tokens up to `sizes` with at most `rows` rows of one token."""
    alone = filled(sizes, rows)
    return [
        Kind(size, grouped, chunked)
        for size, grouped, chunked in product(sizes, (False, True), (False, True))
        if chunked or size <= alone
    ]
