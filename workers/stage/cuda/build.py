"""Whether the CUDA executor runs a model, and how it is made ready."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch

from toka.model import ModelConfig
from workers.stage.cuda.executor import CudaExecutor
from workers.stage.sizes import Sizes
from workers.stage.weights import Weights

HEAD_DIMS = (64, 128)


def fits(config: ModelConfig, weights: Weights) -> bool:
    """Whether CUDA kernels for the model exist. ValueError where they do and FlashInfer is missing."""
    if weights.device.type != "cuda" or weights.dtype == torch.float32 or config.head_dim not in HEAD_DIMS:
        return False
    if find_spec("flashinfer") is None:
        raise ValueError("device: cuda needs FlashInfer, which the extra toka-engine[cuda] brings")
    return True


def build(
    config: ModelConfig, weights: Weights, sizes: Sizes, progress: Callable[[float], None] = lambda fraction: None
) -> CudaExecutor:
    """An executor with all kernels compiled and all graphs captured. `progress` hears the fraction captured."""
    executor = CudaExecutor(config, weights, sizes)
    executor.capture(progress)
    return executor
