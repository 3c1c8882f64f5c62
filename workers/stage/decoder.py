"""The decoder: Llama's architecture, with the options of `ModelConfig`, over ragged rows of tokens."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from toka.model import ModelConfig, RopeScaling
from workers.stage.collective import ALONE, Collective
from workers.stage.layers import activation_dtype
from workers.stage.weights import LayerWeights, Weights

LOGITS_BYTES = 256 << 20
"""Rows of logits are computed in chunks whose float32 copy is at most so large."""


class Attention(Protocol):
    """Causal attention over a step's rows and what the KV cache holds of their sequences."""

    def run(self, layer: int, qkv: Tensor) -> Tensor:
        """Store keys and values, and attend.

        qkv: [tokens, heads + 2 * kv_heads, head_dim], queries, keys and values in the activation dtype or
        float32; queries and keys normed and rotated (head_dim in pairs: an order of its own, the same in both).
        Returns [tokens, heads * head_dim] in qkv's dtype.
        """
        ...


class Decoder:
    """Computes hidden states and logits, of a part of a model or of all; the KV cache is the attention's.

    Where several ranks share the layers, all of them make the same calls. The first part embeds, each runs its
    layers, the last one finishes.
    """

    def __init__(self, config: ModelConfig, weights: Weights, collective: Collective = ALONE) -> None:
        """config: of the part, as from `partition.local`."""
        self.config = config
        self.weights = weights
        self.collective = collective
        self._ids = config.vocab_size // collective.ranks
        self.activations = activation_dtype(weights.dtype, weights.device)
        self._frequencies = inverse_frequencies(config).to(weights.device)

    @torch.inference_mode()
    def hidden(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """A whole model: tokens, positions: [T] int64 -> [T, hidden], normed, in the activation dtype."""
        return self.finish(self.run(self.embed(tokens), positions, attention))

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        """tokens: [T] int64 -> [T, hidden], in the activation dtype."""
        assert self.weights.embedding is not None, "only the first part embeds"
        return functional.embedding(tokens, self.weights.embedding).to(self.activations)

    @torch.inference_mode()
    def run(self, x: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """x behind the part's layers, in its place: [T, hidden]; positions: [T] int64.

        The attention's layers are numbered within the part.
        """
        angles = positions.unsqueeze(-1) * self._frequencies
        rotation = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
        for index, layer in enumerate(self.weights.layers):
            x += self._attend(index, layer, x, rotation, attention)
            gate, up = layer.gate_up(layer.mlp_norm(x)).chunk(2, dim=-1)
            x += self._sum(layer.down(functional.silu(gate).mul_(up)))
        return x

    @torch.inference_mode()
    def finish(self, x: Tensor) -> Tensor:
        """x behind the last layer: [T, hidden] -> the same, normed."""
        assert self.weights.norm is not None, "only the last part finishes"
        return self.weights.norm(x)

    def _sum(self, product: Tensor) -> Tensor:
        """Over the ranks, in the activation dtype: summands of 16 bits would be rounded anew at each addition."""
        if self.collective.ranks == 1:
            return product
        return self.collective.sum(product.to(self.activations))

    def _attend(self, index: int, layer: LayerWeights, x: Tensor, rotation: Tensor, attention: Attention) -> Tensor:
        rotated = self.config.num_heads + self.config.num_kv_heads
        qkv = layer.qkv(layer.attention_norm(x)).view(len(x), -1, self.config.head_dim)
        qk = qkv[:, :rotated]
        if layer.qk_norm is not None:
            qk.copy_(layer.qk_norm(qk))
        rotate(qk, rotation)
        return self._sum(layer.output(attention.run(index, qkv)))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [S, hidden] -> [S, vocab / ranks] float32, of this rank's ids."""
        head = self.weights.head
        assert head is not None, "only the last part has logits"
        chunk = max(1, LOGITS_BYTES // (4 * self._ids))
        if hidden.shape[0] <= chunk:
            return head(hidden).float()
        out = hidden.new_empty(hidden.shape[0], self._ids, dtype=torch.float32)
        for start in range(0, hidden.shape[0], chunk):
            out[start : start + chunk] = head(hidden[start : start + chunk])
        return out


def rotate(x: Tensor, rotation: Tensor) -> None:
    """Rotary embedding (Su et al., 2021), in place: a complex product in float32.

    x: [tokens, heads, head_dim], the two numbers of a pair side by side; rotation: [tokens, 1, head_dim / 2]
    complex.
    """
    pairs = torch.view_as_complex(x.float().view(*x.shape[:2], -1, 2))
    if x.dtype == torch.float32:
        pairs.mul_(rotation)
    else:
        x.copy_(torch.view_as_real(pairs * rotation).flatten(-2))


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
