"""Attention of many queries over one run of cached keys: a shared prefix, or what stands before a prefill chunk."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.stage.dense_attention import attend
from workers.stage.kv_cache import Gather, KVCache

Copies = dict[int, tuple[Tensor, Tensor]]
"""By layer: keys and values, in the queries' dtype."""


class CachedAttention:
    """Queries `tokens` of a step over the first `keys` keys in `pages`, read once for all of them.

    The products run in the queries' dtype.
    """

    def __init__(
        self, cache: KVCache, tokens: Tensor | slice, pages: Tensor, keys: int, copies: Copies | None = None
    ) -> None:
        """tokens: [queries], numbers within the step; pages: [pages].

        `copies`: keep what is read here, and use what is here already.
        """
        self.cache, self.tokens, self.keys = cache, tokens, keys
        self.copies = copies
        self._gather = Gather(cache, pages[None])

    def run(self, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """q: [queries, heads, head_dim], scaled. Returns the same, and [queries, heads] log-sum-exps in float32."""
        out, lse = attend(q.transpose(0, 1)[None], *self._read(layer, q.dtype), lse=True)
        assert lse is not None
        return out[0].transpose(0, 1), lse[0].transpose(0, 1)

    def _read(self, layer: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[1, kv_heads, keys, head_dim] each."""
        if self.copies is not None and layer in self.copies:
            return self.copies[layer]
        # New memory in any case: the next read of pages is written over this one.
        k, v = (
            each[:, :, : self.keys].to(dtype, copy=True, memory_format=torch.contiguous_format)
            for each in self._gather.read(layer)
        )
        if self.copies is not None:
            self.copies[layer] = k, v
        return k, v


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> Tensor:
    """Attention over the union of two sets of keys, from that over each; float32.

    out, other: [queries, heads, head_dim]; lse, other_lse: [queries, heads].
    """
    return torch.lerp(out.float(), other.float(), torch.sigmoid(other_lse - lse)[..., None])
