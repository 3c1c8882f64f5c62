"""The products and norms of a decoder, in the form that is fastest where they run."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

PART_ROWS = 4096
"""Rows of one packed part of a weight: 512 columns of it in float16 fill the second-level caches of two cores."""
MANY_ROWS = 128
"""From so many rows of x on, a product is bound by arithmetic, and float32 weights are faster."""


class Linear(Protocol):
    """`x: [rows, in] -> [rows, out]`, both in the activation dtype."""

    def __call__(self, x: Tensor) -> Tensor: ...


class PlainLinear:
    """weight: [out, in], bias: [out] or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class HalfLinear:
    """Weights packed by FBGEMM as float16, products and sums in float32.

    float16 has three bits more than bfloat16; below 6e-5 it rounds to multiples of 6e-8. FBGEMM reads a
    matrix once for every 14 rows of x; a tall one is cut so that each part stays in the cache meanwhile.
    For many rows a float32 copy, where there is one, takes a fifth less time (1024 rows on Emerald Rapids).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, copy: bool = False) -> None:
        """copy: keep the weights in float32 as well."""
        self.copy = weight.t().float().contiguous() if copy else None
        """[in, out]: some 4% faster than the other way round."""
        self.bias = wide = None if bias is None else bias.float()
        self.packed = [
            torch.ops.quantized.linear_prepack_fp16(weight[part].float(), None if wide is None else wide[part])
            for part in (slice(start, start + PART_ROWS) for start in range(0, weight.shape[0], PART_ROWS))
        ]

    def __call__(self, x: Tensor) -> Tensor:
        if self.copy is not None and len(x) >= MANY_ROWS:
            return x @ self.copy if self.bias is None else torch.addmm(self.bias, x, self.copy)
        parts: list[Tensor] = [torch.ops.quantized.linear_dynamic_fp16(x, part) for part in self.packed]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def uses_half_weights(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether bfloat16 products run with float16 weights and float32 activations.

    So they do on CPUs without tile instructions: there a bfloat16 dot product runs at half the rate of a
    float32 one (measured on Emerald Rapids), and small batches are bound by reading the weights.
    """
    return (
        dtype == torch.bfloat16
        and device.type == "cpu"
        and "fbgemm" in torch.backends.quantized.supported_engines
        and not torch.cpu._is_amx_tile_supported()
    )


def activation_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What the decoder computes in between products, where weights and KV cache are of `dtype`."""
    return torch.float32 if uses_half_weights(dtype, device) else dtype


def make_linear(weight: Tensor, bias: Tensor | None = None, *, copy: bool = False) -> Linear:
    """The product with `weight: [out, in]`, in the form that its dtype and device call for.

    copy: whether memory may be spent on a second form for many rows.
    """
    if uses_half_weights(weight.dtype, weight.device):
        return HalfLinear(weight, bias, copy=copy)
    return PlainLinear(weight, bias)


class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32 (Zhang and Sennrich, 2019).

    In float32 the norm is taken as hypot(|x|, sqrt(size * eps)): half the operations, as exact.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        size = weight.shape[-1]
        self.weight = weight
        self.eps = eps
        self._scaled = weight.float() * math.sqrt(size)
        self._floor = torch.tensor(math.sqrt(size * eps), device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return functional.rms_norm(x, self.weight.shape[-1:], None, self.eps) * self.weight
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x / torch.hypot(length, self._floor)).mul_(self._scaled)
