"""Paged attention equals dense attention in float32, whatever a step mixes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from workers.stage.attention import Attention
from workers.stage.batch import Batch, Group
from workers.stage.decode_attention import DecodeAttention
from workers.stage.kv_cache import CacheShape, KVCache

LAYERS, SLOTS, DIM = 2, 24, 16


class World:
    """Sequences with known keys and values, laid out in a cache under a random page table."""

    def __init__(self, seed: int, page: int, kv_heads: int, repeat: int, longest: int, dtype: torch.dtype) -> None:
        self.rng = np.random.default_rng(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.page, self.kv_heads, self.heads, self.dtype = page, kv_heads, kv_heads * repeat, dtype
        width = -(-longest // page)
        pages = SLOTS * width
        self.cache = KVCache(CacheShape(LAYERS, pages, page, kv_heads, DIM), dtype, torch.device("cpu"))
        # What stands in pages nobody owns, or behind a sequence's end, must not matter.
        for part in self.cache.layers:
            part.copy_(self.normal(*part.shape) * 5)
        order = self.rng.permutation(pages).astype(np.int32)
        self.table = torch.from_numpy(order.reshape(SLOTS, width))
        self.attention = Attention(self.cache, self.heads, self.table)
        self.keys = self.normal(LAYERS, SLOTS, longest, kv_heads, DIM)
        self.values = self.normal(LAYERS, SLOTS, longest, kv_heads, DIM)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def share(self, slots: list[int], pages: int) -> np.ndarray:
        """Let `slots` start with the same whole pages."""
        self.table[slots[1:], :pages] = self.table[slots[0], :pages].clone()
        for kept in (self.keys, self.values):
            kept[:, slots[1:], : pages * self.page] = kept[:, slots[:1], : pages * self.page]
        return self.table[slots[0], :pages].numpy().astype(np.int64)

    def fill(self, slot: int, tokens: int) -> None:
        """Put the first `tokens` of a sequence into the cache."""
        where = torch.arange(tokens)
        pages = self.table[slot, where // self.page].long()
        self.cache.aim(pages, where % self.page)
        for layer in range(LAYERS):
            kept = self.keys[layer, slot, :tokens], self.values[layer, slot, :tokens]
            self.cache.write(layer, torch.cat(kept, 1))

    def check(self, batch: Batch, tolerance: float) -> None:
        for slot, start in zip(batch.slots, batch.starts):
            self.fill(int(slot), int(start))
        self.attention.begin(batch)
        total = int(batch.counts.sum())
        slots, positions = np.repeat(batch.slots, batch.counts), batch.positions
        for layer in range(LAYERS):
            q = self.normal(total, self.heads, DIM) * 2
            k, v = self.keys[layer, slots, positions], self.values[layer, slots, positions]
            got = self.attention.run(layer, torch.cat([q, k, v], 1)).view(total, self.heads, DIM).float()
            want = torch.stack([self.dense(layer, q[i], slots[i], positions[i]) for i in range(total)])
            torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)

    def dense(self, layer: int, q: Tensor, slot: int, position: int) -> Tensor:
        repeat = self.heads // self.kv_heads
        k = self.keys[layer, slot, : position + 1].float().repeat_interleave(repeat, 1)
        v = self.values[layer, slot, : position + 1].float().repeat_interleave(repeat, 1)
        scores = torch.einsum("hd,thd->ht", q.float(), k) * DIM**-0.5
        return torch.einsum("ht,thd->hd", scores.softmax(-1), v)


def batch_of(rows: list[tuple[int, int, int]], groups: tuple[Group, ...] = ()) -> Batch:
    slots, starts, counts = np.array(rows, np.int64).T
    return Batch(slots, starts, counts, groups)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1 << 20),
    page=st.sampled_from([1, 3, 4, 16, 32]),
    kv_heads=st.sampled_from([1, 2, 3]),
    repeat=st.sampled_from([1, 2, 3]),
    rows=st.lists(st.tuples(st.integers(0, 60), st.sampled_from([1, 1, 1, 2, 7, 20])), min_size=1, max_size=12),
)
def test_any_mix_of_rows(seed: int, page: int, kv_heads: int, repeat: int, rows: list[tuple[int, int]]) -> None:
    world = World(seed, page, kv_heads, repeat, 80, torch.float32)
    slots = world.rng.permutation(SLOTS)
    world.check(batch_of([(int(slot), *row) for slot, row in zip(slots, rows)]), 2e-5)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1 << 20),
    page=st.sampled_from([1, 4, 16]),
    sizes=st.lists(st.tuples(st.integers(1, 3), st.integers(2, 5)), min_size=1, max_size=3),
    loners=st.integers(0, 4),
)
def test_shared_prefix_groups(seed: int, page: int, sizes: list[tuple[int, int]], loners: int) -> None:
    """Decode rows and prefill rows as members, in the order of a shuffle, with rows outside of all groups."""
    world = World(seed, page, 2, 2, 6 * page + 20, torch.float32)
    rows: list[tuple[int, int, int]] = []
    groups, slot = [], 0
    for pages, members in sizes:
        held = world.share(list(range(slot, slot + members)), pages)
        groups.append((held, range(slot, slot + members)))
        for each in range(slot, slot + members):
            more = int(world.rng.integers(0, 2 * page + 3))
            rows.append((each, pages * page + more, int(world.rng.choice([1, 1, 5]))))
        slot += members
    rows += [(slot + i, int(world.rng.integers(0, 5 * page)), int(world.rng.choice([1, 4]))) for i in range(loners)]
    order = world.rng.permutation(len(rows))
    place = np.argsort(order)
    named = tuple(Group(held, place[list(members)]) for held, members in groups)
    world.check(batch_of([rows[i] for i in order], named), 2e-5)


def test_a_prefix_is_read_again_when_its_pages_were_written() -> None:
    """By a step in which it is no prefix, and by a copy of pages; in two steps on end it is read once."""
    world = World(4, 4, 2, 2, 40, torch.float32)
    rows = [(0, 9, 1), (1, 8, 3)]

    def check() -> None:
        world.check(batch_of(rows, (Group(held, np.array([0, 1])),)), 2e-5)

    held = world.share([0, 1], 2)
    check()
    (kept,) = (copies for copies in world.attention._copies.values())
    check()
    assert next(iter(world.attention._copies.values())) is kept
    world.keys = world.normal(*world.keys.shape)
    world.share([0, 1], 2)
    world.check(batch_of([(0, 0, 8)]), 2e-5)
    check()
    world.keys = world.normal(*world.keys.shape)
    world.share([0, 1], 2)
    world.attention.forget_copies()
    check()


def test_lengths_far_apart_are_bucketed_and_padding_is_bounded() -> None:
    world = World(0, 16, 2, 2, 3000, torch.float32)
    lengths = [2999, 5, 30, 700, 6, 7, 650, 8, 9, 64, 2900, 1]
    world.check(batch_of([(i, length - 1, 1) for i, length in enumerate(lengths)]), 2e-5)
    decode = world.attention._decode
    assert isinstance(decode, DecodeAttention)
    padded = sum(b.mask.numel() for b in decode._buckets)
    assert 1 < len(decode._buckets) <= 5
    assert padded < 1.25 * sum(lengths) + 512 * len(decode._buckets)


def test_neighbours_of_one_length_are_one_chunk() -> None:
    world = World(5, 4, 2, 2, 40, torch.float32)
    rows = [(0, 0, 7), (1, 0, 7), (2, 0, 9), (3, 6, 7), (4, 0, 7), (5, 0, 7), (6, 3, 1), (7, 0, 7)]
    world.check(batch_of(rows), 2e-5)
    assert [chunk.rows for chunk in world.attention._chunks] == [2, 1, 1, 2, 1]


@pytest.mark.parametrize("page", [16, 32])
def test_bfloat16_within_its_rounding(page: int) -> None:
    world = World(3, page, 3, 3, 400, torch.bfloat16)
    held = world.share([0, 1, 2], 4)
    rows = [(0, 4 * page + 3, 1), (1, 5 * page, 1), (2, 4 * page, 9), (3, 200, 1), (4, 0, 40), (5, 33, 20)]
    world.check(batch_of(rows, (Group(held, np.array([0, 1, 2])),)), 0.04)


def test_copied_pages_are_equal_in_every_layer() -> None:
    world = World(1, 4, 2, 1, 40, torch.float32)
    world.cache.copy(torch.tensor([3, 5]), torch.tensor([7, 9]))
    for part in world.cache.layers:
        assert torch.equal(part[[3, 5]], part[[7, 9]])


def test_memory_is_not_touched_before_it_is_used() -> None:
    cache = KVCache(CacheShape(4, 50_000, 16, 8, 64), torch.bfloat16, torch.device("cpu"))
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    assert sum(part.nbytes for part in cache.layers) > 6 << 30
    assert resident < 2 << 30
