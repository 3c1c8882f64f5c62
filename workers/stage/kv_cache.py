"""The paged KV cache of a stage: memory, sizes, page copies."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from toka.model import ModelConfig

CPU_MEMORY_SHARE = 0.25
"""Of the memory that is free when the weights are loaded; the rest is for everything else on the machine."""
CPU_MEMORY_MOST = 4 << 30
CUDA_MEMORY_SHARE = 0.9
CUDA_MEASURED_SHARE = 0.98
"""The same where what a step takes is known and left out."""
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Sizes of one stage's cache. `pages` does not count the scratch page, which stands behind the last."""

    layers: int
    pages: int
    page_size: int
    kv_heads: int
    head_dim: int

    @property
    def scratch(self) -> int:
        """A page that no sequence owns: what padding in page lists points to."""
        return self.pages


class KVCache:
    """Keys and values of all layers, in pages of `page_size` tokens.

    `layers[i]`: [pages + 1, 2 * kv_heads, page_size, head_dim], heads of keys, then of values: one write stores
    both, one read fetches both, and what it fetched of a head lies together. All is zero at first, and never
    touched on the CPU before it is written, so that a large cache costs neither time at start nor memory before
    it is used.
    """

    def __init__(self, shape: CacheShape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.dtype = dtype
        size = (shape.pages + 1, 2 * shape.kv_heads, shape.page_size, shape.head_dim)
        self.layers = [_zeros(size, dtype, device) for _ in range(shape.layers)]
        self._rows = [layer.view(-1, shape.head_dim) for layer in self.layers]
        self._heads = torch.arange(2 * shape.kv_heads, device=device)
        self._scratch = torch.empty(0, dtype=dtype, device=device)

    def aim(self, pages: Tensor, offsets: Tensor) -> None:
        """Choose where the next `write`s go: pages, offsets: [tokens]."""
        of_heads = pages[:, None] * len(self._heads) + self._heads
        self._places = (of_heads * self.shape.page_size + offsets[:, None]).flatten()

    def write(self, layer: int, kv: Tensor) -> None:
        """Store kv: [tokens, 2 * kv_heads, head_dim]: keys, then values."""
        self._rows[layer].index_copy_(0, self._places, kv.reshape(-1, self.shape.head_dim))

    def scratch(self, count: int) -> Tensor:
        """Memory for `count` numbers, the same at every call unless it has to grow."""
        if len(self._scratch) < count:
            self._scratch = self.layers[0].new_empty(count)
        return self._scratch[:count]

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy pages sources: [n] to targets: [n] in every layer."""
        for cache in self.layers:
            cache[targets] = cache[sources]


class Gather:
    """Copies the keys and values in some pages together, one layer at a time."""

    def __init__(self, cache: KVCache, pages: Tensor) -> None:
        """pages: [rows, pages of a row]."""
        shape, (rows, count) = cache.shape, pages.shape
        heads, size = 2 * shape.kv_heads, shape.page_size * shape.head_dim
        self._places = (torch.arange(heads, device=pages.device)[:, None, None] + pages * heads).flatten()
        self._layers = [layer.view(-1, size) for layer in cache.layers]
        self._copy = cache.scratch(len(self._places) * size).view(-1, size)
        self._heads = self._copy.view(2, shape.kv_heads, rows, count * shape.page_size, shape.head_dim).transpose(1, 2)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values: each [rows, kv_heads, keys, head_dim], until the next read of the cache's pages."""
        torch.index_select(self._layers[layer], 0, self._places, out=self._copy)
        k, v = self._heads
        return k, v


def page_bytes(config: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * page_size * dtype.itemsize


def choose_pages(
    tokens: int,
    config: ModelConfig,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    most_tokens: int,
    working: int | None,
) -> int:
    """Pages of the cache: for `tokens`, or, where that is 0, what memory allows and `most_tokens` can use.

    working: as in `sizes.choose`. Raises ValueError where memory does not hold what was asked for.
    """
    one, free = page_bytes(config, page_size, dtype), free_memory(device)
    if working is not None:
        free = max(0, free - working)
    if tokens:
        pages = -(-tokens // page_size)
        if pages * one > free:
            raise ValueError(f"kv_cache_tokens: {tokens} tokens take {pages * one >> 20} MiB, {free >> 20} are free")
        return pages
    cpu = device.type == "cpu"
    cuda_share = CUDA_MEMORY_SHARE if working is None else CUDA_MEASURED_SHARE
    share = min(int(free * CPU_MEMORY_SHARE), CPU_MEMORY_MOST) if cpu else int(free * cuda_share)
    pages = min(share // one, -(-most_tokens // page_size))
    if pages < 1:
        raise ValueError(f"no memory for a KV cache: {free >> 20} MiB are free")
    return pages


def free_memory(device: torch.device) -> int:
    """Bytes that can still be taken on `device`; on the CPU within the control group's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min([_available(), *_control_group()])


def _available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def _control_group() -> list[int]:
    """What is left under the limits of control groups, version 2 or 1."""
    left = []
    for limit, usage in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        # Where there is no limit, there is no file, or no number in it.
        with contextlib.suppress(OSError, ValueError):
            left.append(max(0, int((_CGROUP / limit).read_text()) - int((_CGROUP / usage).read_text())))
    return left


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    # numpy's zeros are mapped, not written.
    return torch.from_numpy(np.zeros(int(np.prod(shape)) * dtype.itemsize, np.uint8)).view(dtype).view(*shape)
