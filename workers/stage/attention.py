"""Attention over the paged cache, in plain torch: decode rows, prefill chunks and shared prefixes in one batch.

Three kinds of work, each exact for its part of the keys, merged by their log-sum-exp in float32:

- every row with one token, over its own pages (`decode_attention`);
- every longer row: its chunk, causally, and what its sequence has in the cache before it;
- every group: the pages its members share, read once, with the queries of all members as one matrix
  (Hydragen, arXiv:2402.05099).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from workers.stage.batch import Batch, Ints
from workers.stage.cached_attention import CachedAttention, Copies, merge
from workers.stage.decode_attention import DecodeAttention
from workers.stage.dense_attention import attend_causal
from workers.stage.kv_cache import KVCache
from workers.stage.layers import fast_bfloat16

_COPIES_BYTES = 256 << 20
"""Most memory that copies of shared prefixes take."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Rows of several tokens, as many each: tokens [first, last) of the step. One row may stand behind keys of
    its own in the cache."""

    first: int
    last: int
    rows: int
    before: CachedAttention | None


class Attention:
    """`begin(batch)` once a step, then `run(layer, qkv)` once for each layer."""

    def __init__(self, cache: KVCache, num_heads: int, table: Tensor) -> None:
        """table: [slots, pages of a sequence], int32: page numbers, read at every `begin`."""
        self.cache = cache
        self.table = table
        self.heads = num_heads
        self._scale = cache.shape.head_dim**-0.5
        slow = cache.layers[0].device.type == "cpu" and not fast_bfloat16()
        self._many_dtype = torch.float32 if slow else cache.dtype
        """Of products of many queries: where those of bfloat16 are slow, they are in float32."""
        self._chunks: list[_Chunk] = []
        self._prefixes: list[CachedAttention] = []
        self._decode: DecodeAttention | None = None
        self._copies: dict[bytes, Copies] = {}

    def forget_copies(self) -> None:
        """Read shared prefixes again: pages were written other than by `run`."""
        self._copies = {}

    def begin(self, batch: Batch) -> None:
        """Build everything that the layers of this step have in common."""
        size = self.cache.shape.page_size
        slots, positions = self._tensor(np.repeat(batch.slots, batch.counts)), self._tensor(batch.positions)
        self.cache.aim(self.table[slots, positions // size].long(), positions % size)
        shared = np.zeros(len(batch.slots), np.int64)
        for group in batch.groups:
            assert not shared[group.rows].any(), "a row is in two groups"
            shared[group.rows] = len(group.pages) * size
        assert (shared <= batch.starts).all(), "a shared prefix must be in the cache"
        self._set_prefixes(batch)
        self._chunks = []
        for row in np.flatnonzero(batch.counts > 1).tolist():
            self._add_chunk(batch, row, int(shared[row]))
        rows = np.flatnonzero(batch.counts == 1)
        self._decode = self._decode_rows(batch, rows, shared) if len(rows) else None

    def run(self, layer: int, qkv: Tensor) -> Tensor:
        """Store keys and values; attend. qkv: [tokens, heads + 2 * kv_heads, head_dim], in the order of its name.

        Returns [tokens, heads * head_dim] in qkv's dtype.
        """
        q, kv = qkv[:, : self.heads] * self._scale, qkv[:, self.heads :]
        stored = kv.to(self.cache.dtype)
        self.cache.write(layer, stored)
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:2], dtype=torch.float32) if self._prefixes else None
        if self._decode is not None:
            self._decode.run(layer, q.to(self.cache.dtype), out, lse)
        many = q.to(self._many_dtype) if self._chunks or self._prefixes else q
        for chunk in self._chunks:
            self._run_chunk(layer, chunk, many, stored if many.dtype == stored.dtype else kv, out, lse)
        for prefix in self._prefixes:
            assert lse is not None
            shared = prefix.run(layer, many[prefix.tokens])
            out[prefix.tokens] = merge(out[prefix.tokens], lse[prefix.tokens], *shared).to(out.dtype)
        return out.flatten(1)

    def _run_chunk(self, layer: int, chunk: _Chunk, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor | None) -> None:
        span, need = slice(chunk.first, chunk.last), lse is not None or chunk.before is not None
        heads = q[span].view(chunk.rows, -1, *q.shape[1:]).transpose(1, 2)
        own = kv[span].to(q.dtype).view(chunk.rows, -1, 2, self.cache.shape.kv_heads, q.shape[2])
        k, v = own.permute(2, 0, 3, 1, 4)
        part, part_lse = (
            None if x is None else x.transpose(1, 2).flatten(0, 1) for x in attend_causal(heads, k, v, lse=need)
        )
        assert part is not None
        if chunk.before is not None:
            assert part_lse is not None
            before, before_lse = chunk.before.run(layer, q[span])
            part = merge(part, part_lse, before, before_lse)
            part_lse = torch.logaddexp(part_lse, before_lse)
        out[span] = part
        if lse is not None:
            assert part_lse is not None
            lse[span] = part_lse

    def _tensor(self, values: Ints) -> Tensor:
        return torch.from_numpy(values).to(self.table.device)

    def _set_prefixes(self, batch: Batch) -> None:
        """A prefix that the last step had is not read again: its pages are full, and written by nobody since,
        for in a step that writes them they are no shared prefix."""
        last, self._copies, self._prefixes = self._copies, {}, []
        room, size = _COPIES_BYTES, self.cache.shape.page_size
        for group in batch.groups:
            key, keys = group.pages.tobytes(), len(group.pages) * size
            room -= keys * self.cache.shape.layers * self.cache.shape.kv_heads * self.cache.shape.head_dim * 8
            if room > 0:
                self._copies[key] = last.get(key, {})
            tokens = np.concatenate([np.arange(batch.offsets[row], batch.offsets[row + 1]) for row in group.rows])
            whole = len(tokens) == batch.offsets[-1] and bool((tokens == np.arange(len(tokens))).all())
            where = slice(None) if whole else self._tensor(tokens)
            pages = self._tensor(group.pages)
            self._prefixes.append(CachedAttention(self.cache, where, pages, keys, self._copies.get(key)))

    def _add_chunk(self, batch: Batch, row: int, shared: int) -> None:
        size, start = self.cache.shape.page_size, int(batch.starts[row])
        first, last = int(batch.offsets[row]), int(batch.offsets[row + 1])
        if start > shared:
            pages = self.table[int(batch.slots[row]), shared // size : -(-start // size)].long()
            tokens = torch.arange(first, last, device=pages.device)
            before = CachedAttention(self.cache, tokens, pages, start - shared)
            self._chunks.append(_Chunk(first, last, 1, before))
            return
        rows = 1
        if self._chunks:
            previous = self._chunks[-1]
            length = (previous.last - previous.first) // previous.rows
            if previous.before is None and previous.last == first and length == last - first:
                self._chunks.pop()
                first, rows = previous.first, previous.rows + 1
        self._chunks.append(_Chunk(first, last, rows, None))

    def _decode_rows(self, batch: Batch, rows: Ints, shared: Ints) -> DecodeAttention:
        lengths = batch.starts[rows] + 1 - shared[rows]
        first_pages = shared[rows] // self.cache.shape.page_size
        return DecodeAttention(
            self.cache, self.table, batch.offsets[rows], len(batch.positions), batch.slots[rows], first_pages, lengths
        )
