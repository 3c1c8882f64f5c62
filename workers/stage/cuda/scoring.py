"""Log-probabilities of prompts on a GPU, a portion of a step's tokens at a time.

A portion is one upload, one graph and one copy of its results, and nothing waits for the GPU. All portions are of one
size, which bounds the memory that their logits take.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from workers.stage.batch import Ints
from workers.stage.cuda.buckets import WIDTHS, filled
from workers.stage.cuda.inputs import pinned
from workers.stage.layers import Linear
from workers.stage.scoring import Gathering, Wanted, likely, packed

PORTION_BYTES = 256 << 20
"""Logits of a portion that exist at one time: as the LM head gives them, and copies in float32."""
MOST_ROWS = 1024


class Scoring:
    def __init__(self, head: Linear, ids: range, device: torch.device, itemsize: int, ranks: Gathering) -> None:
        """ids: what head has logits of, each of `ranks` another share; itemsize: of the logits."""
        self._head, self._ids, self._ranks, self._device = head, ids, ranks, device
        # Beside the logits, their exponentials and what these are taken of.
        fitting = max(1, PORTION_BYTES // (len(ids) * (itemsize + 8)))
        self.rows = min(MOST_ROWS, 1 << (fitting.bit_length() - 1))
        """Of a portion."""
        self._inputs = torch.zeros(2, self.rows, dtype=torch.int32, device=device)
        self._results = torch.zeros(self.rows * (1 + 2 * self._named(WIDTHS[-1])), dtype=torch.int32, device=device)

    def _named(self, width: int) -> int:
        return min(width, len(self._ids) * self._ranks.ranks)

    def width(self, most: Ints) -> int:
        """What results are filled up to that name so many of the most likely ids, at most."""
        return filled(WIDTHS, int(most.max(initial=0)))

    def clear(self) -> None:
        """Every row of the first token."""
        self._inputs.zero_()

    def score(self, asked: Wanted, run: Callable[[int], None]) -> list[Tensor]:
        """Results of portions, as `unpacked` takes them; run: has `run` called for the portion, given the width."""
        results, width = [], self.width(asked.likely)
        for part in asked.portions(self.rows):
            self._fill(part)
            run(width)
            # A copy: the next portion writes over it.
            results.append(self._found(width)[: len(part.ids)].clone())
        return results

    def _fill(self, part: Wanted) -> None:
        """Copy a portion to the GPU without waiting."""
        host = pinned(self._inputs.numel(), torch.int32, self._device).view(2, -1)
        flat = host.numpy()
        flat[:] = 0
        flat[0, : len(part.ids)], flat[1, : len(part.ids)] = part.tokens, part.ids
        self._inputs.copy_(host, non_blocking=True)

    def run(self, hidden: Tensor, width: int) -> None:
        """Score the portion. hidden: [tokens, hidden]; width: of `WIDTHS`."""
        tokens, ids = self._inputs
        logits = self._head(hidden.index_select(0, tokens))
        found = likely(logits, ids.long(), self._named(width), self._ids.start, self._ranks)
        self._found(width).copy_(packed(*found))

    def _found(self, width: int) -> Tensor:
        """Results of the last portion: [rows, 1 + 2 * named ids] int32."""
        fields = 1 + 2 * self._named(width)
        return self._results[: self.rows * fields].view(self.rows, fields)
