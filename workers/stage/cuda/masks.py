"""What the matcher does not allow, taken out of the logits of special rows."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from workers.stage.cuda.inputs import pinned
from workers.stage.masks import Allowed

BLOCK = 4096
"""Ids of a program."""


class MaskBuffer:
    """The masks of a portion, where its graph looks for them."""

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        self._words = torch.zeros(rows, -(-vocabulary // 32), dtype=torch.int32, device=device)

    def fill(self, allowed: Allowed) -> NDArray[np.int32]:
        """Copy to the GPU, without waiting, the masks that samples have: [samples], which one, from 1; 0: none."""
        constrained = allowed.constrained
        masks = allowed.bits[allowed.rows[constrained]].view(np.int32)
        host = pinned(masks.size, torch.int32, self._words.device).view(masks.shape)
        host.numpy()[:] = masks
        self._words[: len(masks)].copy_(host, non_blocking=True)
        return np.where(constrained, np.cumsum(constrained), 0).astype(np.int32)

    def apply(self, x: Tensor, which: Tensor) -> None:
        """x: [rows, vocabulary] float32, changed; which: [rows] int32, from `fill`."""
        rows, vocabulary = x.shape
        _mask[(rows, triton.cdiv(vocabulary, BLOCK))](
            x, which, self._words, VOCABULARY=vocabulary, WORDS=self._words.shape[1], BLOCK=BLOCK, num_warps=8
        )


@triton.jit
def _mask(
    x: tl.tensor,
    which: tl.tensor,
    words: tl.tensor,
    VOCABULARY: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    mask = tl.load(which + row).to(tl.int64) - 1
    if mask >= 0:
        ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = ids < VOCABULARY
        word = tl.load(words + mask * WORDS + (ids >> 5), mask=inside, other=0)
        banned = ((word >> (ids & 31)) & 1) == 0
        tl.store(x + row * VOCABULARY + ids, tl.full((BLOCK,), float("-inf"), tl.float32), mask=inside & banned)
