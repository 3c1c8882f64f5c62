"""The products and norms of a decoder, in the form that is fastest where they run."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

PACKED_ROWS = 16
"""Rows of x that bfloat16 weights are packed for; others differ little."""
PART_ROWS = 4096
"""Rows of one packed part of a weight: 512 columns of it in float16 fill the second-level caches of two cores."""
MANY_ROWS = 128
"""From so many rows of x on, a product is bound by arithmetic, and float32 weights are faster."""


class Linear(Protocol):
    """`x: [rows, in] -> [rows, out]`, out in the dtype that products are computed in."""

    def __call__(self, x: Tensor) -> Tensor: ...


class PlainLinear:
    """weight: [out, in], bias: [out] or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x.to(self.weight.dtype), self.weight, self.bias)


class PackedLinear:
    """A bfloat16 product of oneDNN's, with the weight in the order in which its kernels read it.

    Without that it takes a half more time at 16 rows, and three times at one (Zen 5).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
        # The overload itself: to find it anew costs some 10 us a product.
        self._product = torch.ops.mkldnn._linear_pointwise.default
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self._product(x.to(self.packed.dtype), self.packed, self.bias, "none", [], "")
        return out


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


def bfloat16_product() -> type[PackedLinear] | type[HalfLinear] | type[PlainLinear]:
    """What computes bfloat16 products fastest on this CPU."""
    if fast_bfloat16():
        return PackedLinear
    return HalfLinear if "fbgemm" in torch.backends.quantized.supported_engines else PlainLinear


@functools.cache
def fast_bfloat16() -> bool:
    """Whether bfloat16 dot products run at twice the rate of float32 ones, or more.

    So they do with tile instructions, and on AMD's CPUs that have them at all; on Intel's without tiles they run at
    half the rate (measured on Emerald Rapids).
    """
    if torch.cpu._is_amx_tile_supported():
        return True
    return torch.cpu._is_avx512_bf16_supported() and "AuthenticAMD" in Path("/proc/cpuinfo").read_text()


def activation_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What the decoder computes in between products, where weights and KV cache are of `dtype`.

    On a CPU float32: torch's norms are several times faster in it than in 16 bits.
    """
    return torch.float32 if device.type == "cpu" else dtype


def make_linear(weight: Tensor, bias: Tensor | None = None, *, copy: bool = False) -> Linear:
    """The product with `weight: [out, in]`, in the form that its dtype and device call for.

    copy: whether memory may be spent on a second form for many rows.
    """
    on_cpu = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    form = bfloat16_product() if on_cpu else PlainLinear
    return HalfLinear(weight, bias, copy=copy) if form is HalfLinear else form(weight, bias)


class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32 (Zhang and Sennrich, 2019).

    On a CPU the norm is taken as hypot(|x|, sqrt(size * eps)): half the operations, as exact.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        size = weight.shape[-1]
        self.weight = weight
        self.eps = eps
        self._scaled = weight.float() * math.sqrt(size)
        self._floor = torch.tensor(math.sqrt(size * eps), device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu":
            return functional.rms_norm(x, self.weight.shape[-1:], None, self.eps) * self.weight
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return (x / torch.hypot(length, self._floor)).mul_(self._scaled).to(x.dtype)
