"""Whether the CUDA executor runs a model, and how it is made ready."""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Callable
from importlib.util import find_spec

import torch

from toka.model import ModelConfig
from workers.stage.cuda.executor import CudaExecutor
from workers.stage.cuda.fused import compiled, ready_made
from workers.stage.cuda.pipe import NcclPipe
from workers.stage.cuda.ranks import ALONE, Group, gathered, meet, neighbours
from workers.stage.interface import AnyExecutor
from workers.stage.kv_cache import free_memory
from workers.stage.partition import Partition, Seat
from workers.stage.sizes import Sizes, agreed
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
    part: Partition,
    seat: Seat,
    progress: Callable[[float], None] = lambda fraction: None,
) -> CudaExecutor:
    """An executor with all kernels compiled and all graphs captured.

    choose: sizes, given the bytes that have to stay free beside the KV cache, or None where they are not known
    yet. `progress` hears the fraction captured.
    """
    fused = compiled() if torch_compile else ready_made()
    if seat.stages > 1:
        meet(seat.far, seat.stage, seat.stages)
    group = neighbours(seat.stage, seat.stages, seat.ranks)
    trial = dataclasses.replace(choose(None), pages=1)
    if group is not None:
        trial = agreed(trial, functools.partial(gathered, group), weights.device)
    # Before what is free is measured: both have memory of their own.
    shape = trial.max_tokens, config.hidden_size, weights.dtype
    ranks = ALONE if group is None else Group(group, *shape)
    pipe = NcclPipe(seat, *shape) if seat.stages > seat.ranks else None

    def executor(sizes: Sizes) -> CudaExecutor:
        return CudaExecutor(config, weights, sizes, fused, part, ranks)

    working = _working_memory(executor, trial, weights.device)
    made = executor(agreed(choose(working), ranks.gather, weights.device))
    made.capture(progress)
    made.link = pipe
    return made


def connect(executor: AnyExecutor) -> None:
    """Join an executor that is warmed up to the other stages of its pipeline."""
    assert isinstance(executor, CudaExecutor)
    executor.pipe = executor.link


def _working_memory(make: Callable[[Sizes], CudaExecutor], trial: Sizes, device: torch.device) -> int:
    """Bytes that an executor takes beside its KV cache, measured on one of the sizes `trial`, whose cache is a page.

    The largest graphs are captured, and a few more, to know what a graph takes. Counts of penalised slots are
    allocated as requests come.
    """
    torch.cuda.empty_cache()
    before = free_memory(device)
    executor = make(trial)
    largest, *others = executor.steps.sizes
    executor.capture(sizes=[largest])
    first = before - free_memory(device)
    some = others[:GRAPHS_MEASURED]
    executor.capture(sizes=some)
    each = (before - free_memory(device) - first) / max(1, len(some))
    counts = 0 if executor.sampling is None else executor.sampling.special.edits.most_bytes
    del executor
    gc.collect()
    torch.cuda.empty_cache()
    return first + int(each * len(others)) + counts
