"""What a step's kernels read: the arrays of an `Arranged` plan, in one buffer on the GPU.

A CUDA graph finds the arrays where they were when it was captured: their places depend on nothing but how many
tokens and samples they are for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.stage.cuda.arrange import TILE_FIELDS, Arranged, Int32s

HEADER = 4
DECODE_TILES, PREFIX_TILES, CHUNK_TILES = range(3)
"""What the header's numbers count. The tiles follow, in this order."""
_TOKEN_FIELDS = 7
_SAMPLE_FIELDS = 3
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Inputs:
    """Views of one buffer, int32. All but `header`: [tokens]."""

    tokens: Tensor
    """Ids; -1: the one last sampled in the token's slot."""
    slots: Tensor
    positions: Tensor
    shared: Tensor
    """How many of a row's first keys are in `prefix_*`'s parts."""
    prefix_first: Tensor
    prefix_count: Tensor
    """The parts of a shared prefix that the token has to merge: count of them, from first on."""
    members: Tensor
    """Tokens that have a shared prefix, group by group."""
    header: Tensor


@dataclass(frozen=True, slots=True)
class Samples:
    """Views of the same buffer, [samples] int32: from which token's hidden state, for which slot, which output."""

    tokens: Tensor
    slots: Tensor
    outputs: Tensor


class InputBuffer:
    """The memory behind `Inputs` and `Samples`: samples stand before its middle, all else behind it."""

    def __init__(self, tokens: int, samples: int, padding_slot: int, device: torch.device) -> None:
        """For so many tokens and samples at most."""
        self._padding_slot = padding_slot
        self._middle = _SAMPLE_FIELDS * _stride(samples)
        # There is a token at least in each tile, and rows or prefixes in several parts are few.
        size = self._middle + (_TOKEN_FIELDS + 2 * TILE_FIELDS) * (tokens + 1024)
        self._data = torch.zeros(size, dtype=torch.int32, device=device)

    def clear(self) -> None:
        """No rows and no tiles; every token and sample of slot 0."""
        self._data.zero_()

    def inputs(self, size: int) -> Inputs:
        """Where the arrays of a step with `size` tokens, padding included, stand."""
        header = self._middle + _TOKEN_FIELDS * _stride(size)
        fields = [self._data[start : start + size] for start in range(self._middle, header, _stride(size))]
        return Inputs(*[*fields, self._data[header:]])

    def samples(self, size: int) -> Samples:
        """Where the arrays of a step with `size` samples, padding included, stand."""
        starts = range(self._middle - _SAMPLE_FIELDS * _stride(size), self._middle, _stride(size))
        return Samples(*(self._data[start : start + size] for start in starts))

    def fill(self, size: int, arranged: Arranged, samples: int, slots: Int32s, outputs: Int32s) -> None:
        """Copy a step to the GPU without waiting, padded to `size` tokens and `samples` samples.

        slots, outputs: of the samples.
        """
        before, stride = _SAMPLE_FIELDS * _stride(samples), _stride(size)
        tiles = before + _TOKEN_FIELDS * stride
        more = HEADER + sum(map(len, arranged.tiles))
        host = pinned(tiles + more, torch.int32, self._data.device)
        flat = host.numpy()
        flat[:tiles] = 0
        flat[before + stride : before + 2 * stride] = self._padding_slot
        flat[_stride(samples) : 2 * _stride(samples)] = self._padding_slot
        for i, values in enumerate((arranged.sample_tokens.astype(np.int32), slots, outputs)):
            flat[i * _stride(samples) :][: len(values)] = values
        for i, values in enumerate(arranged.fields):
            flat[before + i * stride :][: len(values)] = values
        counts = [len(each) // TILE_FIELDS for each in arranged.tiles]
        flat[tiles:] = np.concatenate([[*counts, 0], *arranged.tiles])
        self._data[self._middle - before :][: len(host)].copy_(host, non_blocking=True)


def _stride(size: int) -> int:
    """Of arrays whose beginnings are aligned."""
    return -(-size * 4 // _ALIGNMENT) * _ALIGNMENT // 4


def pinned(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for a copy to `device` that nobody waits for. The allocator takes it back when the copy is done."""
    return torch.empty(size, dtype=dtype, pin_memory=device.type == "cuda")


def upload(arrays: Sequence[NDArray[np.generic]], device: torch.device) -> list[Tensor]:
    """Arrays of any kinds to the GPU in one copy, without waiting."""
    sizes = [-(-each.nbytes // _ALIGNMENT) * _ALIGNMENT for each in arrays]
    host = pinned(sum(sizes), torch.uint8, device)
    flat, at, places = host.numpy(), 0, []
    for array, size in zip(arrays, sizes):
        flat[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        places.append(at)
        at += size
    there = host.to(device, non_blocking=True)
    kinds = [torch.from_numpy(np.empty(0, array.dtype)).dtype for array in arrays]
    return [
        there[place : place + array.nbytes].view(kind).view(array.shape)
        for array, place, kind in zip(arrays, places, kinds)
    ]
