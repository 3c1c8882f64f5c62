"""Attention of many queries over one run of cached keys: a shared prefix, or what stands before a prefill chunk."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.stage.kv_cache import Gather, KVCache

_SCORES_AT_ONCE = 1 << 18
"""Scores worked on together: in float32 they stay in a core's cache."""

Copies = dict[int, tuple[Tensor, Tensor]]
"""By layer: keys, transposed, and values, in float32."""


class CachedAttention:
    """Queries `tokens` of a step over the first `keys` keys in `pages`, read once for all of them.

    The products run in float32: on CPUs without matrix tiles they are twice as fast as in bfloat16.
    """

    def __init__(self, cache: KVCache, tokens: Tensor, pages: Tensor, keys: int, copies: Copies | None = None) -> None:
        """tokens: [queries], numbers within the step; pages: [pages].

        `copies`: keep what is read here, and use what is here already.
        """
        self.cache, self.tokens, self.keys = cache, tokens, keys
        self.copies = copies
        self._gather = Gather(cache, pages[None])

    def run(self, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """q: [queries, heads, head_dim]. Returns the same in float32, and [queries, heads] log-sum-exps."""
        shape, count = self.cache.shape, len(q)
        k, v = self._read(layer)
        # The heads that share keys are further queries: [kv_heads, queries * repeat, head_dim].
        queries = (q.float() * shape.head_dim**-0.5).view(count, shape.kv_heads, -1, shape.head_dim)
        queries = queries.transpose(0, 1).reshape(shape.kv_heads, -1, shape.head_dim)
        step = max(1, _SCORES_AT_ONCE // (shape.kv_heads * self.keys))
        parts = [_attend(queries[:, i : i + step], k, v) for i in range(0, queries.shape[1], step)]
        out, lse = parts[0] if len(parts) == 1 else (torch.cat(each, 1) for each in zip(*parts))
        out = out.view(shape.kv_heads, count, -1, shape.head_dim).transpose(0, 1)
        return out.reshape(q.shape), lse.view(shape.kv_heads, count, -1).transpose(0, 1).reshape(q.shape[:2])

    def _read(self, layer: int) -> tuple[Tensor, Tensor]:
        """[kv_heads, head_dim, keys] and [kv_heads, keys, head_dim]."""
        if self.copies is not None and layer in self.copies:
            return self.copies[layer]
        k, v = (each[0, :, : self.keys].float() for each in self._gather.read(layer))
        read = k.transpose(1, 2).contiguous(), v.clone(memory_format=torch.contiguous_format)
        if self.copies is not None:
            self.copies[layer] = read
        return read


def _attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """q: [kv_heads, queries, head_dim]. Returns the same, and [kv_heads, queries] log-sum-exps."""
    scores = torch.bmm(q, k)
    most = scores.amax(-1, keepdim=True)
    weights = scores.sub_(most).exp_()
    total = weights.sum(-1, keepdim=True)
    return torch.bmm(weights, v).div_(total), total.log_().add_(most)[..., 0]


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> Tensor:
    """Attention over the union of two sets of keys, from that over each; float32.

    out, other: [queries, heads, head_dim]; lse, other_lse: [queries, heads].
    """
    return torch.lerp(out.float(), other.float(), torch.sigmoid(other_lse - lse)[..., None])
