"""From settings to an executor: device, weights, sizes, cache."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import torch
import zmq

from toka.config import Config
from toka.model import open_model
from workers.stage import sizes
from workers.stage.collective import Collective, join
from workers.stage.decoder import Decoder
from workers.stage.executor import Executor
from workers.stage.interface import AnyExecutor
from workers.stage.kv_cache import CacheShape, KVCache
from workers.stage.partition import Partition, Seat, local, partition
from workers.stage.pipe import ZmqPipe
from workers.stage.sampler import Sampler
from workers.stage.slots import Slots
from workers.stage.weights import load_weights

Progress = Callable[[str, float], None]

LOADED_CPU, LOADED_CUDA, CAPTURED = 0.8, 0.3, 0.95
"""Fractions of a start that are done when the weights are loaded, and when the graphs are captured."""


def build(config: Config, progress: Progress = lambda what, fraction: None, seat: Seat | None = None) -> AnyExecutor:
    """Load what the stage `seat` has of the model that `config` names; None: it is alone.

    `progress` hears what is being done, and the fraction of the start that is done. Raises ValueError, in one
    sentence, where model, device or memory do not allow it.
    """
    source, device, seat = open_model(config.model), _device(config.device), seat or Seat()
    if device.type == "cpu":
        _check_cpu(config)
    part = partition(config, source.config, seat.stage)
    model = local(source.config, part)
    loaded = LOADED_CPU if device.type == "cpu" else LOADED_CUDA
    weights = load_weights(
        source,
        part=part,
        dtype=config.dtype,
        device=device,
        random=config.weights == "random",
        progress=lambda done: progress("loading weights", done * loaded),
    )
    choose = functools.partial(sizes.choose, config, model, weights.dtype, device)
    if device.type == "cuda":
        from workers.stage.cuda import build as cuda

        if cuda.fits(model, weights):
            return cuda.build(
                model,
                weights,
                choose,
                config.torch_compile,
                part,
                seat,
                lambda done: progress("capturing CUDA graphs", loaded + done * (CAPTURED - loaded)),
            )
        if config.torch_compile:
            raise ValueError("torch_compile: is for 16-bit weights and head dimensions of 64 and 128")
    return _plain(Decoder(model, weights, _ranks(part, seat, device)), choose(None), part)


def _ranks(part: Partition, seat: Seat, device: torch.device) -> Collective:
    return join(part, seat.near, "nccl" if device.type == "cuda" else "gloo")


def _plain(model: Decoder, own: sizes.Sizes, part: Partition) -> Executor:
    """The executor in plain torch."""
    config, ranks, device = model.config, model.collective, model.weights.device
    chosen = sizes.agreed(own, ranks.gather, device)
    shape = CacheShape(config.num_layers, chosen.pages, chosen.page_size, config.num_kv_heads, config.head_dim)
    cache, ids = KVCache(shape, model.weights.dtype, device), part.share(config.vocab_size)
    slots = Slots(chosen.max_seqs, ids.stop - ids.start, device, ids.start)
    return Executor(model, chosen, cache, part, Sampler(slots, ranks), device)


def connect(
    executor: AnyExecutor, config: Config, seat: Seat, context: zmq.Context[zmq.Socket[bytes]]
) -> ZmqPipe | None:
    """Give `executor` its pipe to the other stages of a pipeline; the pipe, not connected yet, where it is ZeroMQ's."""
    if seat.stages == seat.ranks:
        return None
    if not isinstance(executor, Executor):
        from workers.stage.cuda import build as cuda

        cuda.connect(executor)
        return None
    model = executor.model
    pipe = ZmqPipe(context, config, seat, model.config.hidden_size, model.activations, executor.device)
    executor.pipe = pipe
    return pipe


def _check_cpu(config: Config) -> None:
    if config.dtype == "float16":
        raise ValueError("dtype: float16 needs a GPU; a CPU runs bfloat16 and float32")
    if config.torch_compile:
        raise ValueError("torch_compile: needs a GPU")


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: cuda was asked for, but torch finds no GPU")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("TOKA_GPU", "0")))
    torch.cuda.set_device(device)
    return device
