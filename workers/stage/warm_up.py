"""Runs the largest batches once before the stage is ready: what does not fit fails now, and nothing is slow later.

On a CPU, where memory is not what a step is short of, smaller ones: what is slow the first time is each kernel.
"""

from __future__ import annotations

import numpy as np

from toka.messages import Plan
from workers.stage.interface import AnyExecutor

_HOT = (1.0, 1.0, 0.0, 0.0, 0.0, 1.0)
"""Temperature 1 and nothing else: most of what sampling costs."""
_CPU_TOKENS, _CPU_SEQS = 128, 32


def warm_up(executor: AnyExecutor) -> None:
    """The longest prefill of a step, then a decode row in every slot, as far back in the cache as all can be.

    Every page table names the first page meanwhile: what is written there belongs to nobody.
    """
    sizes, tokens, seqs = executor.sizes, executor.sizes.max_tokens, executor.sizes.max_seqs
    if executor.device.type == "cpu":
        tokens, seqs = min(tokens, _CPU_TOKENS), min(seqs, _CPU_SEQS)
    longest = min(sizes.pages_per_seq * sizes.page_size, sizes.pages * sizes.page_size)
    counts = np.diff([*range(0, tokens, longest), tokens])[:seqs]
    shared = min(longest, sizes.pages * sizes.page_size // sizes.max_seqs) - 1
    for row_counts, start in ((counts, 0), (np.ones(min(seqs, tokens)), max(shared, 0))):
        executor.execute(_plan(seqs, row_counts.astype(np.int32), start))


def _plan(slots: int, counts: np.ndarray[tuple[int, ...], np.dtype[np.int32]], start: int) -> Plan:
    every = np.arange(slots, dtype=np.int32)
    rows = np.arange(len(counts), dtype=np.int32)
    none = np.empty(0, np.int32)
    return Plan(
        step=0,
        after=0,
        setup_slots=every,
        setup_floats=np.tile(np.array(_HOT, np.float32), slots),
        setup_ints=np.tile(np.array([0, 0, -1, 0], np.int32), slots),
        setup_seeds=every.astype(np.int64),
        extras=[],
        table_slots=none,
        table_indices=none,
        table_pages=none,
        copies=none,
        row_slots=rows,
        row_starts=np.full(len(counts), start, np.int32),
        row_counts=counts,
        tokens=np.zeros(counts.sum(), np.int32),
        # Every slot draws, as when prompts have many samples.
        sample_rows=every % np.int32(len(counts)),
        sample_slots=every,
        sample_positions=np.zeros(slots, np.int32),
        group_pages=none,
        group_page_counts=none,
        group_rows=none,
        group_row_counts=none,
    )
