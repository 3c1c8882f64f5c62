"""Attention over keys that lie side by side, in the form that is fastest where it runs.

Queries come scaled: the scores are their products with the keys as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workers.stage.layers import fast_bfloat16

FEW_KEYS = 512
"""Of all rows together: over so few, calls are dear, and torch's fused kernel is one."""
SCORES = 1 << 21
"""Scores that exist at once, or those of 16 queries where these are more."""
LEAST_QUERIES, MOST_QUERIES = 16, 128
"""Of one block. Small ones leave out more of the keys behind a causal chunk's queries."""

Attended = tuple[Tensor, Tensor | None]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, lse: bool) -> Attended:
    """q: [rows, heads, queries, head_dim]; k, v: [rows, kv_heads, keys, head_dim]; mask: [rows, 1, 1, keys], added.

    Returns q's shape and, where asked for, [rows, heads, queries] log-sum-exps in float32.
    """
    if q.device.type != "cpu":
        if mask is None:
            return _efficient(q, k, v, causal=False)
        return _products(q.float(), k.float(), v.float(), mask, causal=False, lse=lse)
    if q.dtype == torch.bfloat16 and fast_bfloat16() and len(k) * k.shape[2] > FEW_KEYS:
        return _products(q, k, v, mask, causal=False, lse=lse)
    return _fused(q, k, v, mask, causal=False)


def attend_causal(q: Tensor, k: Tensor, v: Tensor, *, lse: bool) -> Attended:
    """As `attend`, of as many queries as keys, each up to its own key."""
    if q.device.type != "cpu":
        return _efficient(q, k, v, causal=True)
    if q.dtype == torch.bfloat16 and fast_bfloat16():
        return _products(q, k, v, None, causal=True, lse=lse)
    return _fused(q, k, v, None, causal=True)


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool) -> Attended:
    out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        q, k, v, 0.0, causal, attn_mask=mask, scale=1.0
    )
    return out, sums


def _efficient(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Attended:
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    out, sums, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=1.0)
    return out, sums[:, :, : q.shape[2]]


def _products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool, lse: bool) -> Attended:
    """Two products and a softmax for each block of queries: twice as fast as torch's fused kernel in bfloat16, whose
    products are small, where the CPU has fast ones (Zen 5)."""
    rows, heads, queries, _ = q.shape
    kv_heads, keys = k.shape[1:3]
    # Heads first, as the cache gives keys and values: then these need not be copied.
    k, v = (each.transpose(0, 1).flatten(0, 1) for each in (k, v))
    q = q.view(rows, kv_heads, -1, queries, q.shape[-1]).transpose(0, 1)
    size = min(MOST_QUERIES, max(LEAST_QUERIES, SCORES // (rows * heads * keys)))
    outs, sums = [], []
    for first in range(0, queries, size):
        part = q[..., first : first + size, :]
        seen = first + part.shape[-2] if causal else keys
        scores = torch.bmm(part.reshape(len(k), -1, q.shape[-1]), k[:, :seen].transpose(1, 2))
        scores = scores.view(*part.shape[:-1], seen)
        if causal:
            scores[..., first:].masked_fill_(_later(seen - first, q.device), float("-inf"))
        if mask is not None:
            scores += mask
        shares = scores.softmax(-1)
        outs.append(torch.bmm(shares.view(len(k), -1, seen), v[:, :seen]).view(part.shape))
        if lse:
            # The greatest share is exp(greatest score - log-sum-exp).
            sums.append(scores.amax(-1).float() - shares.amax(-1).float().log())
    out = _joined(outs, -2).transpose(0, 1).flatten(1, 2)
    return out, _joined(sums, -1).transpose(0, 1).flatten(1, 2) if lse else None


def _joined(blocks: list[Tensor], dim: int) -> Tensor:
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim)


def _later(queries: int, device: torch.device) -> Tensor:
    """[queries, keys]: which keys stand behind the query."""
    return torch.ones(queries, queries, dtype=torch.bool, device=device).triu_(1)
