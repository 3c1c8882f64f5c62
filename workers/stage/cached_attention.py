"""Attention of many queries over one run of cached keys: a shared prefix, or what stands before a prefill chunk."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.stage.kv_cache import Gather, KVCache

Copies = dict[int, tuple[Tensor, Tensor]]
"""By layer: keys and values, in float32."""


class CachedAttention:
    """Queries `tokens` of a step over the first `keys` keys in `pages`, read once for all of them.

    The products run in float32: on CPUs without matrix tiles they are twice as fast as in bfloat16.
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
        """q: [queries, heads, head_dim]. Returns the same in float32, and [queries, heads] log-sum-exps."""
        shape, count = self.cache.shape, len(q)
        # The heads that share keys are further queries: [1, kv_heads, queries * repeat, head_dim].
        queries = q.float().view(count, shape.kv_heads, -1, shape.head_dim).transpose(0, 1)
        out, lse = _attend(queries.reshape(1, shape.kv_heads, -1, shape.head_dim), *self._read(layer))
        out = out.view(shape.kv_heads, count, -1, shape.head_dim).transpose(0, 1)
        return out.reshape(q.shape), lse.view(shape.kv_heads, count, -1).transpose(0, 1).reshape(q.shape[:2])

    def _read(self, layer: int) -> tuple[Tensor, Tensor]:
        """[1, kv_heads, keys, head_dim] each."""
        if self.copies is not None and layer in self.copies:
            return self.copies[layer]
        # New memory also where the cache is in float32: the next read of pages is written over this one.
        k, v = (
            each[:, :, : self.keys].to(torch.float32, copy=True, memory_format=torch.contiguous_format)
            for each in self._gather.read(layer)
        )
        if self.copies is not None:
            self.copies[layer] = k, v
        return k, v


def _attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """q: [1, kv_heads, queries, head_dim]. Returns the same, and [1, kv_heads, queries] log-sum-exps."""
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    else:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True)
        lse = lse[..., : q.shape[2]]
    return out.contiguous(), lse.contiguous()


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> Tensor:
    """Attention over the union of two sets of keys, from that over each; float32.

    out, other: [queries, heads, head_dim]; lse, other_lse: [queries, heads].
    """
    return torch.lerp(out.float(), other.float(), torch.sigmoid(other_lse - lse)[..., None])
