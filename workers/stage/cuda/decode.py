"""Attention of rows with one query each, straight from the page table on the GPU: nothing to plan or index.

A program takes one tile and one KV head with all its query heads, and walks over the tile's keys. A row whose keys
are cut in pieces, so that all multiprocessors work, is merged by the program that finishes its last piece. A shared
prefix is merged for nothing: what `prefix` found of it is where the softmax begins.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.stage.cuda.arrange import MOST_PIECES, TILE_FIELDS, extra_tiles
from workers.stage.cuda.cache import PagedCache
from workers.stage.cuda.inputs import DECODE_TILES, HEADER, Inputs
from workers.stage.cuda.prefix import Partials
from workers.stage.cuda.softmax import LOG2_E, attend, merged

BLOCK = 64
"""Keys of one turn of the loop. Many rows hide each other's waiting for memory; ..."""
FEW_NUMBERS = 8192
"""... where few wait, each asks for so many numbers of its keys in a turn."""


class DecodeAttention:
    def __init__(self, cache: PagedCache, heads: int, table: Tensor, processors: int) -> None:
        """table: [slots, pages of a sequence] int32; processors: of the GPU."""
        self.cache, self.heads, self.table = cache, heads, table
        shape, device = cache.shape, table.device
        self._extra = extra_tiles(processors, shape.kv_heads)
        pieces = 2 * self._extra
        self._pieces = Partials(
            torch.empty(pieces, heads, shape.head_dim, dtype=torch.float32, device=device),
            torch.empty(pieces, heads, dtype=torch.float32, device=device),
        )
        self._finished = torch.zeros(pieces, shape.kv_heads, dtype=torch.int32, device=device)
        """Pieces of a row that are done, at its first piece: all 0 between two launches."""

    def run(
        self, layer: int, q: Tensor, rows: int, few: bool, inputs: Inputs, partials: Partials | None, out: Tensor
    ) -> None:
        """Attend with the first tokens of q: [tokens, heads, head_dim], and write theirs of `out`, of its shape.

        rows: most there may be; how many tiles they make is in the inputs' header. few: whether they are likely
        to be too few to fill the GPU. partials: of shared prefixes, where there are any.
        """
        shape = self.cache.shape
        keys, values = self.cache.layer(layer)
        found = partials or Partials(q, q)
        group = self.heads // shape.kv_heads
        _decode[(rows + self._extra, shape.kv_heads)](
            q,
            keys,
            values,
            self.table,
            inputs.header,
            inputs.prefix_first,
            inputs.prefix_count,
            found.out,
            found.lse,
            self._pieces.out,
            self._pieces.lse,
            self._finished,
            out,
            self.table.stride(0),
            keys.stride(0),
            shape.head_dim**-0.5,
            HEADS=self.heads,
            DIM=shape.head_dim,
            PREFIX=partials is not None,
            DECODE_TILES=DECODE_TILES,
            HEADER=HEADER,
            FIELDS=TILE_FIELDS,
            GROUP=group,
            GROUP_PAD=max(16, triton.next_power_of_2(group)),
            PIECES=MOST_PIECES,
            PAGE=shape.page_size,
            BLOCK=FEW_NUMBERS // shape.head_dim if few else BLOCK,
            num_warps=4,
            num_stages=3,
        )


