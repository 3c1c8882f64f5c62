"""A plan arranged for the kernels, on the host: tokens of rows with one token first, then those of longer rows,
and the tiles of attention's work.

A tile is a part of the work that one program does for each KV head. Tiles are data, so that one CUDA graph serves
whatever rows, chunks and shared prefixes a step has.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from toka.messages import Plan

TILE_FIELDS = 8
"""Numbers of a tile, the last without meaning. Of a row of one token: the row, its slot, its first page, the key behind
its last one, how many pieces the row is cut in, which one this is, the first one's place. Of a prefix: the slot whose
page table has it, its first and last page, the first member, how many members, which part. Of a chunk: its slot, its
first token, how many tokens, the first one's position, the first page, the position of the chunk's first token. Keys
begin at a page, which a compiler that sees it uses well."""
PREFIX_QUERIES = 128
CHUNK_QUERIES = 64
"""Queries of a tile: heads that share keys count as queries of their own."""
PROGRAMS = 2
"""Programs of prefix attention that a multiprocessor works on at once."""
MIN_PART_PAGES = 4
MOST_PARTS = 32
"""A prefix is split into so many parts at most, no shorter than that."""
PART_COST = 0.004
"""What a part more costs, as a share of attention over the whole prefix: it is written and merged."""
TILES_PER_PROCESSOR = 12
"""Tiles of decode rows that keep a multiprocessor busy: where there are fewer, long rows are cut."""
PIECE_KEYS = 512
MOST_PIECES = 32
"""A decode row is cut into so many pieces at most, of so many keys at least."""
PIECE_STEP = 128
"""Pieces but the last are of a multiple of about so many keys."""

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]


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
    decode_tiles: Int64s
    sample_tokens: Int64s
    row_begins: Int64s
    """Where the tokens of each of the plan's rows begin."""

    @property
    def fields(self) -> tuple[Int32s, ...]:
        own = self.tokens, self.slots, self.positions, self.shared
        return (*own, self.prefix_first, self.prefix_count, self.members)

    @property
    def tiles(self) -> tuple[Int64s, ...]:
        return self.decode_tiles, self.prefix_tiles, self.chunk_tiles


class Arranger:
    def __init__(self, page_size: int, heads: int, kv_heads: int, processors: int, parts: int) -> None:
        """processors: of the GPU; parts: most parts of prefixes in one step."""
        self._size = page_size
        self._kv_heads = kv_heads
        self._members_per_tile = PREFIX_QUERIES // (heads // kv_heads)
        self._tokens_per_tile = CHUNK_QUERIES // (heads // kv_heads)
        self._piece_step = -(-PIECE_STEP // page_size) * page_size
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
            decode_tiles=self._decode_tiles(slots[:rows], shared[:rows].astype(np.int64), starts[:rows] + np.int64(1)),
            sample_tokens=(ends - 1)[place[plan.sample_rows]],
            row_begins=(ends - counts)[place],
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
            starts = np.arange(0, len(mine), self._members_per_tile)
            cuts = np.arange(parts + 1) * pages // parts
            each = np.zeros((len(starts), parts, TILE_FIELDS), np.int64)
            each[..., 0] = slots[who[0]]
            each[..., 1], each[..., 2] = cuts[:-1], cuts[1:]
            each[..., 3] = member + starts[:, None]
            each[..., 4] = np.minimum(self._members_per_tile, len(mine) - starts)[:, None]
            each[..., 5] = np.arange(parts)
            tiles.append(each.reshape(-1))
            part += len(mine) * parts
            member += len(mine)
        members = np.concatenate([np.empty(0, np.int64), *tokens]).astype(np.int32)
        return first, count, members, np.concatenate(tiles)

    def _splits(self, pages: list[int], members: list[int]) -> list[int]:
        """Into how many parts each group's prefix is split: as many as make the programs finish together soonest."""
        tiles = sum(-(-each // self._members_per_tile) for each in members)
        parts = np.arange(1, max(2, min(MOST_PARTS, self._parts // max(1, sum(members))) + 1))
        rounds = -(-tiles * self._kv_heads * parts // (PROGRAMS * self._processors))
        best = int(parts[np.argmin(rounds / parts * (1 + PART_COST * parts))])
        return [min(best, max(1, each // MIN_PART_PAGES)) for each in pages]

    def _chunk_tiles(self, slots: Int32s, starts: Int32s, counts: Int32s, first: Int64s, shared: Int32s) -> Int64s:
        tiles = -(-counts // self._tokens_per_tile)
        row = np.repeat(np.arange(len(counts)), tiles)
        begin = _ranges(np.zeros_like(tiles), tiles) * self._tokens_per_tile
        each = np.zeros((len(row), TILE_FIELDS), np.int64)
        each[:, 0] = slots[row]
        each[:, 1] = first[row] + begin
        each[:, 2] = np.minimum(self._tokens_per_tile, counts[row] - begin)
        each[:, 3] = starts[row] + begin
        each[:, 4] = shared[row] // self._size
        each[:, 5] = starts[row]
        return each[np.argsort(shared[row] - each[:, 3], kind="stable")].reshape(-1)

    def _decode_tiles(self, slots: Int32s, low: Int64s, high: Int64s) -> Int64s:
        """slots, low, high: [rows], with each row's keys. Long rows are cut where whole ones leave processors idle."""
        lengths = high - low
        each = -(-int(lengths.sum()) * self._kv_heads // (TILES_PER_PROCESSOR * self._processors))
        pieces = np.minimum(-(-lengths // max(PIECE_KEYS, each)), MOST_PIECES)
        step = -(-lengths // (pieces * self._piece_step)) * self._piece_step
        pieces = -(-lengths // step)
        row = np.repeat(np.arange(len(low)), pieces)
        which = _ranges(np.zeros_like(pieces), pieces)
        cut = np.where(pieces > 1, pieces, 0)
        tiles = np.zeros((len(row), TILE_FIELDS), np.int64)
        tiles[:, 0] = row
        tiles[:, 1] = slots[row]
        first = low[row] + which * step[row]
        tiles[:, 2] = first // self._size
        tiles[:, 3] = np.minimum(first + step[row], high[row])
        tiles[:, 4] = pieces[row]
        tiles[:, 5] = which
        tiles[:, 6] = (np.cumsum(cut) - cut)[row]
        return tiles.reshape(-1)


def extra_tiles(processors: int, kv_heads: int) -> int:
    """How many more tiles than rows of one token there may be. At most twice as many pieces have to be merged."""
    return -(-TILES_PER_PROCESSOR * processors // kv_heads)


def _ranges(starts: NDArray[np.integer], counts: NDArray[np.integer]) -> Int64s:
    """Numbers from starts[i] on, counts[i] of them, one range after another."""
    ends = np.cumsum(counts, dtype=np.int64)
    first: Int64s = np.repeat(starts - (ends - counts), counts)
    return first + np.arange(len(first))
