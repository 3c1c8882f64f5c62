"""Attention of prefill chunks, over what lies behind a chunk's shared prefix: what earlier steps left from the page
table, the chunk's own keys and values from where the step has just put them, which costs a seventh less.

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
from workers.stage.cuda.softmax import LOG2_E, attend_dense, attend_run, merged, registers

BLOCK = 64
"""Keys of one turn of the loop."""


class ChunkAttention:
    def __init__(self, cache: PagedCache, heads: int, table: Tensor, processors: int) -> None:
        """table: [slots, pages of a sequence] int32; processors: of the GPU."""
        self.cache, self.heads, self.table = cache, heads, table
        self._wide = cache.shape.head_dim > 64
        self._per_processor = 2 if self._wide else 4
        self._processors = processors

    def run(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, inputs: Inputs, partials: Partials | None, out: Tensor
    ) -> None:
        """Attend with the chunks' tokens of q: [tokens, heads, head_dim], and write theirs of `out`, of its shape.

        k, v: [tokens, kv_heads, head_dim], of the step's tokens; partials: of shared prefixes, where there are any.
        """
        shape = self.cache.shape
        keys, values = self.cache.layer(layer)
        found = partials or Partials(q, q)
        _chunks[(self._per_processor * self._processors,)](
            q,
            k,
            v,
            keys,
            values,
            self.table,
            inputs.header,
            inputs.prefix_first,
            inputs.prefix_count,
            found.out,
            found.lse,
            out,
            k.stride(0),
            v.stride(0),
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
            maxnreg=registers(self._per_processor),
        )


@triton.jit
def _chunks(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    header: tl.tensor,
    prefix_first: tl.tensor,
    prefix_count: tl.tensor,
    prefix_out: tl.tensor,
    prefix_lse: tl.tensor,
    out: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
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
    items, programs = tl.load(header + CHUNK_TILES) * KV_HEADS, tl.num_programs(0)
    for turn in range(tl.cdiv(items, programs)):
        # Back and forth, so that no program gets the longest of every turn.
        item = turn * programs + tl.where(turn % 2 == 0, tl.program_id(0), programs - 1 - tl.program_id(0))
        if item < items:
            kv_head = item % KV_HEADS
            tile = tiles + item // KV_HEADS * FIELDS
            pages = table + tl.load(tile).to(tl.int64) * table_stride
            first, count = tl.load(tile + 1), tl.load(tile + 2)
            position, low, begin = tl.load(tile + 3), tl.load(tile + 4) * PAGE, tl.load(tile + 5)
            real = lane < count * GROUP
            at = ((first + lane // GROUP).to(tl.int64) * HEADS + kv_head * GROUP + lane % GROUP) * DIM
            query = tl.load(q + at[:, None] + dims[None, :], mask=real[:, None], other=0.0)
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
            acc, total, most = attend_run(
                acc,
                total,
                most,
                query,
                keys,
                values,
                pages,
                low,
                begin,
                real,
                kv_head,
                page_stride,
                factor,
                DIM,
                PAGE,
                BLOCK,
            )
            origin = (first - position).to(tl.int64)
            own_keys = k + origin * key_stride + kv_head * DIM
            own_values = v + origin * value_stride + kv_head * DIM
            last = tl.where(real, position + lane // GROUP, -1)
            whole = begin + (position + 1 - begin) // BLOCK * BLOCK
            acc, total, most = attend_dense(
                acc,
                total,
                most,
                query,
                own_keys,
                own_values,
                key_stride,
                value_stride,
                begin,
                whole,
                last,
                factor,
                DIM,
                BLOCK,
                False,
            )
            acc, total, most = attend_dense(
                acc,
                total,
                most,
                query,
                own_keys,
                own_values,
                key_stride,
                value_stride,
                whole,
                position + count,
                last,
                factor,
                DIM,
                BLOCK,
                True,
            )
            result = (acc / total[:, None]).to(out.dtype.element_ty)
            tl.store(out + at[:, None] + dims[None, :], result, mask=real[:, None])
