"""What a step takes of the running sequences where a pipeline has several steps on their way.

A microbatch is a step on its way. A sequence's next token can be computed when its last one has been sampled, at the
pipeline's end: a pass through `count` steps. So a step takes those sequences that no step of the last `count` - 1 has
taken, the longest idle first, and of these a fair share: as much of all decoding work as makes steps cost the same.
What is over goes into the next step, so that steps even out by themselves however sequences came.

With one microbatch, on one stage, all of this is the whole batch.
"""

from __future__ import annotations

import numpy as np

from toka.messages import Int32
from workers.manager.slots import Slots

ROW_TOKENS = 512
"""What a row costs beside its attention, in tokens of its KV cache read: its products, its logits, its draw."""
LEAST_PREFILL = 16
"""Prompts are not spread thinner than this part of the tokens a step takes."""


class Microbatches:
    def __init__(self, count: int, passes: int) -> None:
        """count: steps on their way through the stages; passes: of one sequence, planned and not accounted."""
        self.count, self._passes = count, passes

    def ready(self, slots: Slots, decode: Int32, step: int, waiting: bool) -> tuple[Int32, int]:
        """Those of the slots `decode` that step number `step` takes, and the number it gets.

        waiting: whether the step has prompts to compute. Where it has not, and every sequence is on its way, it is
        given a later number: the stages wait.
        """
        if self.count == 1:
            return decode, step
        free = decode[slots.in_flight[decode] < self._passes]
        if not len(free):
            return free, step
        last = slots.last_step[free]
        if not waiting:
            step = max(step, int(last.min()) + self.count)
        free = free[last <= step - self.count]
        free = free[np.argsort(slots.last_step[free], kind="stable")]
        cost = ROW_TOKENS + slots.planned[free].astype(np.int64)
        share = (ROW_TOKENS * len(decode) + int(slots.planned[decode].sum(dtype=np.int64))) / self.count
        return np.sort(free[np.cumsum(cost) - cost < share]), step

    def prefill(self, waiting: int, most: int) -> int:
        """How many of the `waiting` prompt tokens a step takes that takes `most` tokens at most."""
        if self.count == 1:
            return most
        return min(most, max(-(-waiting // self.count), most // LEAST_PREFILL))
