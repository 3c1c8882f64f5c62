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
from workers.stage.kv_cache import KVCache

_COPIES_BYTES = 256 << 20
"""Most memory that float32 copies of shared prefixes take."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A row of several tokens: tokens [first, last) of the step, behind keys of its own in the cache, if any."""

    first: int
    last: int
    before: CachedAttention | None


class Attention:
    """`begin(batch)` once a step, then `run(layer, q, k, v)` once for each layer."""

    def __init__(self, cache: KVCache, num_heads: int, table: Tensor) -> None:
        """table: [slots, pages of a sequence], int32: page numbers, read at every `begin`."""
        self.cache = cache
        self.table = table
        self.heads = num_heads
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
        self._chunks = [self._chunk(batch, row, int(shared[row])) for row in np.flatnonzero(batch.counts > 1).tolist()]
        rows = np.flatnonzero(batch.counts == 1)
        self._decode = self._decode_rows(batch, rows, shared) if len(rows) else None

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k, v: [tokens, kv_heads, head_dim]; attend with q: [tokens, heads, head_dim].

        Returns [tokens, heads * head_dim].
        """
        self.cache.write(layer, k, v)
        if self._decode is not None and not self._chunks:
            out, lse = self._decode.run(layer, q)
        else:
            out, lse = self._mixed(layer, q, k, v)
        for prefix in self._prefixes:
            assert lse is not None
            shared = prefix.run(layer, q[prefix.tokens])
            out[prefix.tokens] = merge(out[prefix.tokens], lse[prefix.tokens], *shared).to(out.dtype)
        return out.flatten(1)

    def _mixed(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:2], dtype=torch.float32) if self._prefixes else None
        if self._decode is not None:
            rows, rows_lse = self._decode.run(layer, q[self._decode.tokens])
            out[self._decode.tokens] = rows
            if lse is not None and rows_lse is not None:
                lse[self._decode.tokens] = rows_lse
        for chunk in self._chunks:
            span = slice(chunk.first, chunk.last)
            part, part_lse = _causal(q[span], k[span], v[span])
            if chunk.before is not None:
                before, before_lse = chunk.before.run(layer, q[span])
                part = merge(part, part_lse, before, before_lse)
                part_lse = torch.logaddexp(part_lse, before_lse)
            out[span] = part
            if lse is not None:
                lse[span] = part_lse
        return out, lse

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
            prefix = CachedAttention(
                self.cache, self._tensor(tokens), self._tensor(group.pages), keys, self._copies.get(key)
            )
            self._prefixes.append(prefix)

    def _chunk(self, batch: Batch, row: int, shared: int) -> _Chunk:
        size, start = self.cache.shape.page_size, int(batch.starts[row])
        first, last = int(batch.offsets[row]), int(batch.offsets[row + 1])
        if start == shared:
            return _Chunk(first, last, None)
        pages = self.table[int(batch.slots[row]), shared // size : -(-start // size)].long()
        tokens = torch.arange(first, last, device=pages.device)
        return _Chunk(first, last, CachedAttention(self.cache, tokens, pages, start - shared))

    def _decode_rows(self, batch: Batch, rows: Ints, shared: Ints) -> DecodeAttention:
        lengths = batch.starts[rows] + 1 - shared[rows]
        first_pages = shared[rows] // self.cache.shape.page_size
        tokens = self._tensor(batch.offsets[rows])
        return DecodeAttention(
            self.cache, self.heads, self.table, tokens, batch.slots[rows], first_pages, lengths, bool(shared.any())
        )


def _causal(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of a chunk over itself, each query up to its own key, in torch's fused kernels.

    q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim]. Returns q's shape and [tokens, heads]
    log-sum-exps.
    """
    scale = q.shape[2] ** -0.5
    if q.device.type == "cpu":
        # In float32 even where the model is not, as in `CachedAttention`.
        heads = [each.float().transpose(0, 1)[None] for each in (q, k, v)]
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*heads, 0.0, True, scale=scale)
    else:
        repeat = q.shape[1] // k.shape[1]
        wide = [each.repeat_interleave(repeat, 1) for each in (k, v)]
        heads = [each.transpose(0, 1)[None] for each in (q, *wide)]
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            *heads, None, True, 0.0, True, scale=scale
        )
    return out[0].transpose(0, 1), lse[0, :, : len(q)].transpose(0, 1)
