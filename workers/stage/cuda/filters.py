"""The lowest logit of a row that min-p, top-k and top-p keep, found without sorting.

What is looked for is always the greatest value that the ids at or above it weigh enough: as many as k, or a share
of the probability. A pass over the row weighs it at several values at once, and the next one looks between two of
them. The first passes lay these evenly over what is left, which suits logits; the later ones evenly over the floats
there are between, which ends whatever the logits are. Blocks of the row that hold nothing so great are passed over,
which are most of them as soon as the search has come near the likely ids.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.stage.cuda.softmax import LOG2_E

PIVOTS = 8
"""Values at which a pass weighs a row. More make fewer passes that each take longer."""
BLOCK = 1024


def blocks(vocabulary: int) -> int:
    return -(-vocabulary // BLOCK)


def least_kept(logits: Tensor, slots: Tensor, floats: Tensor, ints: Tensor) -> Tensor:
    """The lowest value of each row that its slot's filters keep: [rows], -inf where it has none.

    logits: [rows, vocabulary] float32, edited, not divided by the temperature; slots: [rows] int32; floats, ints:
    by slot, with the columns of Plan's `setup_*`.
    """
    rows, vocabulary = logits.shape
    least = torch.empty(rows, dtype=torch.float32, device=logits.device)
    peaks = torch.empty(rows, blocks(vocabulary), dtype=torch.float32, device=logits.device)
    _least_kept[(rows,)](
        logits, slots, floats, ints, peaks, least, VOCABULARY=vocabulary, BLOCK=BLOCK, PIVOTS=PIVOTS, num_warps=8
    )
    return least


@triton.jit
def ordered(bits: tl.tensor) -> tl.tensor:
    """Of a float's bits, int32, a number with the floats' order; and the other way round."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def survey(
    x: tl.tensor, peaks: tl.tensor, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The least finite and the greatest value of a row; the greatest of each block goes to `peaks`."""
    lane = tl.arange(0, BLOCK)
    low = tl.full((BLOCK,), float("inf"), tl.float32)
    high = tl.full((BLOCK,), float("-inf"), tl.float32)
    for block in range((VOCABULARY + BLOCK - 1) // BLOCK):
        ids = block * BLOCK + lane
        values = tl.load(x + ids, mask=ids < VOCABULARY, other=float("-inf")).to(tl.float32)
        tl.store(peaks + block, tl.max(values, axis=0))
        low = tl.minimum(low, tl.where(values > float("-inf"), values, float("inf")))
        high = tl.maximum(high, values)
    # The peaks are read by all threads, and were written by one.
    tl.debug_barrier()
    return tl.min(low, axis=0), tl.max(high, axis=0)


@triton.jit
def search(
    x: tl.tensor,
    peaks: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    amount: tl.tensor,
    rate: tl.tensor,
    WEIGHTED: tl.constexpr,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
) -> tl.tensor:
    """The greatest value in a row such that the ids at or above it weigh `amount`; `low` if those above `low` do not.

    An id weighs 1, and where WEIGHTED 2^(rate * (x - high)), and `amount` is a share of what all ids at or above
    `low` weigh. low: finite; high: the row's greatest value; peaks: from `survey`.
    """
    lane, pivot = tl.arange(0, BLOCK), tl.arange(0, PIVOTS)
    # What is looked for is at or above `low`, and below `limit`.
    limit = ordered(ordered(high.to(tl.int32, bitcast=True)) + 1).to(tl.float32, bitcast=True)
    found = low >= high
    turn = 0
    # 4 turns over values, 12 over 2^32 floats, of which each leaves a ninth; one more for a single float that is left.
    while (not found) & (turn < 20):
        first = ordered(low.to(tl.int32, bitcast=True)).to(tl.int64)
        last = ordered(limit.to(tl.int32, bitcast=True)).to(tl.int64)
        between = ordered((first + (last - first) * (pivot + 1) // (PIVOTS + 1)).to(tl.int32))
        even = low + (limit - low) * ((pivot + 1).to(tl.float32) / (PIVOTS + 1))
        pivots = tl.where(turn < 4, even, between.to(tl.float32, bitcast=True))
        weights = tl.zeros((PIVOTS, BLOCK), tl.float32)
        whole = tl.zeros((BLOCK,), tl.float32)
        lowest = tl.full((BLOCK,), float("inf"), tl.float32)
        highest = tl.full((BLOCK,), float("-inf"), tl.float32)
        for block in range((VOCABULARY + BLOCK - 1) // BLOCK):
            if tl.load(peaks + block) >= low:
                ids = block * BLOCK + lane
                values = tl.load(x + ids, mask=ids < VOCABULARY, other=float("-inf")).to(tl.float32)
                weight = tl.exp2((values - high) * rate) if WEIGHTED else tl.full((BLOCK,), 1.0, tl.float32)
                reached = values >= low
                weights += tl.where(values[None, :] >= pivots[:, None], weight[None, :], 0.0)
                whole += tl.where(reached, weight, 0.0)
                lowest = tl.minimum(lowest, tl.where(reached, values, float("inf")))
                highest = tl.maximum(highest, tl.where(values < limit, values, float("-inf")))
        total = tl.sum(whole, axis=0)
        if WEIGHTED:
            amount = tl.where(turn == 0, amount * total, amount)
        enough = tl.sum(weights, axis=1) >= amount
        least, most = tl.min(lowest, axis=0), tl.max(highest, axis=0)
        above = ordered(ordered(most.to(tl.int32, bitcast=True)) + 1).to(tl.float32, bitcast=True)
        found = (least >= most) | (total < amount)
        low = tl.maximum(least, tl.max(tl.where(enough, pivots, float("-inf")), axis=0))
        limit = tl.minimum(tl.minimum(limit, above), tl.min(tl.where(enough, float("inf"), pivots), axis=0))
        turn += 1
    return low


@triton.jit
def _least_kept(
    logits: tl.tensor,
    slots: tl.tensor,
    floats: tl.tensor,
    ints: tl.tensor,
    peaks: tl.tensor,
    least_out: tl.tensor,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    temperature, top_p = tl.load(floats + slot * 6), tl.load(floats + slot * 6 + 1)
    min_p, top_k = tl.load(floats + slot * 6 + 2), tl.load(ints + slot * 4)
    limited = (top_k > 0) & (top_k < VOCABULARY)
    least = tl.full((), float("-inf"), tl.float32)
    if (temperature > 0) & (limited | (top_p < 1) | (min_p > 0)):
        x, mine = logits + row * VOCABULARY, peaks + row * ((VOCABULARY + BLOCK - 1) // BLOCK)
        low, high = survey(x, mine, VOCABULARY, BLOCK)
        if min_p > 0:
            low = tl.maximum(low, high + temperature * tl.log(min_p))
        if limited:
            low = search(x, mine, low, high, top_k.to(tl.float32), high, False, VOCABULARY, BLOCK, PIVOTS)
        if top_p < 1:
            rate = LOG2_E / temperature
            low = search(x, mine, low, high, top_p, rate, True, VOCABULARY, BLOCK, PIVOTS)
        least = low
    tl.store(least_out + row, least)
