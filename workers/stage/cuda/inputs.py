"""What a step's kernels read: a plan arranged in arrays on the host, and the same arrays on the GPU.

Tokens of rows with one token come first, then those of longer rows. A CUDA graph finds the arrays where they
were when it was captured: their places depend on nothing but how many tokens and samples they are for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from toka.messages import Plan

TILE_QUERIES = 128
"""Queries of a tile of attention: heads that share keys count as queries of their own."""
TILE_FIELDS = 6
"""Numbers of a tile. Of a prefix: the slot whose page table has it, its first and last page, the first member,
how many members, which part. Of a chunk: its slot, its first token, how many tokens, the first one's position,
the first key; and one without meaning."""
HEADER = 4
ROWS, PREFIX_TILES, CHUNK_TILES = range(3)
"""What the header's numbers count; rows are those of one token. The prefixes' tiles follow, then the chunks'."""
MIN_PART_PAGES = 32
"""A prefix is split over parts no shorter than this."""
_TOKEN_FIELDS = 7
_SAMPLE_FIELDS = 3
_ALIGNMENT = 16

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]


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


@dataclass(frozen=True, slots=True)
class Arranged:
    """A plan on the host. Arrays as in `Inputs`."""

    rows: int
    """Rows of one token, and tokens in them."""
    tokens: Int32s
    slots: Int32s
    positions: Int32s
    shared: Int32s
    prefix_first: Int32s
    prefix_count: Int32s
    members: Int32s
    prefix_tiles: Int64s
    chunk_tiles: Int64s
    sample_tokens: Int64s

    @property
    def fields(self) -> tuple[Int32s, ...]:
        own = self.tokens, self.slots, self.positions, self.shared
        return (*own, self.prefix_first, self.prefix_count, self.members)