@triton.jit
def _decode(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    header: tl.tensor,
    prefix_first: tl.tensor,
    prefix_count: tl.tensor,
    prefix_out: tl.tensor,
    prefix_lse: tl.tensor,
    pieces_out: tl.tensor,
    pieces_lse: tl.tensor,
    finished: tl.tensor,
    out: tl.tensor,
    table_stride: tl.tensor,
    page_stride: tl.tensor,
    scale: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PREFIX: tl.constexpr,
    DECODE_TILES: tl.constexpr,
    HEADER: tl.constexpr,
    FIELDS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    PIECES: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    number, kv_head = tl.program_id(0), tl.program_id(1)
    if number >= tl.load(header + DECODE_TILES):
        return
    tile = header + HEADER + number * FIELDS
    row, slot = tl.load(tile).to(tl.int64), tl.load(tile + 1).to(tl.int64)
    low, high = tl.load(tile + 2) * PAGE, tl.load(tile + 3)
    count, which, first_piece = tl.load(tile + 4), tl.load(tile + 5), tl.load(tile + 6)
    group, dims = tl.arange(0, GROUP_PAD), tl.arange(0, DIM)
    real = group < GROUP
    at = (kv_head * GROUP + group)[:, None] * DIM + dims[None, :]
    query = tl.load(q + row * HEADS * DIM + at, mask=real[:, None], other=0.0)
    most = tl.full((GROUP_PAD,), -1e30, tl.float32)
    total = tl.zeros((GROUP_PAD,), tl.float32)
    acc = tl.zeros((GROUP_PAD, DIM), tl.float32)
    if PREFIX:
        # A row in pieces takes its prefix in when they are merged.
        first = tl.load(prefix_first + row).to(tl.int64)
        for part in range(tl.where(count == 1, tl.load(prefix_count + row), 0)):
            found = tl.load(prefix_out + (first + part) * HEADS * DIM + at, mask=real[:, None], other=0.0)
            lse = tl.load(prefix_lse + (first + part) * HEADS + kv_head * GROUP + group, mask=real, other=0.0)
            acc, total, most = merged(acc, total, most, found, lse)
    pages = table + slot * table_stride
    factor = scale * LOG2_E
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
    result = acc / total[:, None]
    if count == 1:
        tl.store(out + row * HEADS * DIM + at, result.to(out.dtype.element_ty), mask=real[:, None])
    else:
        piece = first_piece + which
        tl.store(pieces_out + piece * HEADS * DIM + at, result, mask=real[:, None])
        tl.store(pieces_lse + piece * HEADS + kv_head * GROUP + group, most + tl.log2(total), mask=real)
        # All threads have stored before one of them says so.
        tl.debug_barrier()
        counter = finished + first_piece * (HEADS // GROUP) + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel") == count - 1:
            tl.store(counter, 0)
            for head in range(kv_head * GROUP, kv_head * GROUP + GROUP):
                _merge(
                    pieces_out,
                    pieces_lse,
                    first_piece,
                    count,
                    prefix_first + row,
                    prefix_count + row,
                    prefix_out,
                    prefix_lse,
                    out + (row * HEADS + head) * DIM,
                    head,
                    HEADS,
                    DIM,
                    PREFIX,
                    PIECES,
                )


@triton.jit
def _merge(
    pieces_out: tl.tensor,
    pieces_lse: tl.tensor,
    first_piece: tl.tensor,
    count: tl.tensor,
    prefix_first: tl.tensor,
    prefix_count: tl.tensor,
    prefix_out: tl.tensor,
    prefix_lse: tl.tensor,
    out: tl.tensor,
    head: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PREFIX: tl.constexpr,
    PIECES: tl.constexpr,
) -> None:
    """Merge the pieces of a row, which other programs wrote, and its shared prefix, if it has one, for one head."""
    dims, which = tl.arange(0, DIM), tl.arange(0, PIECES)
    places = (first_piece + which) * HEADS + head
    held = which < count
    lse = tl.load(pieces_lse + places, mask=held, other=float("-inf"), cache_modifier=".cg")
    parts = tl.load(
        pieces_out + places[:, None] * DIM + dims[None, :], mask=held[:, None], other=0.0, cache_modifier=".cg"
    )
    one = tl.zeros((1,), tl.float32)
    most = one + tl.max(lse, axis=0)
    weights = tl.exp2(lse - tl.max(lse, axis=0))
    total = one + tl.sum(weights, axis=0)
    acc = tl.sum(parts * weights[:, None], axis=0)[None, :]
    if PREFIX:
        first = tl.load(prefix_first).to(tl.int64)
        for split in range(tl.load(prefix_count)):
            place = (first + split) * HEADS + head
            found = tl.load(prefix_out + place * DIM + dims)[None, :]
            acc, total, most = merged(acc, total, most, found, one + tl.load(prefix_lse + place))
    tl.store(out + dims, tl.sum(acc / total[:, None], axis=0).to(out.dtype.element_ty))
