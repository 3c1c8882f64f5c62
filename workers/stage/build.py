"""From settings to an executor: device, weights, sizes, cache."""

from __future__ import annotations

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


def build(config: Config, progress: Callable[[float], None] = lambda fraction: None) -> AnyExecutor:
    """Load what `config` names. `progress` hears the fraction done.

    Raises ValueError, in one sentence, where model, device or memory do not allow it.
    """
    source, device = open_model(config.model), _device(config.device)
    model = source.config
    weights = load_weights(
        source, dtype=config.dtype, device=device, random=config.weights == "random", progress=progress
    )
    chosen = sizes.choose(config, model, weights.dtype, device)
    if device.type == "cuda":
        from workers.stage.cuda import build as cuda

        if cuda.fits(model, weights):
            return cuda.build(model, weights, chosen)
    shape = CacheShape(model.num_layers, chosen.pages, chosen.page_size, model.num_kv_heads, model.head_dim)
    cache = KVCache(shape, weights.dtype, device)
    return Executor(Decoder(model, weights), chosen, cache, model.num_heads, model.vocab_size, device)


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: cuda was asked for, but torch finds no GPU")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
