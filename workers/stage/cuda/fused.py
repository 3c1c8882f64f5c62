"""What stands between a layer's products: norms with the residual sum, and the activation, each one kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import flashinfer
import torch
from torch import Tensor
from torch.nn import functional

from workers.stage.layers import RmsNorm


@dataclass(frozen=True, slots=True)
class Fused:
    norm: Callable[[Tensor, RmsNorm], Tensor]
    """x: [tokens, hidden] -> the same, normed."""
    add_norm: Callable[[Tensor, Tensor, RmsNorm], tuple[Tensor, Tensor]]
    """x and residual, both [tokens, hidden] -> their sum, normed, and their sum. May write over both."""
    silu_and_mul: Callable[[Tensor], Tensor]
    """[tokens, 2 * intermediate], gate before up -> [tokens, intermediate]."""


def ready_made() -> Fused:
    """FlashInfer's kernels."""

    def norm(x: Tensor, by: RmsNorm) -> Tensor:
        normed: Tensor = flashinfer.rmsnorm(x, by.weight, by.eps)
        return normed

    def add_norm(x: Tensor, residual: Tensor, by: RmsNorm) -> tuple[Tensor, Tensor]:
        flashinfer.fused_add_rmsnorm(x, residual, by.weight, by.eps)
        return x, residual

    return Fused(norm, add_norm, flashinfer.silu_and_mul)


def compiled() -> Fused:
    """torch.compile's, one for any number of tokens and one for a single token; kept on disk across starts."""
    norm = torch.compile(_norm, dynamic=True, fullgraph=True)
    add_norm = torch.compile(_add_norm, dynamic=True, fullgraph=True)
    silu_and_mul = torch.compile(_silu_and_mul, dynamic=True, fullgraph=True)

    def norm_by(x: Tensor, by: RmsNorm) -> Tensor:
        return norm(x, by.weight, by.eps)

    def add_norm_by(x: Tensor, residual: Tensor, by: RmsNorm) -> tuple[Tensor, Tensor]:
        return add_norm(x, residual, by.weight, by.eps)

    return Fused(norm_by, add_norm_by, silu_and_mul)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def _add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    # The norm is of the sum in float32, as FlashInfer's is.
    wide = x.float() + residual.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    return normed.to(x.dtype), wide.to(x.dtype)


def _silu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return (functional.silu(gate.float()) * up.float()).to(gate_up.dtype)
