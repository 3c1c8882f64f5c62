"""Whether the CUDA executor runs a model, and how it is made ready."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from importlib.util import find_spec

import torch

from toka.model import ModelConfig
from workers.stage.cuda.executor import CudaExecutor
from workers.stage.cuda.fused import Fused, compiled, ready_made
from workers.stage.kv_cache import free_memory
from workers.stage.sizes import Sizes
from workers.stage.weights import Weights

HEAD_DIMS = (64, 128)
GRAPHS_MEASURED = 4
"""Sizes of steps whose graphs are captured on trial, beside the largest."""


def fits(config: ModelConfig, weights: Weights) -> bool:
    """Whether CUDA kernels for the model exist. ValueError where they do and FlashInfer is missing."""
    if weights.device.type != "cuda" or weights.dtype == torch.float32 or config.head_dim not in HEAD_DIMS:
        return False
    if find_spec("flashinfer") is None:
        raise ValueError("device: cuda needs FlashInfer, which the extra toka-engine[cuda] brings")
    return True


def build(
    config: ModelConfig,
    weights: Weights,
    choose: Callable[[int | None], Sizes],
    torch_compile: bool,
    progress: Callable[[float], None] = lambda fraction: None,
) -> CudaExecutor:
    """An executor with all kernels compiled and all graphs captured.

    choose: sizes, given the bytes that have to stay free beside the KV cache, or None where they are not known
    yet. `progress` hears the fraction captured.
    """
    fused = compiled() if torch_compile else ready_made()
    working = _working_memory(config, weights, choose(None), fused)
    executor = CudaExecutor(config, weights, choose(working), fused)
    executor.capture(progress)
    return executor


def _working_memory(config: ModelConfig, weights: Weights, sizes: Sizes, fused: Fused) -> int:
    """Bytes that an executor of `sizes` takes beside its KV cache, measured on one whose cache is a single page.

    The largest graphs are captured, and a few more, to know what a graph takes. Counts of penalised slots are
    allocated as requests come.
    """
    torch.cuda.empty_cache()
    before = free_memory(weights.device)
    executor = CudaExecutor(config, weights, dataclasses.replace(sizes, pages=1), fused)
    largest, *others = executor.steps.sizes
    executor.capture(sizes=[largest])
    first = before - free_memory(weights.device)
    some = others[:GRAPHS_MEASURED]
    executor.capture(sizes=some)
    each = (before - free_memory(weights.device) - first) / max(1, len(some))
    counts = executor.special.edits.most_bytes
    del executor
    gc.collect()
    torch.cuda.empty_cache()
    return first + int(each * len(others)) + counts
