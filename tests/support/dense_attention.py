"""Attention without a cache, for tests of the decoder: the step is one whole sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from toka.model import ModelConfig


class DenseAttention:
    """Causal attention of the step's tokens to each other, in float32."""

    def __init__(self, config: ModelConfig) -> None:
        self.sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]

    def run(self, layer: int, qkv: Tensor) -> Tensor:
        q, k, v = qkv.split(self.sizes, 1)
        repeat = q.shape[1] // k.shape[1]
        k, v = (each.repeat_interleave(repeat, 1).float() for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.float(), k) / q.shape[-1] ** 0.5
        future = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        shares = scores.masked_fill(future.to(scores.device), float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", shares, v).flatten(1).to(q.dtype)
