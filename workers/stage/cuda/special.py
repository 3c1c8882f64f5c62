"""Draws for slots that ask for more than a temperature: masks, filters, edits, log-probabilities.

The host knows which samples of a step these are, and leaves them out of the ordinary draw, so that the others pay
nothing. They are worked on in portions of few enough rows to bound the memory that their logits take; a portion is
one upload, one graph and one copy of its results, and nothing waits for the GPU. Where ranks share the vocabulary,
each gathers the logits of these rows alone, and does the same as the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from toka.messages import Plan
from workers.stage.cuda.buckets import WIDTHS
from workers.stage.cuda.draw import Draw
from workers.stage.cuda.edits import Edits
from workers.stage.cuda.filters import least_kept
from workers.stage.cuda.inputs import Samples, pinned, upload
from workers.stage.cuda.logprobs import fields, finish
from workers.stage.cuda.masks import MaskBuffer
from workers.stage.masks import Allowed
from workers.stage.slots import LOGPROBS, MIN_P, MIN_TOKENS, TEMPERATURE, TOP_K, TOP_P

PORTION_BYTES = 256 << 20
"""Logits of a portion that exist at one time: as the LM head gives them, and edited in float32."""
MOST_ROWS = 1024
SPLITS = 16
"""Programs that share a row's vocabulary when it is drawn from."""

Int32s = NDArray[np.int32]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Found:
    """What special samples gave, in their order."""

    tokens: Int32s
    chosen: NDArray[np.float32]
    top_ids: Int32s
    top_values: NDArray[np.float32]
    """The last three as in StepResult."""


class Special:
    """`results`: of the last portion, by width; `constrained`: by slot, whether its samples wait for masks."""

    def __init__(self, draw: Draw, itemsize: int, samples: int) -> None:
        """itemsize: of the LM head's logits; samples: most of a step."""
        slots, device = len(draw.last), draw.last.device
        self._draw, self._device = draw, device
        self.edits = Edits(slots, draw.vocabulary, device)
        self._floats = torch.zeros(slots, 6, dtype=torch.float32, device=device)
        self._ints = torch.zeros(slots, 4, dtype=torch.int32, device=device)
        self._ints[:, LOGPROBS] = -1
        self.constrained = np.zeros(slots, np.bool_)
        self._always = np.zeros(slots, np.bool_)
        self._banned_until = np.zeros(slots, np.int32)
        self._wanted = np.full(slots, -1, np.int32)
        fitting = max(1, PORTION_BYTES // (draw.vocabulary * (itemsize + 4)))
        most = min(fitting, MOST_ROWS, 1 << (samples - 1).bit_length())
        self.sizes = [1 << i for i in range(most.bit_length())]
        self._padding_slot = slots - 1
        self._inputs = torch.zeros(4, self.rows, dtype=torch.int32, device=device)
        self._masks = MaskBuffer(self.rows, draw.vocabulary, device)
        self._results = torch.zeros(self.rows * fields(WIDTHS[-1]), dtype=torch.int32, device=device)

    @property
    def rows(self) -> int:
        """Most of a portion."""
        return self.sizes[-1]

    def set_up(self, plan: Plan) -> None:
        """Take in the parameters of slots that have a new sequence."""
        slots, floats, ints = plan.setup_slots, plan.setup_floats.reshape(-1, 6), plan.setup_ints.reshape(-1, 4)
        filtered = (floats[:, TOP_P] < 1) | (floats[:, MIN_P] > 0) | (ints[:, TOP_K] > 0)
        self._wanted[slots] = ints[:, LOGPROBS]
        self._banned_until[slots] = 0
        self._always[slots] = filtered & (floats[:, TEMPERATURE] > 0) | (ints[:, LOGPROBS] >= 0)
        self.edits.set_up(plan)
        edited = [extras.slot for extras in plan.extras]
        self._always[[extras.slot for extras in plan.extras if extras.logit_bias or extras.penalised]] = True
        self.constrained[slots] = False
        self.constrained[[extras.slot for extras in plan.extras if extras.constrained]] = True
        self._always |= self.constrained
        banned = np.isin(slots, edited)
        self._banned_until[slots[banned]] = ints[banned, MIN_TOKENS]
        those = np.flatnonzero(self._always[slots] | banned)
        if len(those):
            arrays = slots[those].astype(np.int64), floats[those], ints[those]
            where, some_floats, some_ints = upload(arrays, self._device)
            self._floats.index_copy_(0, where, some_floats)
            self._ints.index_copy_(0, where, some_ints)

    def among(self, slots: Int32s, outputs: Int32s) -> Bools:
        """Which samples are special. Bans end with the output that they are for."""
        return self._always[slots] | (outputs < self._banned_until[slots])

    def wanted(self, slots: Int32s) -> Int32s:
        """How many log-probabilities the slots ask for beside their token's; -1: not even that."""
        return self._wanted[slots]

    def width(self, wanted: Int32s) -> int:
        """Of the results of rows that want so many; 0 where none wants any, not of its token either."""
        most = int(wanted.max(initial=-1))
        return next(width for width in WIDTHS if most < 0 or 0 < width >= most)

    def size(self, rows: int) -> int:
        """What a portion of `rows` rows is filled up to."""
        return 1 << (rows - 1).bit_length()

    def clear(self) -> None:
        """Every row of slot 0."""
        self._inputs.zero_()

    def fill(self, tokens: NDArray[np.integer], slots: Int32s, outputs: Int32s, allowed: Allowed | None = None) -> None:
        """Copy a portion to the GPU without waiting: of hidden states `tokens`, for `slots`, their outputs.

        allowed: where any of these samples is constrained.
        """
        host = pinned(self._inputs.numel(), torch.int32, self._device).view(4, -1)
        flat = host.numpy()
        flat[0], flat[1], flat[2:] = 0, self._padding_slot, 0
        flat[:3, : len(slots)] = tokens, slots, outputs
        if allowed is not None:
            flat[3, : len(slots)] = self._masks.fill(allowed)
        self._inputs.copy_(host, non_blocking=True)

    def run(self, hidden: Tensor, size: int, width: int) -> None:
        """Draw for the portion, filled up to `size` rows, into `results`. hidden: [tokens, hidden]."""
        samples = Samples(*self._inputs[:3, :size])
        draw, edits = self._draw, self.edits
        raw = draw.head(hidden.index_select(0, samples.tokens))
        x = edits.edited(raw, samples.slots, samples.outputs, self._floats, self._ints)
        # An edit leaves what is not allowed as it is: it makes no difference that this comes after them.
        self._masks.apply(x, self._inputs[3, :size])
        least = least_kept(x, samples.slots, self._floats, self._ints)
        best = draw.best(x, samples.slots, samples.outputs, SPLITS, least)
        finish(raw, best, samples.slots, self._ints, edits.counts, draw.last, self.results(size, width), width)

    def results(self, rows: int, width: int) -> Tensor:
        """Of the last portion: [rows, fields(width)] int32."""
        return self._results[: rows * fields(width)].view(rows, -1)


def found(portions: list[Int32s], wanted: Int32s, width: int) -> Found:
    """What the host makes of the portions' results: [rows, fields(width)] each; wanted: [samples]."""
    results = np.concatenate([np.empty((0, fields(width)), np.int32), *portions])
    floats = results.view(np.float32)
    top = np.arange(width) < wanted[:, None]
    return Found(
        tokens=results[:, 0],
        chosen=floats[wanted >= 0, 1],
        top_ids=results[:, 2 : 2 + width][top],
        top_values=floats[:, 2 + width :][top],
    )