class Arranger:
    def __init__(self, page_size: int, heads: int, kv_heads: int, processors: int, parts: int) -> None:
        """processors: of the GPU; parts: most parts of prefixes in one step."""
        self._size = page_size
        self._kv_heads = kv_heads
        self._per_tile = TILE_QUERIES // (heads // kv_heads)
        self._processors = processors
        self._parts = parts

    def arrange(self, plan: Plan) -> Arranged:
        counts = plan.row_counts
        order = np.argsort(counts > 1, kind="stable")
        rows = int(np.count_nonzero(counts == 1))
        slots, starts, counts = plan.row_slots[order], plan.row_starts[order], counts[order]
        ends = np.cumsum(counts, dtype=np.int64)
        within = _ranges(np.zeros_like(counts), counts)
        old = np.cumsum(plan.row_counts) - plan.row_counts
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        shared = np.zeros(len(order), np.int32)
        groups = self._groups(plan, place)
        for pages, who in groups:
            shared[who] = pages * self._size
        assert (shared <= starts).all(), "a shared prefix must be in the cache"
        first, count, members, tiles = self._prefix_tiles(groups, slots, ends, counts)
        chunks = slice(rows, None)
        return Arranged(
            rows=rows,
            tokens=plan.tokens[np.repeat(old[order], counts) + within],
            slots=np.repeat(slots, counts),
            positions=(np.repeat(starts, counts) + within).astype(np.int32),
            shared=np.repeat(shared, counts),
            prefix_first=first,
            prefix_count=count,
            members=members,
            prefix_tiles=tiles,
            chunk_tiles=self._chunk_tiles(
                slots[chunks], starts[chunks], counts[chunks], (ends - counts)[chunks], shared[chunks]
            ),
            sample_tokens=(ends - 1)[place[plan.sample_rows]],
        )

    def _groups(self, plan: Plan, place: Int64s) -> list[tuple[int, Int64s]]:
        """Pages and arranged rows of each group."""
        members = np.split(place[plan.group_rows], np.cumsum(plan.group_row_counts)[:-1])
        return list(zip(plan.group_page_counts.tolist(), members)) if len(plan.group_page_counts) else []

    def _prefix_tiles(
        self, groups: list[tuple[int, Int64s]], slots: Int32s, ends: Int64s, counts: Int32s
    ) -> tuple[Int32s, Int32s, Int32s, Int64s]:
        """prefix_first, prefix_count and members, as in `Inputs`, and tiles."""
        total = int(ends[-1])
        first, count = np.zeros(total, np.int32), np.zeros(total, np.int32)
        tokens = [_ranges(ends[who] - counts[who], counts[who]) for _, who in groups]
        splits = self._splits([pages for pages, _ in groups], [len(each) for each in tokens])
        tiles = [np.empty(0, np.int64)]
        part = member = 0
        for (pages, who), mine, parts in zip(groups, tokens, splits):
            first[mine] = part + np.arange(len(mine)) * parts
            count[mine] = parts
            starts = np.arange(0, len(mine), self._per_tile)
            cuts = np.arange(parts + 1) * pages // parts
            each = np.empty((len(starts), parts, TILE_FIELDS), np.int64)
            each[..., 0] = slots[who[0]]
            each[..., 1], each[..., 2] = cuts[:-1], cuts[1:]
            each[..., 3] = member + starts[:, None]
            each[..., 4] = np.minimum(self._per_tile, len(mine) - starts)[:, None]
            each[..., 5] = np.arange(parts)
            tiles.append(each.reshape(-1))
            part += len(mine) * parts
            member += len(mine)
        members = np.concatenate([np.empty(0, np.int64), *tokens]).astype(np.int32)
        return first, count, members, np.concatenate(tiles)

    def _splits(self, pages: list[int], members: list[int]) -> list[int]:
        """Into how many parts each group's prefix is split, so that every multiprocessor has work."""
        tiles = sum(-(-each // self._per_tile) for each in members)
        wanted = -(-2 * self._processors // max(1, tiles * self._kv_heads))
        splits = [min(wanted, max(1, each // MIN_PART_PAGES)) for each in pages]
        return splits if sum(a * b for a, b in zip(splits, members)) <= self._parts else [1] * len(pages)

    def _chunk_tiles(self, slots: Int32s, starts: Int32s, counts: Int32s, first: Int64s, shared: Int32s) -> Int64s:
        tiles = -(-counts // self._per_tile)
        row = np.repeat(np.arange(len(counts)), tiles)
        begin = _ranges(np.zeros_like(tiles), tiles) * self._per_tile
        each = np.zeros((len(row), TILE_FIELDS), np.int64)
        each[:, 0] = slots[row]
        each[:, 1] = first[row] + begin
        each[:, 2] = np.minimum(self._per_tile, counts[row] - begin)
        each[:, 3] = starts[row] + begin
        each[:, 4] = shared[row]
        return each[np.argsort(each[:, 4] - each[:, 3], kind="stable")].reshape(-1)


def _ranges(starts: NDArray[np.integer], counts: Int32s) -> Int64s:
    """Numbers from starts[i] on, counts[i] of them, one range after another."""
    ends = np.cumsum(counts, dtype=np.int64)
    first: Int64s = np.repeat(starts - (ends - counts), counts)
    return first + np.arange(len(first))


class InputBuffer:
    """The memory behind `Inputs` and `Samples`: samples stand before its middle, all else behind it."""

    def __init__(self, tokens: int, samples: int, padding_slot: int, device: torch.device) -> None:
        """For so many tokens and samples at most."""
        self._padding_slot = padding_slot
        self._middle = _SAMPLE_FIELDS * _stride(samples)
        # There is a token at least in each tile, and there are few parts where there are many tiles.
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
        more = HEADER + len(arranged.prefix_tiles) + len(arranged.chunk_tiles)
        host = _pinned(tiles + more, torch.int32, self._data.device)
        flat = host.numpy()
        flat[:tiles] = 0
        flat[before + stride : before + 2 * stride] = self._padding_slot
        flat[_stride(samples) : 2 * _stride(samples)] = self._padding_slot
        for i, values in enumerate((arranged.sample_tokens.astype(np.int32), slots, outputs)):
            flat[i * _stride(samples) :][: len(values)] = values
        for i, values in enumerate(arranged.fields):
            flat[before + i * stride :][: len(values)] = values
        counts = [len(each) // TILE_FIELDS for each in (arranged.prefix_tiles, arranged.chunk_tiles)]
        flat[tiles:] = np.concatenate([[arranged.rows, *counts, 0], arranged.prefix_tiles, arranged.chunk_tiles])
        self._data[self._middle - before :][: len(host)].copy_(host, non_blocking=True)


def _stride(size: int) -> int:
    """Of arrays whose beginnings are aligned."""
    return -(-size * 4 // _ALIGNMENT) * _ALIGNMENT // 4


def _pinned(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for a copy to `device` that nobody waits for. The allocator takes it back when the copy is done."""
    return torch.empty(size, dtype=dtype, pin_memory=device.type == "cuda")


def upload(arrays: Sequence[NDArray[np.generic]], device: torch.device) -> list[Tensor]:
    """Arrays of any kinds to the GPU in one copy, without waiting."""
    sizes = [-(-each.nbytes // _ALIGNMENT) * _ALIGNMENT for each in arrays]
    host = _pinned(sum(sizes), torch.uint8, device)
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
