"""How long sequences will run, and how many KV pages they will need while they do."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

OBSERVED = 1024
"""Finished lengths remembered of each class."""
WARM = 16
"""Finished lengths after which a class is predicted from them."""
MARGIN = 0.25
"""Standard deviations above the mean that are forecast."""


def length_class(prompt: int, max_tokens: int) -> int:
    """Requests of one class are expected to run alike: prompt and limit within a factor of two."""
    return max_tokens.bit_length() * 64 + prompt.bit_length()


@dataclass(slots=True)
class _Observed:
    lengths: NDArray[np.int32] = field(default_factory=lambda: np.zeros(OBSERVED, np.int32))
    count: int = 0
    ordered: NDArray[np.int32] | None = None
    expected: NDArray[np.float64] | None = None
    """expected[i]: mean plus margin of the lengths from the i-th shortest on."""

    def add(self, length: int) -> None:
        self.lengths[self.count % OBSERVED] = length
        self.count += 1
        self.ordered = None

    def table(self) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        if self.ordered is None or self.expected is None:
            self.ordered = np.sort(self.lengths[: min(self.count, OBSERVED)])
            tail = np.arange(len(self.ordered), 0, -1)
            mean = np.cumsum(self.ordered[::-1].astype(np.float64))[::-1] / tail
            square = np.cumsum(self.ordered[::-1].astype(np.float64) ** 2)[::-1] / tail
            self.expected = mean + MARGIN * np.sqrt(np.maximum(square - mean**2, 0))
        return self.ordered, self.expected


class LengthPredictor:
    """Predicts output lengths from those of finished sequences of the same class."""

    def __init__(self) -> None:
        self._classes: dict[int, _Observed] = {}

    def observe(self, length_class: int, length: int) -> None:
        self._classes.setdefault(length_class, _Observed()).add(length)

    def predict(
        self, classes: NDArray[np.int32], have: NDArray[np.int32], max_tokens: NDArray[np.int32]
    ) -> NDArray[np.int64]:
        """Predicted total outputs of sequences that have `have` outputs already. All [n].

        Always more than `have` and at most `max_tokens` (a sequence at its limit: the limit), which is also
        the prediction for a class that has not seen enough.
        """
        predicted = max_tokens.astype(np.int64)
        for each in np.unique(classes).tolist():
            seen = self._classes.get(each)
            if seen is None or seen.count < WARM:
                continue
            ordered, expected = seen.table()
            members = np.flatnonzero(classes == each)
            at = np.searchsorted(ordered, have[members], side="right")
            known = at < len(ordered)
            predicted[members[known]] = np.ceil(expected[at[known]]).astype(np.int64)
        return np.clip(predicted, np.minimum(have + 1, max_tokens), max_tokens)


def peak_pages(
    held: int, tokens: NDArray[np.int64], pages: NDArray[np.int64], steps: NDArray[np.int64], page_size: int
) -> int:
    """Most pages in use at once until all of n sequences have finished, `held` being those shared.

    tokens: [n] length now (prompt included, once prefilled); pages: [n] pages that are the sequence's alone
    or still to be taken for `tokens`; steps: [n] tokens it will still add. Each adds a token a step and gives
    its own pages back when it finishes, so the peak lies just before some sequence finishes.
    """
    if not len(tokens):
        return held
    order = np.argsort(-steps, kind="stable")
    tokens, pages, steps = tokens[order], pages[order], steps[order]
    fill = tokens % page_size
    # At the finish of the sequence at k, those at 0..k still run. Each has grown by
    # ceil((tokens + steps) / page_size) - ceil(tokens / page_size) pages, a function of its fill alone.
    last = np.flatnonzero(np.append(steps[1:] != steps[:-1], True))
    own = np.cumsum(pages)[last]
    by_fill = np.zeros((len(tokens), page_size), np.int64)
    by_fill[np.arange(len(tokens)), fill] = 1
    running = np.cumsum(by_fill, axis=0)[last]
    fills = np.arange(page_size)
    grown = -(-(fills + steps[last][:, None]) // page_size) - (fills > 0)
    return held + int((own + (running * grown).sum(axis=1)).max())
