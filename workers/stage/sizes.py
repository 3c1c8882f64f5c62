"""How large a stage is: pages, sequences, tokens of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from toka.config import Config
from toka.model import ModelConfig
from workers.stage.kv_cache import choose_pages

CPU_SEQS, CUDA_SEQS = 256, 4096
CPU_TOKENS, CUDA_TOKENS = 1024, 8192
CUDA_SEQ_TOKENS = 512
"""Of the cache for each sequence that runs at once: as many run as it may come to hold."""


@dataclass(frozen=True, slots=True)
class Sizes:
    pages: int
    page_size: int
    pages_per_seq: int
    max_seqs: int
    max_tokens: int
    """Tokens of one step."""


def agreed(own: Sizes, gather: Callable[[Tensor], Tensor], device: torch.device) -> Sizes:
    """What all ranks have room for: they run the same steps. gather: every rank's tensor, side by side."""
    mine = torch.tensor([own.pages, own.max_seqs, own.max_tokens], device=device)
    pages, max_seqs, max_tokens = gather(mine).amin(0).tolist()
    return replace(own, pages=pages, max_seqs=max_seqs, max_tokens=max_tokens)


def choose(config: Config, model: ModelConfig, dtype: torch.dtype, device: torch.device, working: int | None) -> Sizes:
    """Sizes from the settings, and from the memory that is free now where they are 0.

    working: bytes that have to stay free beside the KV cache; None: not known, a share of what is free.
    Raises ValueError, which names the setting, where memory does not hold them.
    """
    cpu, size = device.type == "cpu", config.page_size
    context = min(config.max_context or model.max_position_embeddings, model.max_position_embeddings)
    max_seqs = config.max_seqs or (CPU_SEQS if cpu else CUDA_SEQS)
    pages = choose_pages(config.kv_cache_tokens, model, size, dtype, device, max_seqs * context, working)
    if not config.max_seqs:
        max_seqs = min(max_seqs, pages if cpu else max(1, pages * size // CUDA_SEQ_TOKENS))
    max_tokens = config.max_tokens_per_step or max(max_seqs, CPU_TOKENS if cpu else CUDA_TOKENS)
    return Sizes(pages, size, -(-context // size), max_seqs, max_tokens)
