"""The online softmax (Milakov and Gimelshein, 2018) of the attention kernels.

Its state is `acc`: [queries, dim], not normalised, and `total`, `most`: [queries], all float32. Log-sum-exps are
of base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
"""What turns the exponents of a softmax into those of base 2."""


def registers(programs: int) -> int:
    """What a thread may have where a multiprocessor works on so many programs of four warps at once.

    One register more, and one program fewer runs: a third to a half more time.
    """
    return min(255, 65_536 // (128 * programs))


@triton.jit
def attend(
    acc: tl.tensor,
    total: tl.tensor,
    most: tl.tensor,
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    pages: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    last: tl.tensor,
    kv_head: tl.tensor,
    page_stride: tl.tensor,
    factor: tl.tensor,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The state with the keys at positions low to high taken in, BLOCK of them at a time.

    query: [queries, DIM]; pages: a sequence's page table. Where MASKED, query i sees keys up to position last[i]
    only; where not, high - low is a multiple of BLOCK.
    """
    dims, block = tl.arange(0, DIM), tl.arange(0, BLOCK)
    for start in range(low, high, BLOCK):
        key = start + block
        index = pages + key // PAGE
        page = tl.load(index, mask=key < high, other=0) if MASKED else tl.load(index)
        where = (page.to(tl.int64) * page_stride + (kv_head * PAGE + key % PAGE) * DIM)[:, None] + dims[None, :]
        k = tl.load(keys + where, mask=(key < high)[:, None], other=0.0) if MASKED else tl.load(keys + where)
        v = tl.load(values + where, mask=(key < high)[:, None], other=0.0) if MASKED else tl.load(values + where)
        acc, total, most = _taken(acc, total, most, query, k, v, key, last, factor, MASKED)
    return acc, total, most


@triton.jit
def attend_run(
    acc: tl.tensor,
    total: tl.tensor,
    most: tl.tensor,
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    pages: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    real: tl.tensor,
    kv_head: tl.tensor,
    page_stride: tl.tensor,
    factor: tl.tensor,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """As `attend`, where every query that is `real` sees all keys."""
    whole = low + (high - low) // BLOCK * BLOCK
    last = tl.where(real, high - 1, -1)
    acc, total, most = attend(
        acc,
        total,
        most,
        query,
        keys,
        values,
        pages,
        low,
        whole,
        last,
        kv_head,
        page_stride,
        factor,
        DIM,
        PAGE,
        BLOCK,
        False,
    )
    acc, total, most = attend(
        acc,
        total,
        most,
        query,
        keys,
        values,
        pages,
        whole,
        high,
        last,
        kv_head,
        page_stride,
        factor,
        DIM,
        PAGE,
        BLOCK,
        True,
    )
    return acc, total, most


@triton.jit
def attend_dense(
    acc: tl.tensor,
    total: tl.tensor,
    most: tl.tensor,
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    last: tl.tensor,
    factor: tl.tensor,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """As `attend`, with keys and values that lie one behind another. keys, values: those of position 0."""
    dims, block = tl.arange(0, DIM), tl.arange(0, BLOCK)
    for start in range(low, high, BLOCK):
        key = start + block
        at_k, at_v = (key * key_stride)[:, None] + dims[None, :], (key * value_stride)[:, None] + dims[None, :]
        k = tl.load(keys + at_k, mask=(key < high)[:, None], other=0.0) if MASKED else tl.load(keys + at_k)
        v = tl.load(values + at_v, mask=(key < high)[:, None], other=0.0) if MASKED else tl.load(values + at_v)
        acc, total, most = _taken(acc, total, most, query, k, v, key, last, factor, MASKED)
    return acc, total, most


@triton.jit
def _taken(
    acc: tl.tensor,
    total: tl.tensor,
    most: tl.tensor,
    query: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    key: tl.tensor,
    last: tl.tensor,
    factor: tl.tensor,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The state with the keys at positions `key` taken in. k, v: [keys, DIM]."""
    scores = tl.dot(query, tl.trans(k))
    if MASKED:
        scores = tl.where(key[None, :] <= last[:, None], scores, float("-inf"))
    # Scaled in the exponent, where it costs nothing.
    higher = tl.maximum(most, tl.max(scores, axis=1) * factor)
    weights = tl.exp2(scores * factor - higher[:, None])
    keep = tl.exp2(most - higher)
    acc = tl.dot(weights.to(v.dtype), v, acc * keep[:, None])
    return acc, total * keep + tl.sum(weights, axis=1), higher


@triton.jit
def merged(
    acc: tl.tensor, total: tl.tensor, most: tl.tensor, part: tl.tensor, lse: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The state with a finished part of attention taken in. part: [queries, dim]; lse: [queries]."""
    higher = tl.maximum(most, lse)
    keep, add = tl.exp2(most - higher), tl.exp2(lse - higher)
    return acc * keep[:, None] + part * add[:, None], total * keep + add, higher
