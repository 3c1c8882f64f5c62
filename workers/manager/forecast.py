"""How long sequences will run, and how many KV pages they will need while they do.

Lengths are forecast from lives, as actuaries do: of all sequences of a class, finished or still running, how many
passed each age, and how many stopped there. So the running ones count from their first token on, one that reached
its limit says only that it did not stop before, and short ones, which finish first, mislead nobody.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from toka.messages import Int32

Floats = NDArray[np.float64]

PRIOR = 4.0
"""Stops seen in a span of ages that weigh as much as what is known without them."""
REMEMBERED = 4096
"""Lives after which older ones begin to be forgotten."""
MARGIN = 1.5
"""Standard deviations above the mean that are forecast."""
LAG = 3
"""Steps after which it is known that a sequence has stopped."""
_BEYOND = 8
"""Times the longest length seen, if the limit is not less: nothing is known to stop beyond that age."""
_OCTAVES = 24
_EDGES = np.unique([0, *(int(2 ** (quarter / 4)) for quarter in range(4 * _OCTAVES + 1))])
"""Ages between which the rate of stops is taken to be one: four to a doubling."""
_WIDTHS = np.diff(_EDGES).astype(np.float64)
_CLASSES = 1 << 13


def class_of(prompt: int, max_tokens: int, stops: bool) -> int:
    """Requests of one class are expected to run alike: prompt and limit within a factor of two, `stops` equal.

    stops: whether any id ends it before its limit.
    """
    return _family(max_tokens, stops) * 64 + prompt.bit_length()


def _family(max_tokens: int, stops: bool) -> int:
    return 2 * max_tokens.bit_length() + stops


def _limit(length_class: int) -> int:
    """No sequence of the class gets so many outputs."""
    return 1 << (length_class >> 7)


def _passed(ages: Int32) -> Floats:
    """Tokens that sequences of these ages have passed in each span."""
    span = np.searchsorted(_EDGES, ages, side="right") - 1
    within = np.bincount(span, ages - _EDGES[span], len(_WIDTHS))
    beyond = np.cumsum(np.bincount(span, minlength=len(_WIDTHS))[::-1])[::-1]
    passed: Floats = within + _WIDTHS * np.append(beyond[1:], 0)
    return passed


class _Lives:
    """What is known of the lengths of one class or family."""

    def __init__(self) -> None:
        self.passed = np.zeros(len(_WIDTHS))
        self.stopped = np.zeros(len(_WIDTHS))
        self.longest = 0
        self.count = 0
        self._fresh: list[tuple[int, bool]] = []
        """Lengths not in the sums yet, and whether it was a stop."""
        self.rates = np.zeros(len(_WIDTHS))
        """Stops per token in each span, as when last estimated, from ..."""
        self.estimated = 0
        """... so many lives."""

    def add(self, length: int, stopped: bool) -> None:
        self._fresh.append((length, stopped))
        self.count += 1
        if len(self._fresh) == REMEMBERED:
            self._take_in()

    def _take_in(self) -> None:
        if self.count > REMEMBERED:
            self.count //= 2
            self.estimated //= 2
            self.passed *= 0.5
            self.stopped *= 0.5
        lengths, stopped = np.array(self._fresh, np.int32).reshape(-1, 2).T
        self._fresh.clear()
        self.longest = max(self.longest, int(lengths.max(initial=0)))
        self.passed += _passed(lengths)
        spans = np.searchsorted(_EDGES, lengths[stopped > 0] - 1, side="right") - 1
        self.stopped += np.bincount(spans, minlength=len(_WIDTHS))

    @property
    def stale(self) -> bool:
        return self.count - self.estimated > self.estimated // 16

    def estimate(self, running: Int32, prior: Floats | None) -> None:
        """running: [n] ages of those that run now; prior: rates to begin with, by default one for all ages."""
        self._take_in()
        self.estimated = self.count
        passed = self.passed + _passed(running)
        stops = self.stopped.sum()
        if prior is None:  # what the stops seen make nearly certain
            prior = np.full(len(_WIDTHS), max(0.0, stops - np.sqrt(stops)) / max(1.0, passed.sum()))
        known = prior > 0
        self.rates = np.divide(
            self.stopped + PRIOR, passed + PRIOR / np.where(known, prior, 1), where=known, out=0 * prior
        )


class LengthPredictor:
    """Predicts from sequences of the same class, and at first from those of the same family: any prompt."""

    def __init__(self) -> None:
        self._lives: defaultdict[int, _Lives] = defaultdict(_Lives)
        self._log_alive = np.zeros(1, np.float32)
        """Logarithms of the share that lives beyond each age, one class after another; a first one for unknown ones."""
        self._first = np.zeros(_CLASSES, np.int32)
        self._last = np.zeros(_CLASSES, np.int32)
        """Where each class begins there, and the last age that it has there: beyond it nothing is known to stop."""

    def observe(self, length_class: int, length: int, stopped: bool) -> None:
        """A sequence of `length_class` ended with `length` outputs; stopped: before its limit would have ended it."""
        if length > 0:
            self._lives[length_class].add(length, stopped)
            self._lives[-(length_class >> 6)].add(length, stopped)

    def learn(self, length_class: Int32, have: Int32) -> None:
        """Take in what was observed, and sequences of these classes that run and have so many outputs."""
        stale = [each for each, lives in self._lives.items() if lives.stale and each > 0]
        if not stale:
            return
        for family in {each >> 6 for each in stale}:
            self._lives[-family].estimate(have[length_class >> 6 == family], None)
        for each in stale:
            self._lives[each].estimate(have[length_class == each], self._lives[-(each >> 6)].rates)
        self._tabulate()

    def _tabulate(self) -> None:
        tables = [np.zeros(1, np.float32)]
        at = 1
        for length_class, lives in self._lives.items():
            if length_class > 0:
                last = min(_BEYOND * lives.longest, _limit(length_class))
                hazard = np.append(0, np.cumsum(-np.log1p(-np.minimum(lives.rates, 0.99)) * _WIDTHS))
                tables.append(-np.interp(np.arange(last + 1), _EDGES, hazard).astype(np.float32))
                self._first[length_class], self._last[length_class] = at, last
                at += last + 1
        self._log_alive = np.concatenate(tables)

    def alive(self, length_class: Int32, have: Int32, steps: Int32) -> NDArray[np.float32]:
        """[n, k] probability that a sequence of this class [n] with `have` [n] outputs runs on after `steps` [k] more.

        Its limit is not looked at; beyond it this says nothing.
        """
        first, last = self._first[length_class][:, None], self._last[length_class][:, None]
        ages = np.minimum(have[:, None] + steps, last)
        ages += first
        log = self._log_alive[ages]
        log -= self._log_alive[first + np.minimum(have[:, None], last)]
        alive: NDArray[np.float32] = np.exp(log, out=log)
        return alive


class Need(NamedTuple):
    """What one sequence needs; the fields are the arguments of `Forecast.add`, in their order."""

    tokens: int
    own: int
    length_class: int
    have: int
    left: int


class Forecast:
    """KV pages in use over the coming steps, were nothing more admitted: mean and variance of a sum.

    Looked at in spans of steps, each some four tenths as long as all before it, at their ends. Who reaches its
    limit within a span holds its pages to the end of it, so where lengths are known no peak is missed.
    """

    def __init__(self, lengths: LengthPredictor, pages: int, page_size: int, context_length: int) -> None:
        """For `pages` pages in all; context_length: no sequence runs for more steps."""
        self._lengths = lengths
        self._pages, self._size = pages, page_size
        halves = [round(2 ** (half / 2)) for half in range(2 * context_length.bit_length() + 1)]
        steps = np.unique([0, *halves]).astype(np.int32)
        self._starts, self._ends = steps[:-1], steps[1:]
        self._mean = np.zeros(len(self._starts))
        self._variance = np.zeros(len(self._starts))

    def begin(self, held: int, tokens: Int32, own: Int32, length_class: Int32, have: Int32, left: Int32) -> None:
        """Forecast anew: `held` pages for good and n sequences as in `add`."""
        self._lengths.learn(length_class, have)
        self._mean[:] = held
        self._variance[:] = 0
        self.add(tokens, own, length_class, have, left)

    def add(self, tokens: Int32, own: Int32, length_class: Int32, have: Int32, left: Int32) -> None:
        """More sequences. All [n].

        tokens: length now, once prefilled; own: pages that it gives back at its end, those that `tokens` still
        lack included; have, left: outputs it has and may still get, one a step.
        """
        mean, variance = self._use(tokens, own, length_class, have, left)
        self._mean += mean.sum(axis=0, dtype=np.float64)
        self._variance += variance.sum(axis=0, dtype=np.float64)

    def fitting(self, count: int, need: Need) -> int:
        """How many of `count` sequences with this need fit beside all that was added."""
        mean, variance = self._use(*np.array(need, np.int32)[:, None])
        several = np.arange(1, count + 1)[:, None]
        high = self._mean + several * mean + MARGIN * np.sqrt(self._variance + several * variance)
        return int(np.count_nonzero(high.max(axis=1) <= self._pages))

    def _use(
        self, tokens: Int32, own: Int32, length_class: Int32, have: Int32, left: Int32
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """[n, spans] mean and variance of the pages that each sequence uses."""
        alive = self._lengths.alive(length_class, have, np.maximum(self._ends - LAG, 0))
        alive[self._starts >= (left + LAG)[:, None]] = 0
        fill = tokens % self._size
        grown = np.minimum(self._ends, left[:, None])
        grown += (fill + self._size - 1)[:, None]
        grown //= self._size
        grown += (own - (fill > 0))[:, None]
        mean = alive * grown
        return mean, (1 - alive) * mean * grown
