"""The end of a special row: its token put down and counted, and the log-probabilities that it asks for."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from workers.stage.cuda.draw import Best
from workers.stage.cuda.filters import BLOCK, PIVOTS, blocks, ordered, search, survey


def fields(width: int) -> int:
    """Numbers of a result: the token, the log-probability of it, `width` ids, and their log-probabilities."""
    return 2 + 2 * width


def finish(
    raw: Tensor, best: Best, slots: Tensor, ints: Tensor, counts: Tensor, last: Tensor, out: Tensor, width: int
) -> None:
    """Write each row's result to `out`, and its token to `last`.

    raw: [rows, vocabulary], not edited; slots: [rows] int32; ints: by slot, with the columns of Plan's `setup_ints`;
    counts: of `Edits`; last: [slots] int64; out: [rows, fields(width)] int32, float32 where log-probabilities stand,
    of which a row has as many as its slot wants. width: a power of two not below that, or 0 where none wants any.
    """
    rows, vocabulary = raw.shape
    peaks = best.scores.new_empty(rows, blocks(vocabulary) if width else 1)
    ranked = last.new_empty(rows, max(1, width))
    _finish[(rows,)](
        raw,
        best.scores,
        best.ids,
        slots,
        ints,
        counts,
        last,
        peaks,
        ranked,
        out,
        VOCABULARY=vocabulary,
        SPLITS=best.ids.shape[1],
        WIDTH=width,
        BLOCK=BLOCK,
        PIVOTS=PIVOTS,
        num_warps=8 if width else 1,
    )


@triton.jit
def _finish(
    raw: tl.tensor,
    scores: tl.tensor,
    ids: tl.tensor,
    slots: tl.tensor,
    ints: tl.tensor,
    counts: tl.tensor,
    last: tl.tensor,
    peaks: tl.tensor,
    ranked: tl.tensor,
    out: tl.tensor,
    VOCABULARY: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
) -> None:
    row, split = tl.program_id(0).to(tl.int64), tl.arange(0, SPLITS)
    slot = tl.load(slots + row).to(tl.int64)
    token = tl.load(ids + row * SPLITS + tl.argmax(tl.load(scores + row * SPLITS + split), axis=0))
    tl.store(last + slot, token.to(tl.int64))
    result = out + row * (2 + 2 * WIDTH)
    tl.store(result, token)
    address = tl.load(counts + slot)
    if address != 0:
        counted = address.to(tl.pointer_type(tl.int32)) + token
        tl.atomic_add(counted, 2)
    if WIDTH > 0:
        wanted = tl.load(ints + slot * 4 + 2)
        if wanted >= 0:
            x, mine = raw + row * VOCABULARY, peaks + row * ((VOCABULARY + BLOCK - 1) // BLOCK)
            low, high = survey(x, mine, VOCABULARY, BLOCK)
            shift = high + tl.log(_mass(x, high, VOCABULARY, BLOCK))
            chosen = tl.load(x + token).to(tl.float32) - shift
            tl.store(result + 1, chosen.to(tl.int32, bitcast=True))
            if wanted > 0:
                least = search(x, mine, low, high, wanted.to(tl.float32), high, False, VOCABULARY, BLOCK, PIVOTS)
                top = ranked + row * WIDTH
                none = tl.full((), 0, tl.int32)
                above = _collect(x, mine, least, True, top, none, wanted, VOCABULARY, BLOCK)
                _collect(x, mine, least, False, top, above, wanted, VOCABULARY, BLOCK)
                tl.debug_barrier()
                place = tl.arange(0, WIDTH)
                best = tl.load(top + place, mask=place < wanted, other=0)
                rank = tl.zeros((WIDTH,), tl.int32)
                for other in range(wanted):
                    rank += (tl.load(top + other) > best).to(tl.int32)
                value = ordered((best >> 32).to(tl.int32)).to(tl.float32, bitcast=True) - shift
                tl.store(result + 2 + rank, 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32), mask=place < wanted)
                tl.store(result + 2 + WIDTH + rank, value.to(tl.int32, bitcast=True), mask=place < wanted)


@triton.jit
def _mass(x: tl.tensor, high: tl.tensor, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, VOCABULARY, BLOCK):
        values = tl.load(x + start + lane, mask=start + lane < VOCABULARY, other=float("-inf")).to(tl.float32)
        total += tl.exp(values - high)
    return tl.sum(total, axis=0)


@triton.jit
def _collect(
    x: tl.tensor,
    peaks: tl.tensor,
    least: tl.tensor,
    ABOVE: tl.constexpr,
    top: tl.tensor,
    count: tl.tensor,
    wanted: tl.tensor,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Put the ids whose value is above `least`, or else is `least`, behind the first `count` of `top`, up to `wanted`.

    With their values, so that they can be ranked: the greatest value first, and of equal ones the lowest id.
    Returns how many there are then.
    """
    lane = tl.arange(0, BLOCK)
    for block in range((VOCABULARY + BLOCK - 1) // BLOCK):
        if tl.load(peaks + block) >= least:
            ids = block * BLOCK + lane
            values = tl.load(x + ids, mask=ids < VOCABULARY, other=float("-inf")).to(tl.float32)
            hit = (values > least).to(tl.int32) if ABOVE else (values == least).to(tl.int32)
            place = count + tl.cumsum(hit, axis=0) - 1
            # A zero has one form.
            order = ordered((values + 0.0).to(tl.int32, bitcast=True)).to(tl.int64)
            tl.store(top + place, (order << 32) | (0x7FFFFFFF - ids), mask=(hit > 0) & (place < wanted))
            count += tl.sum(hit, axis=0)
    return count
