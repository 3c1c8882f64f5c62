"""Attention of rows with one query each, over pages that lie anywhere in the cache.

The pages of several rows are copied together, keys and values at once, for torch's fused kernel, to which
the heads that share keys are queries of one sequence. For few rows or short ones that is faster than sums
in place (`embedding_bag`), for long ones as fast: it takes few operations, and they are what a step on
short sequences is made of.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from workers.stage.batch import Ints
from workers.stage.dense_attention import attend
from workers.stage.kv_cache import Gather, KVCache

_SPARE_TOKENS = 512
_SPARE_SHARE = 0.25
"""Rows are padded to the longest of their bucket by so many tokens, or by such a share, at most."""
_BUCKET_BYTES = 32 << 20
"""Most memory of the copies of a bucket of several rows."""


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Rows [first, last) in order of length, padded to as many pages each."""

    first: int
    last: int
    gather: Gather
    """Of the rows' pages, padded with the scratch page."""
    mask: Tensor
    """[rows, 1, 1, keys]: 0, or -inf where a row has no key."""


class DecodeAttention:
    """The indices of one step's decode rows, and attention over them for each layer."""

    def __init__(
        self,
        cache: KVCache,
        table: Tensor,
        tokens: Ints,
        total: int,
        slots: Ints,
        first_pages: Ints,
        lengths: Ints,
    ) -> None:
        """tokens: [rows], where the rows' queries stand among the `total` tokens of the step; slots: [rows].

        Row i attends to lengths[i] keys that begin at page first_pages[i] of its page table.
        """
        self.cache = cache
        size = cache.shape.page_size
        counts = -(-lengths // size)
        most = max(1, _BUCKET_BYTES // (cache.layers[0].stride(0) * cache.dtype.itemsize))
        spans = _spans(counts.tolist(), size, most)
        if len(spans) > 1:
            order = np.argsort(-counts, kind="stable")
            tokens, slots, first_pages, lengths, counts = (
                each[order] for each in (tokens, slots, first_pages, lengths, counts)
            )
            spans = _spans(counts.tolist(), size, most)
        in_order = len(tokens) == total and bool((tokens == np.arange(total)).all())
        self._where = None if in_order else torch.from_numpy(tokens).to(table.device)
        self._buckets = []
        for first, last in spans:
            rows, pages = slice(first, last), int(counts[first:last].max())
            held = self._pages(table, slots[rows], first_pages[rows], counts[rows], pages)
            mask = self._mask(lengths[rows], pages * size, table.device)
            self._buckets.append(_Bucket(first, last, Gather(cache, held), mask))

    def _pages(self, table: Tensor, slots: Ints, first_pages: Ints, counts: Ints, most: int) -> Tensor:
        columns = first_pages[:, None] + np.arange(most)
        valid = torch.from_numpy(np.arange(most) < counts[:, None]).to(table.device)
        within = torch.from_numpy(np.minimum(columns, table.shape[1] - 1)).to(table.device)
        held = table[torch.from_numpy(slots).to(table.device)[:, None], within]
        return torch.where(valid, held, self.cache.shape.scratch)

    def _mask(self, lengths: Ints, keys: int, device: torch.device) -> Tensor:
        absent = torch.from_numpy(np.arange(keys) >= lengths[:, None]).to(device)
        mask = torch.zeros(absent.shape, dtype=self.cache.dtype, device=device)
        return mask.masked_fill_(absent, float("-inf"))[:, None, None]

    def run(self, layer: int, q: Tensor, out: Tensor, lse: Tensor | None) -> None:
        """Fill in the rows' part of out: [tokens, heads, head_dim], and of lse: [tokens, heads], log-sum-exps.

        q: [tokens, heads, head_dim], scaled, in the cache's dtype.
        """
        if self._where is None:
            self._attend(layer, q, out, lse)
            return
        rows = q.index_select(0, self._where)
        rows_out = out.new_empty(rows.shape)
        rows_lse = None if lse is None else lse.new_empty(rows.shape[:2])
        self._attend(layer, rows, rows_out, rows_lse)
        out.index_copy_(0, self._where, rows_out)
        if lse is not None and rows_lse is not None:
            lse.index_copy_(0, self._where, rows_lse)

    def _attend(self, layer: int, q: Tensor, out: Tensor, lse: Tensor | None) -> None:
        shape = (len(q), self.cache.shape.kv_heads, -1, q.shape[2])
        q, out = q.view(shape), out.view(shape)
        for bucket in self._buckets:
            rows = slice(bucket.first, bucket.last)
            part, part_lse = attend(q[rows], *bucket.gather.read(layer), bucket.mask, lse=lse is not None)
            out[rows] = part
            if lse is not None:
                assert part_lse is not None
                lse[rows] = part_lse.reshape(len(part), -1)


def _spans(counts: list[int], page_size: int, most_pages: int) -> list[tuple[int, int]]:
    """Buckets of rows, in their order, that keep padding and size within bounds. counts: pages of each row."""
    spare = _SPARE_TOKENS / page_size
    spans, first, longest, total = [], 0, 0, 0
    for row, count in enumerate(counts):
        longest, total = max(longest, count), total + count
        padded = longest * (row + 1 - first)
        if row > first and (padded > most_pages or padded - total > max(spare, _SPARE_SHARE * total)):
            spans.append((first, row))
            first, longest, total = row, count, count
    return [*spans, (first, len(counts))]
