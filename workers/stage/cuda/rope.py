"""One kernel between the QKV product and attention: QK norm, rotary embedding, keys and values into their pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from toka.model import ModelConfig
from workers.stage.cuda.cache import PagedCache
from workers.stage.decoder import inverse_frequencies
from workers.stage.layers import RmsNorm


class Rope:
    """cos_sin: [positions, head_dim] float32, the cosines of a position's angles before their sines."""

    def __init__(self, config: ModelConfig, cache: PagedCache, table: Tensor, positions: int) -> None:
        """table: [slots, pages of a sequence] int32."""
        self.heads, self.kv_heads = config.num_heads, config.num_kv_heads
        self.cache, self.table = cache, table
        frequencies = inverse_frequencies(config).to(table.device)
        angles = torch.arange(positions, device=table.device).unsqueeze(-1) * frequencies
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)

    def store(
        self, layer: int, qkv: Tensor, norm: RmsNorm | None, slots: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """qkv: [tokens, (heads + 2 * kv_heads) * head_dim], rotary pairs side by side; slots, positions: [tokens].

        Returns the rotated queries, [tokens, heads, head_dim], and what was stored: rotated keys and values, both
        [tokens, kv_heads, head_dim], the values within qkv.
        """
        shape = self.cache.shape
        keys, values = self.cache.layer(layer)
        q = qkv.new_empty(len(qkv), self.heads, shape.head_dim)
        k = qkv.new_empty(len(qkv), self.kv_heads, shape.head_dim)
        _rope_store[(len(qkv),)](
            qkv,
            q,
            k,
            keys,
            values,
            self.cos_sin,
            self.table,
            slots,
            positions,
            qkv if norm is None else norm.weight,
            0.0 if norm is None else norm.eps,
            self.table.stride(0),
            keys.stride(0),
            HEADS=self.heads,
            KV_HEADS=self.kv_heads,
            DIM=shape.head_dim,
            PAGE=shape.page_size,
            HEADS_PAD=triton.next_power_of_2(self.heads),
            KV_HEADS_PAD=triton.next_power_of_2(self.kv_heads),
            NORM=norm is not None,
        )
        return q, k, qkv.view(len(qkv), -1, shape.head_dim)[:, -self.kv_heads :]


@triton.jit
def _rotated(
    source: tl.tensor,
    heads: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    COUNT: tl.constexpr,
    PAD: tl.constexpr,
    DIM: tl.constexpr,
    NORM: tl.constexpr,
) -> tl.tensor:
    """Heads [PAD, DIM] float32 from `source`, normed where NORM, then rotated."""
    dims = tl.arange(0, DIM)
    where = heads[:, None] * DIM + dims[None, :]
    mask = (heads < COUNT)[:, None]
    x = tl.load(source + where, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / DIM + eps)
        x = x * scale[:, None] * tl.load(weight + where, mask=mask, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(x, (PAD, DIM // 2, 2)))
    turned = tl.join(even * cos[None, :] - odd * sin[None, :], even * sin[None, :] + odd * cos[None, :])
    return tl.reshape(turned, (PAD, DIM))


@triton.jit
def _rope_store(
    qkv: tl.tensor,
    q_out: tl.tensor,
    k_out: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    cos_sin: tl.tensor,
    table: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    norm: tl.tensor,
    eps: tl.tensor,
    table_stride: tl.tensor,
    page_stride: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    KV_HEADS_PAD: tl.constexpr,
    NORM: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    slot = tl.load(slots + token).to(tl.int64)
    page = tl.load(table + slot * table_stride + position // PAGE).to(tl.int64)
    half = tl.arange(0, DIM // 2)
    cos = tl.load(cos_sin + position.to(tl.int64) * DIM + half)
    sin = tl.load(cos_sin + position.to(tl.int64) * DIM + DIM // 2 + half)
    dims = tl.arange(0, DIM)
    row = qkv + token * (HEADS + 2 * KV_HEADS) * DIM
    heads = tl.arange(0, HEADS_PAD)
    q = _rotated(row, heads, norm, eps, cos, sin, HEADS, HEADS_PAD, DIM, NORM)
    at = heads[:, None] * DIM + dims[None, :]
    tl.store(q_out + token * HEADS * DIM + at, q.to(q_out.dtype.element_ty), mask=(heads < HEADS)[:, None])
    heads = tl.arange(0, KV_HEADS_PAD)
    mask = (heads < KV_HEADS)[:, None]
    k = _rotated(row + HEADS * DIM, heads, norm + HEADS * DIM, eps, cos, sin, KV_HEADS, KV_HEADS_PAD, DIM, NORM)
    v = tl.load(row + (HEADS + KV_HEADS) * DIM + heads[:, None] * DIM + dims[None, :], mask=mask)
    to = page * page_stride + (heads[:, None] * PAGE + position % PAGE) * DIM + dims[None, :]
    k = k.to(keys.dtype.element_ty)
    tl.store(keys + to, k, mask=mask)
    tl.store(k_out + token * KV_HEADS * DIM + heads[:, None] * DIM + dims[None, :], k, mask=mask)
    tl.store(values + to, v, mask=mask)
