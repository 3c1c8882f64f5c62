"""From settings to an executor: device, weights, sizes, cache."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from toka.config import Config
from toka.model import open_model
from workers.stage import sizes
from workers.stage.decoder import Decoder
from workers.stage.executor import Executor
from workers.stage.interface import AnyExecutor
from workers.stage.kv_cache import CacheShape, KVCache
from workers.stage.weights import load_weights

Progress = Callable[[str, float], None]

LOADED_CPU, LOADED_CUDA, CAPTURED = 0.8, 0.3, 0.95
"""Fractions of a start that are done when the weights are loaded, and when the graphs are captured."""


def build(config: Config, progress: Progress = lambda what, fraction: None) -> AnyExecutor:
    """Load what `config` names. `progress` hears what is being done, and the fraction of the start that is done.

    Raises ValueError, in one sentence, where model, device or memory do not allow it.
    """
    source, device = open_model(config.model), _device(config.device)
    if device.type == "cpu":
        _check_cpu(config)
    model = source.config
    loaded = LOADED_CPU if device.type == "cpu" else LOADED_CUDA
    weights = load_weights(
        source,
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
                lambda done: progress("capturing CUDA graphs", loaded + done * (CAPTURED - loaded)),
            )
        if config.torch_compile:
            raise ValueError("torch_compile: is for 16-bit weights and head dimensions of 64 and 128")
    chosen = choose(None)
    shape = CacheShape(model.num_layers, chosen.pages, chosen.page_size, model.num_kv_heads, model.head_dim)
    cache = KVCache(shape, weights.dtype, device)
    return Executor(Decoder(model, weights), chosen, cache, model.num_heads, model.vocab_size, device)


def _check_cpu(config: Config) -> None:
    if config.dtype == "float16":
        raise ValueError("dtype: float16 needs a GPU; a CPU runs bfloat16 and float32")
    if config.torch_compile:
        raise ValueError("torch_compile: needs a GPU")


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: cuda was asked for, but torch finds no GPU")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
