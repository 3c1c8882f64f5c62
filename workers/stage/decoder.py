"""The decoder: Llama's architecture, with the options of `ModelConfig`, over ragged rows of tokens."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from toka.model import ModelConfig, RopeScaling
from workers.stage.layers import activation_dtype
from workers.stage.weights import LayerWeights, Weights

LOGITS_BYTES = 256 << 20
"""Rows of logits are computed in chunks whose float32 copy is at most so large."""


class Attention(Protocol):
    """Causal attention over a step's rows and what the KV cache holds of their sequences."""

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v, and attend.

        q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim]; in the run dtype, maybe strided,
        normed and rotated (head_dim in pairs: an order of its own, the same in q and k).
        Returns [tokens, heads * head_dim] in the run dtype or float32.
        """
        ...


class Decoder:
    """Computes hidden states and logits; the KV cache is the attention's."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        self._activations = activation_dtype(weights.dtype, weights.device)
        self._frequencies = inverse_frequencies(config).to(weights.device)

    @torch.inference_mode()
    def hidden(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """tokens, positions: [T] int64 -> [T, hidden], normed, in the activation dtype."""
        x = functional.embedding(tokens, self.weights.embedding).to(self._activations)
        angles = positions.unsqueeze(-1) * self._frequencies
        rotation = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
        for index, layer in enumerate(self.weights.layers):
            x += self._attend(index, layer, x, rotation, attention)
            gate, up = layer.gate_up(layer.mlp_norm(x)).chunk(2, dim=-1)
            x += layer.down(functional.silu(gate).mul_(up))
        return self.weights.norm(x)

    def _attend(self, index: int, layer: LayerWeights, x: Tensor, rotation: Tensor, attention: Attention) -> Tensor:
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        qkv = layer.qkv(layer.attention_norm(x)).view(-1, heads + 2 * kv_heads, self.config.head_dim)
        qk, v = torch.split_with_sizes(qkv, [heads + kv_heads, kv_heads], dim=1)
        if layer.qk_norm is not None:
            qk = layer.qk_norm(qk)
        q, k = torch.split_with_sizes(rotate(qk, rotation).to(self.weights.dtype), [heads, kv_heads], dim=1)
        attended = attention.run(index, q, k, v.to(self.weights.dtype))
        return layer.output(attended.to(self._activations))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [S, hidden] -> [S, vocab] float32."""
        chunk = max(1, LOGITS_BYTES // (4 * self.config.vocab_size))
        if hidden.shape[0] <= chunk:
            return self.weights.head(hidden).float()
        out = hidden.new_empty(hidden.shape[0], self.config.vocab_size, dtype=torch.float32)
        for start in range(0, hidden.shape[0], chunk):
            out[start : start + chunk] = self.weights.head(hidden[start : start + chunk])
        return out


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotary embedding (Su et al., 2021) as a complex product, in float32.

    x: [tokens, heads, head_dim], the two numbers of a pair side by side; rotation: [tokens, 1, head_dim / 2]
    complex. Returns float32 of x's shape.
    """
    tokens, heads, head_dim = x.shape
    pairs = torch.view_as_complex(x.float().view(tokens, heads, head_dim // 2, 2))
    return torch.view_as_real(pairs * rotation).view(tokens, heads, head_dim)


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """[head_dim / 2] float32: the angle that each pair turns in one position."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    return frequencies if config.rope_scaling is None else _scale(frequencies, config.rope_scaling)


def _scale(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "factors":
        return frequencies / torch.tensor(scaling.factors)
    assert scaling.kind == "llama3"
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies
