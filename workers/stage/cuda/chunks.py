"""Attention of prefill chunks, over what lies behind a chunk's shared prefix, straight from the page table.

A tile is some tokens of a chunk with all query heads of a KV head; as in `prefix`, tiles are data, and a fixed
number of programs takes them in turn, the longest first.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from workers.stage.cuda.arrange import CHUNK_QUERIES, TILE_FIELDS
from workers.stage.cuda.cache import PagedCache
from workers.stage.cuda.inputs import CHUNK_TILES, DECODE_TILES, HEADER, PREFIX_TILES, Inputs
from workers.stage.cuda.prefix import Partials
from workers.stage.cuda.softmax import LOG2_E, attend_run, merged

BLOCK = 64
"""Keys of one turn of the loop."""


class ChunkAttention:
    def __init__(self, cache: PagedCache, heads: int, table: Tensor, processors: int) -> None:
        """table: [slots, pages of a sequence] int32; processors: of the GPU."""
        self.cache, self.heads, self.table = cache, heads, table
        self._wide = cache.shape.head_dim > 64
        self._programs = (4 if self._wide else 3) * processors

    def run(self, layer: int, q: Tensor, inputs: Inputs, partials: Partials | None, out: Tensor) -> None:
        """Attend with the chunks' tokens of q: [tokens, heads, head_dim], and write theirs of `out`, of its shape.

        partials: of shared prefixes, where there are any.
        """
        shape = self.cache.shape
        keys, values = self.cache.layer(layer)
        found = partials or Partials(q, q)
        _chunks[(self._programs,)](
            q,
            keys,
            values,
            self.table,
            inputs.header,
            inputs.prefix_first,
            inputs.prefix_count,
            found.out,
            found.lse,
            out,
            self.table.stride(0),
            keys.stride(0),
            shape.head_dim**-0.5,
            HEADS=self.heads,
            KV_HEADS=shape.kv_heads,
            DIM=shape.head_dim,
            PAGE=shape.page_size,
            PREFIX=partials is not None,
            DECODE_TILES=DECODE_TILES,
            PREFIX_TILES=PREFIX_TILES,
            CHUNK_TILES=CHUNK_TILES,
            HEADER=HEADER,
            FIELDS=TILE_FIELDS,
            QUERIES=CHUNK_QUERIES,
            BLOCK=BLOCK,
            num_warps=4,
            num_stages=3 if self._wide else 2,
        )


@triton.jit
def _chunks(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    header: tl.tensor,
    prefix_first: tl.tensor,
    prefix_count: tl.tensor,
    prefix_out: tl.tensor,
    prefix_lse: tl.tensor,
    out: tl.tensor,
    table_stride: tl.tensor,
    page_stride: tl.tensor,
    scale: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    PREFIX: tl.constexpr,
    DECODE_TILES: tl.constexpr,
    PREFIX_TILES: tl.constexpr,
    CHUNK_TILES: tl.constexpr,
    HEADER: tl.constexpr,
    FIELDS: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    GROUP: tl.constexpr = HEADS // KV_HEADS
    dims, lane = tl.arange(0, DIM), tl.arange(0, QUERIES)
    factor = scale * LOG2_E
    before = tl.load(header + DECODE_TILES) + tl.load(header + PREFIX_TILES)
    tiles = header + HEADER + before * FIELDS
    for item in range(tl.program_id(0), tl.load(header + CHUNK_TILES) * KV_HEADS, tl.num_programs(0)):
        kv_head = item % KV_HEADS
        tile = tiles + item // KV_HEADS * FIELDS
        pages = table + tl.load(tile).to(tl.int64) * table_stride
        first, count = tl.load(tile + 1), tl.load(tile + 2)
        position, low = tl.load(tile + 3), tl.load(tile + 4) * PAGE
        real = lane < count * GROUP
        at = ((first + lane // GROUP).to(tl.int64) * HEADS + kv_head * GROUP + lane % GROUP) * DIM
        query = tl.load(q + at[:, None] + dims[None, :], mask=real[:, None], other=0.0)
        last = tl.where(real, position + lane // GROUP, -1)
        most = tl.full((QUERIES,), -1e30, tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        acc = tl.zeros((QUERIES, DIM), tl.float32)
        if PREFIX:
            part = tl.load(prefix_first + first + lane // GROUP, mask=real, other=0).to(tl.int64)
            for _ in range(tl.load(prefix_count + first)):
                place = part * HEADS + kv_head * GROUP + lane % GROUP
                found = tl.load(prefix_out + (place * DIM)[:, None] + dims[None, :], mask=real[:, None], other=0.0)
                lse = tl.load(prefix_lse + place, mask=real, other=0.0)
                acc, total, most = merged(acc, total, most, found, lse)
                part += 1
        high = position + count
        acc, total, most = attend_run(
            acc,
            total,
            most,
            query,
            keys,
            values,
            pages,
            low,
            position + 1,
            high,
            last,
            kv_head,
            page_stride,
            factor,
            DIM,
            PAGE,
            BLOCK,
        )
        result = (acc / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + at[:, None] + dims[None, :], result, mask=real[:, None])
