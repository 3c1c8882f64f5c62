"""Attention of rows with one query each, over pages that lie anywhere in the cache.

Copying every row's pages together costs as much as attention itself. Both of its products are weighted
sums of rows of the cache, though, which `embedding_bag` computes in place, for all sequences in one
call: scores = sum over d of q[d] * K^T[d, page], output = sum over t of p[t] * V[t].
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from workers.stage.batch import Ints
from workers.stage.kv_cache import KVCache

_SPARE_TOKENS = 512
_SPARE_SHARE = 0.25
"""Rows are padded to the longest of their bucket by so many tokens, or by such a share, at most."""
_bag_sums = torch.ops.aten._embedding_bag_forward_only


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Rows [first, last) in order of length, padded to `keys` keys; their scores are [start, end) of all."""

    first: int
    last: int
    pages: int
    start: int
    end: int
    mask: Tensor
    """[rows, 1, keys]: 0, or -inf where a row has no key."""


class DecodeAttention:
    """The indices of one step's decode rows, and attention over them for each layer."""

    def __init__(
        self,
        cache: KVCache,
        heads: int,
        table: Tensor,
        tokens: Tensor,
        slots: Ints,
        first_pages: Ints,
        lengths: Ints,
        want_lse: bool,
    ) -> None:
        """tokens: [rows], where the rows' queries stand in the step; slots: [rows].

        Row i attends to lengths[i] keys that begin at page first_pages[i] of its page table.
        """
        self.cache, self.heads, self.tokens, self.want_lse = cache, heads, tokens, want_lse
        self.scale = cache.shape.head_dim**-0.5
        counts = -(-lengths // cache.shape.page_size)
        spans = [(0, len(counts))]
        self._order: Tensor | None = None
        if _padding(counts) > _spare(counts, cache.shape.page_size):
            order = np.argsort(-counts, kind="stable")
            slots, first_pages, lengths, counts = (each[order] for each in (slots, first_pages, lengths, counts))
            spans = _spans(counts, cache.shape.page_size)
            self._order = torch.from_numpy(order).to(table.device)
            self._back = torch.from_numpy(np.argsort(order)).to(table.device)
        self._build(table, spans, slots, first_pages, lengths, counts)

    def _build(
        self, table: Tensor, spans: list[tuple[int, int]], slots: Ints, first_pages: Ints, lengths: Ints, counts: Ints
    ) -> None:
        self._buckets: list[_Bucket] = []
        key_rows, value_rows, widths, start = [], [], [], 0
        for first, last in spans:
            rows, pages = slice(first, last), int(counts[first:last].max())
            held = self._pages(table, slots[rows], first_pages[rows], counts[rows], pages)
            keys, values = self._rows(held)
            key_rows.append(keys)
            value_rows.append(values)
            width = pages * self.cache.shape.page_size
            widths.append(np.full((last - first) * self.heads, width))
            end = start + (last - first) * self.heads * width
            mask = self._mask(lengths[rows], width, table.device)
            self._buckets.append(_Bucket(first, last, pages, start, end, mask))
            start = end
        self._key_rows = torch.cat(key_rows)
        self._value_rows = torch.cat(value_rows)
        dim, device = self.cache.shape.head_dim, table.device
        index = self._key_rows.dtype
        self._key_bags = torch.arange(0, len(self._key_rows) + 1, dim, dtype=index, device=device)
        ends = np.concatenate([[0], np.cumsum(np.concatenate(widths))])
        self._value_bags = torch.from_numpy(ends).to(device=device, dtype=index)

    def _pages(self, table: Tensor, slots: Ints, first_pages: Ints, counts: Ints, most: int) -> Tensor:
        """[rows, most]: page numbers, padded with the scratch page."""
        columns = first_pages[:, None] + np.arange(most)
        valid = torch.from_numpy(np.arange(most) < counts[:, None]).to(table.device)
        within = torch.from_numpy(np.minimum(columns, table.shape[1] - 1)).to(table.device)
        held = table[torch.from_numpy(slots).to(table.device)[:, None], within]
        return torch.where(valid, held, self.cache.shape.scratch)

    def _rows(self, held: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of K^T for the bags (row, head, page) and of V for the bags (row, head) over held: [rows, pages]."""
        shape = self.cache.shape
        wide = (shape.pages + 1) * shape.kv_heads * max(shape.head_dim, shape.page_size) >= 1 << 31
        held = held.long() if wide else held.int()
        count = functools.partial(torch.arange, dtype=held.dtype, device=held.device)
        heads = held[:, None] * shape.kv_heads + count(shape.kv_heads)[:, None]
        keys = heads[..., None] * shape.head_dim + count(shape.head_dim)
        values = heads[..., None] * shape.page_size + count(shape.page_size)
        repeat = self.heads // shape.kv_heads
        spread = [each[:, :, None].expand(-1, -1, repeat, -1, -1).reshape(-1) for each in (keys, values)]
        return spread[0], spread[1]

    def _mask(self, lengths: Ints, keys: int, device: torch.device) -> Tensor:
        absent = torch.from_numpy(np.arange(keys) >= lengths[:, None]).to(device)
        mask = torch.zeros(absent.shape, dtype=self.cache.dtype, device=device)
        return mask.masked_fill_(absent, float("-inf"))[:, None]

    def run(self, layer: int, q: Tensor) -> tuple[Tensor, Tensor | None]:
        """q: [rows, heads, head_dim]. Returns the same shape, and [rows, heads] log-sum-exps if wanted."""
        if self._order is not None:
            q = q.index_select(0, self._order)
        weights = [self._spread(q[bucket.first : bucket.last], bucket.pages) for bucket in self._buckets]
        scores = self._sums(self.cache.keys[layer], self._key_rows, self._key_bags, _cat(weights)).view(-1)
        shares, lse = torch.empty_like(scores), []
        for bucket in self._buckets:
            rows = (bucket.last - bucket.first, self.heads, -1)
            part, share = (each[bucket.start : bucket.end].view(rows) for each in (scores, shares))
            torch.add(bucket.mask, part, alpha=self.scale, out=part)
            torch.softmax(part, -1, out=share)
            if self.want_lse:
                # From the greatest score and the greatest share: exp(score - lse) = share.
                lse.append(part.amax(-1).float() - share.amax(-1).float().log_())
        out = self._sums(self.cache.values[layer], self._value_rows, self._value_bags, shares).view_as(q)
        total = _cat(lse) if lse else None
        if self._order is None:
            return out, total
        return out.index_select(0, self._back), None if total is None else total.index_select(0, self._back)

    def _spread(self, q: Tensor, pages: int) -> Tensor:
        """q: [rows, heads, head_dim], once for each page: [rows * heads * pages * head_dim]."""
        return q[:, :, None].expand(-1, -1, pages, -1).reshape(-1)

    @staticmethod
    def _sums(cache: Tensor, rows: Tensor, bags: Tensor, weights: Tensor) -> Tensor:
        """[bags, width]: for each bag the sum of its rows of the cache times their weights."""
        table = cache.view(-1, cache.shape[-1])
        sums: Tensor = _bag_sums(table, rows, bags, False, 0, False, weights, True)[0]
        return sums


def _cat(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _padding(counts: Ints) -> int:
    return int(counts.max() * len(counts) - counts.sum())


def _spare(counts: Ints, page_size: int) -> float:
    return max(_SPARE_TOKENS / page_size, _SPARE_SHARE * int(counts.sum()))


def _spans(counts: Ints, page_size: int) -> list[tuple[int, int]]:
    """Buckets of rows, whose page counts fall, that keep padding within bounds."""
    cuts = [0]
    for row in range(len(counts)):
        part = counts[cuts[-1] : row + 1]
        if _padding(part) > _spare(part, page_size):
            cuts.append(row)
    return list(pairwise([*cuts, len(counts)]))
