"""Attention of rows with one query each, straight from the page table on the GPU: nothing to plan or index.

A program takes one row and one KV head with all its query heads, and walks over the row's keys. Few rows are
split over their keys, so that all multiprocessors work; a second kernel merges. A shared prefix is merged for
nothing: what `prefix` found of it is where the softmax begins.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.stage.cuda.cache import PagedCache
from workers.stage.cuda.inputs import ROWS, Inputs
from workers.stage.cuda.prefix import Partials
from workers.stage.cuda.softmax import attend, merged

BLOCK = 128
"""Keys of one turn of the loop."""
MOST_SPLITS = 32
PROGRAMS_PER_PROCESSOR = 4
"""Programs that keep a multiprocessor busy: fewer rows than that are split."""


class DecodeAttention:
    def __init__(self, cache: PagedCache, heads: int, table: Tensor, processors: int) -> None:
        """table: [slots, pages of a sequence] int32; processors: of the GPU."""
        self.cache, self.heads, self.table = cache, heads, table
        self._wanted = processors * PROGRAMS_PER_PROCESSOR

    def splits(self, rows: int) -> int:
        return min(MOST_SPLITS, -(-self._wanted // (rows * self.cache.shape.kv_heads)))

    def run(self, layer: int, q: Tensor, rows: int, inputs: Inputs, partials: Partials | None, out: Tensor) -> None:
        """Attend with the first tokens of q: [tokens, heads, head_dim], and write theirs of `out`, of its shape.

        rows: most there may be; how many there are is in the inputs' header. partials: of shared prefixes,
        where there are any.
        """
        shape, splits = self.cache.shape, self.splits(rows)
        keys, values = self.cache.layer(layer)
        found = partials or Partials(q, q)
        pieces, pieces_lse = out, out
        if splits > 1:
            pieces = torch.empty(rows, splits, self.heads, shape.head_dim, dtype=torch.float32, device=q.device)
            pieces_lse = torch.empty(rows, splits, self.heads, dtype=torch.float32, device=q.device)
        group = self.heads // shape.kv_heads
        sizes = {"HEADS": self.heads, "DIM": shape.head_dim, "PREFIX": partials is not None, "ROWS": ROWS}
        prefix = (inputs.header, inputs.prefix_first, inputs.prefix_count, found.out, found.lse)
        _decode[(rows, shape.kv_heads, splits)](
            q,
            keys,
            values,
            self.table,
            inputs.slots,
            inputs.positions,
            inputs.shared,
            *prefix,
            pieces,
            pieces_lse,
            self.table.stride(0),
            keys.stride(0),
            shape.head_dim**-0.5,
            **sizes,
            GROUP=group,
            GROUP_PAD=max(16, triton.next_power_of_2(group)),
            PAGE=shape.page_size,
            BLOCK=BLOCK,
            SPLIT=splits > 1,
            num_warps=4,
            num_stages=3,
        )
        if splits > 1:
            _combine[(rows, self.heads)](pieces, pieces_lse, *prefix, out, splits, **sizes, num_warps=1)


@triton.jit
def _decode(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    shared: tl.tensor,
    header: tl.tensor,
    prefix_first: tl.tensor,
    prefix_count: tl.tensor,
    prefix_out: tl.tensor,
    prefix_lse: tl.tensor,
    out: tl.tensor,
    lse_out: tl.tensor,
    table_stride: tl.tensor,
    page_stride: tl.tensor,
    scale: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PREFIX: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if row >= tl.load(header + ROWS):
        return
    low, high = 0, tl.load(positions + row) + 1
    if PREFIX:
        low = tl.load(shared + row)
    if SPLIT:
        share = tl.cdiv(tl.cdiv(high - low, tl.num_programs(2)), BLOCK) * BLOCK
        low += tl.program_id(2) * share
        high = tl.minimum(high, low + share)
    group, dims = tl.arange(0, GROUP_PAD), tl.arange(0, DIM)
    real = group < GROUP
    at = (kv_head * GROUP + group)[:, None] * DIM + dims[None, :]
    query = tl.load(q + row * HEADS * DIM + at, mask=real[:, None], other=0.0)
    most = tl.full((GROUP_PAD,), -1e30, tl.float32)
    total = tl.zeros((GROUP_PAD,), tl.float32)
    acc = tl.zeros((GROUP_PAD, DIM), tl.float32)
    if PREFIX and not SPLIT:
        first = tl.load(prefix_first + row).to(tl.int64)
        for part in range(tl.load(prefix_count + row)):
            found = tl.load(prefix_out + (first + part) * HEADS * DIM + at, mask=real[:, None], other=0.0)
            lse = tl.load(prefix_lse + (first + part) * HEADS + kv_head * GROUP + group, mask=real, other=0.0)
            acc, total, most = merged(acc, total, most, found, lse)
    pages = table + tl.load(slots + row).to(tl.int64) * table_stride
    factor = scale * 1.4426950408889634
    last = tl.full((GROUP_PAD,), 0, tl.int32) + high - 1
    acc, total, most = attend(
        acc,
        total,
        most,
        query,
        keys,
        values,
        pages,
        low,
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
    if SPLIT:
        piece = row * tl.num_programs(2) + tl.program_id(2)
        safe = tl.where(total > 0, total, 1.0)
        tl.store(out + piece * HEADS * DIM + at, acc / safe[:, None], mask=real[:, None])
        lse = tl.where(total > 0, most + tl.log2(safe), float("-inf"))
        tl.store(lse_out + piece * HEADS + kv_head * GROUP + group, lse, mask=real)
    else:
        tl.store(out + row * HEADS * DIM + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=real[:, None])


@triton.jit
def _combine(
    pieces: tl.tensor,
    pieces_lse: tl.tensor,
    header: tl.tensor,
    prefix_first: tl.tensor,
    prefix_count: tl.tensor,
    prefix_out: tl.tensor,
    prefix_lse: tl.tensor,
    out: tl.tensor,
    splits: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PREFIX: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Merge a row's splits, and its shared prefix where it has one, for one head."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if row >= tl.load(header + ROWS):
        return
    one, dims = tl.arange(0, 1), tl.arange(0, DIM)
    most = tl.full((1,), -1e30, tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((1, DIM), tl.float32)
    for split in range(splits):
        at = (row * splits + split) * HEADS + head
        part = tl.load(pieces + at * DIM + dims)[None, :]
        acc, total, most = merged(acc, total, most, part, tl.load(pieces_lse + at + one))
    if PREFIX:
        first = tl.load(prefix_first + row).to(tl.int64)
        for split in range(tl.load(prefix_count + row)):
            at = (first + split) * HEADS + head
            part = tl.load(prefix_out + at * DIM + dims)[None, :]
            acc, total, most = merged(acc, total, most, part, tl.load(prefix_lse + at + one))
    result = tl.sum(acc / total[:, None], axis=0)
    tl.store(out + (row * HEADS + head) * DIM + dims, result.to(out.dtype.element_ty))
