"""Attention over shared prefixes (Hydragen, arXiv:2402.05099): a group's pages are read once for all its queries.

Work comes in tiles: some queries of a group and a run of its pages. The tiles are data, and a fixed number of
programs takes them in turn, so that one CUDA graph serves whatever groups a step has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.stage.cuda.arrange import PREFIX_QUERIES, PROGRAMS, TILE_FIELDS
from workers.stage.cuda.cache import PagedCache
from workers.stage.cuda.inputs import DECODE_TILES, HEADER, PREFIX_TILES, Inputs
from workers.stage.cuda.softmax import LOG2_E, attend_run

BLOCK = 64
"""Keys of one turn of the loop."""


@dataclass(frozen=True, slots=True)
class Partials:
    """Attention over parts of prefixes, to be merged. Token t has parts [first[t], first[t] + count[t])."""

    out: Tensor
    """[parts, heads, head_dim] float32."""
    lse: Tensor
    """[parts, heads] float32, base 2."""


class PrefixAttention:
    def __init__(self, cache: PagedCache, heads: int, table: Tensor, processors: int, parts: int) -> None:
        """table: [slots, pages of a sequence] int32; processors: of the GPU; parts: most of one step."""
        self.cache, self.heads, self.table = cache, heads, table
        self._programs = PROGRAMS * processors
        out = torch.empty(parts, heads, cache.shape.head_dim, dtype=torch.float32, device=table.device)
        self._partials = Partials(out, torch.empty(parts, heads, dtype=torch.float32, device=table.device))

    def run(self, layer: int, q: Tensor, inputs: Inputs) -> Partials:
        """q: [tokens, heads, head_dim]. The result holds until the next call."""
        shape = self.cache.shape
        keys, values = self.cache.layer(layer)
        _prefix[(self._programs,)](
            q,
            keys,
            values,
            self.table,
            inputs.members,
            inputs.prefix_first,
            inputs.header,
            self._partials.out,
            self._partials.lse,
            self.table.stride(0),
            keys.stride(0),
            shape.head_dim**-0.5,
            HEADS=self.heads,
            KV_HEADS=shape.kv_heads,
            DIM=shape.head_dim,
            PAGE=shape.page_size,
            DECODE_TILES=DECODE_TILES,
            PREFIX_TILES=PREFIX_TILES,
            HEADER=HEADER,
            FIELDS=TILE_FIELDS,
            QUERIES=PREFIX_QUERIES,
            BLOCK=BLOCK,
            num_warps=4,
            num_stages=2,
        )
        return self._partials


@triton.jit
def _prefix(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    members: tl.tensor,
    prefix_first: tl.tensor,
    header: tl.tensor,
    out: tl.tensor,
    lse_out: tl.tensor,
    table_stride: tl.tensor,
    page_stride: tl.tensor,
    scale: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    DECODE_TILES: tl.constexpr,
    PREFIX_TILES: tl.constexpr,
    HEADER: tl.constexpr,
    FIELDS: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    GROUP: tl.constexpr = HEADS // KV_HEADS
    dims, lane = tl.arange(0, DIM), tl.arange(0, QUERIES)
    factor = scale * LOG2_E
    tiles = header + HEADER + tl.load(header + DECODE_TILES) * FIELDS
    for item in range(tl.program_id(0), tl.load(header + PREFIX_TILES) * KV_HEADS, tl.num_programs(0)):
        kv_head = item % KV_HEADS
        tile = tiles + item // KV_HEADS * FIELDS
        pages = table + tl.load(tile).to(tl.int64) * table_stride
        low, high = tl.load(tile + 1) * PAGE, tl.load(tile + 2) * PAGE
        first_member, count, split = tl.load(tile + 3), tl.load(tile + 4), tl.load(tile + 5)
        real = lane < count * GROUP
        token = tl.load(members + first_member + lane // GROUP, mask=real, other=0).to(tl.int64)
        head = kv_head * GROUP + lane % GROUP
        query = tl.load(q + ((token * HEADS + head) * DIM)[:, None] + dims[None, :], mask=real[:, None], other=0.0)
        most = tl.full((QUERIES,), -1e30, tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        acc = tl.zeros((QUERIES, DIM), tl.float32)
        acc, total, most = attend_run(
            acc,
            total,
            most,
            query,
            keys,
            values,
            pages,
            low,
            high,
            real,
            kv_head,
            page_stride,
            factor,
            DIM,
            PAGE,
            BLOCK,
        )
        part = tl.load(prefix_first + token, mask=real, other=0).to(tl.int64) + split
        at = part * HEADS + head
        tl.store(out + (at * DIM)[:, None] + dims[None, :], acc / total[:, None], mask=real[:, None])
        tl.store(lse_out + at, most + tl.log2(total), mask=real)
