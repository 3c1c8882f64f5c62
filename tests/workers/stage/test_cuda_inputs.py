"""The arrays that CUDA kernels read: every token, chunk and shared prefix of a plan in its place, on the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.plans import Row, plan
from toka.messages import Plan
from workers.stage.cuda.arrange import CHUNK_QUERIES, PREFIX_QUERIES, TILE_FIELDS, Arranger
from workers.stage.cuda.inputs import CHUNK_TILES, DECODE_TILES, HEADER, PREFIX_TILES, InputBuffer

PAGE, HEADS, KV_HEADS = 4, 12, 2
GROUP = HEADS // KV_HEADS


def mixed_plan() -> Plan:
    """Rows of one token between chunks; two groups, one with a chunk in it; a row that two slots sample from."""
    rows = [
        Row(slot=3, start=0, tokens=range(100, 150), samples=[(3, 0), (8, 0)]),
        Row(slot=1, start=900, tokens=[-1], samples=[(1, 5)]),
        Row(slot=0, start=808, tokens=range(200, 230)),
        Row(slot=5, start=40, tokens=[7], samples=[(5, 0)]),
        Row(slot=2, start=805, tokens=[-1], samples=[(2, 9)]),
        *(Row(slot=10 + i, start=64 + i, tokens=[-1], samples=[(10 + i, i)]) for i in range(40)),
    ]
    return plan(rows=rows, groups=[(range(200), [1, 2, 4]), (range(300, 316), range(5, 45))])


@pytest.mark.parametrize(("processors", "parts"), [(1, 4096), (132, 4096), (132, 80)])
def test_arranged_and_on_the_device(processors: int, parts: int) -> None:
    made = mixed_plan()
    arranged = Arranger(PAGE, HEADS, KV_HEADS, processors, parts).arrange(made)
    buffer = InputBuffer(256, 64, 77, torch.device("cpu"))
    buffer.fill(160, arranged, 48, made.sample_slots, made.sample_positions)
    inputs, samples = buffer.inputs(160), buffer.samples(48)
    header = inputs.header.tolist()
    total, ones = int(made.row_counts.sum()), int((made.row_counts == 1).sum())
    assert arranged.rows == ones == 43
    tokens = list(zip(*(each.tolist() for each in (inputs.slots, inputs.positions, inputs.tokens))))
    assert sorted(tokens[:total]) == sorted(expected_tokens(made)) and tokens[total:] == [(77, 0, 0)] * (160 - total)
    ends = {int(slot): int(start + count - 1) for slot, start, count in zip(*rows_of(made))}
    sampled = list(zip(*(each.tolist() for each in (samples.tokens, samples.slots, samples.outputs))))
    for (token, slot, output), *want in zip(sampled, made.sample_rows, made.sample_slots, made.sample_positions):
        assert tokens[token][:2] == (made.row_slots[want[0]], ends[made.row_slots[want[0]]])
        assert [slot, output] == want[1:]
    assert sampled[len(made.sample_slots) :] == [(0, 77, 0)] * (48 - len(made.sample_slots))
    counts = [header[kind] for kind in (DECODE_TILES, PREFIX_TILES, CHUNK_TILES)]
    decode, prefix, chunks = (arranged_tiles(header, sum(counts[:i]), count) for i, count in enumerate(counts))
    assert [tile[:2] for tile in decode if not tile[5]] == [[row, tokens[row][0]] for row in range(ones)]
    check_prefixes(prefix, tokens, inputs.members.tolist(), inputs, parts)
    check_chunks(chunks, tokens[:total], ones)


def rows_of(made: Plan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return made.row_slots, made.row_starts, made.row_counts


def expected_tokens(made: Plan) -> list[tuple[int, int, int]]:
    places = [(int(s), int(a + i)) for s, a, n in zip(*rows_of(made)) for i in range(n)]
    return [(*place, int(token)) for place, token in zip(places, made.tokens)]


def arranged_tiles(header: list[int], skip: int, count: int) -> list[list[int]]:
    starts = [HEADER + TILE_FIELDS * (skip + i) for i in range(count)]
    return [header[start : start + TILE_FIELDS] for start in starts]


def check_prefixes(
    tiles: list[list[int]], tokens: list[tuple[int, int, int]], members: list[int], inputs: object, parts: int
) -> None:
    """Each member's parts, together, are its group's pages, each in a place of its own."""
    first, count, shared = (getattr(inputs, name).tolist() for name in ("prefix_first", "prefix_count", "shared"))
    pages: dict[int, list[int]] = {}
    taken: list[int] = []
    for slot, low, high, member, many, part, *_ in tiles:
        assert 0 < many <= PREFIX_QUERIES // GROUP and high > low
        for token in members[member : member + many]:
            pages.setdefault(token, []).extend(range(low, high))
            taken.append(first[token] + part)
            assert part < count[token]
            group = {0: 200, 1: 200, 2: 200}.get(tokens[token][0], 16)
            assert shared[token] == group * PAGE and slot in ({0, 1, 2} if group == 200 else range(10, 50))
    assert len(set(taken)) == len(taken) and max(taken) < max(parts, len(pages))
    assert all(sorted(held) == list(range(shared[token] // PAGE)) for token, held in pages.items())
    assert len(pages) == 30 + 2 + 40 and sum(each > 0 for each in count) == len(pages)


def check_chunks(tiles: list[list[int]], tokens: list[tuple[int, int, int]], ones: int) -> None:
    """Tiles cover the chunks' tokens once each, and those with the most keys come first."""
    covered: list[int] = []
    for slot, first, count, position, low, *_ in tiles:
        assert count <= CHUNK_QUERIES // GROUP
        covered += range(first, first + count)
        assert [each[:2] for each in tokens[first : first + count]] == [(slot, position + i) for i in range(count)]
        assert low == (200 if slot == 0 else 0)
    assert sorted(covered) == list(range(ones, len(tokens)))
    keys = [position - low * PAGE for _, _, _, position, low, *_ in tiles]
    assert keys == sorted(keys, reverse=True)
