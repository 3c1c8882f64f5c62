"""Plans for a stage, written out by hand in tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from toka.messages import Plan, ScoredRow, SlotExtras


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A slot's sampling parameters."""

    slot: int
    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    top_k: int = 0
    min_tokens: int = 0
    logprobs: int = -1
    sample: int = 0
    seed: int = 0
    bias: dict[int, float] = field(default_factory=dict)
    banned: Sequence[int] = ()
    prompt: Sequence[int] = ()
    outputs: Sequence[int] = ()
    constrained: bool = False

    @property
    def extras(self) -> SlotExtras | None:
        penalised = bool(self.presence or self.frequency or self.repetition != 1)
        if not (penalised or self.bias or self.banned or self.constrained):
            return None
        return SlotExtras(
            slot=self.slot,
            logit_bias=self.bias,
            banned_ids=list(self.banned),
            penalised=penalised,
            prompt=np.array(self.prompt, np.int32).tobytes(),
            outputs=np.array(self.outputs, np.int32).tobytes(),
            constrained=self.constrained,
        )


@dataclass(frozen=True, kw_only=True)
class Row:
    """Tokens of one sequence; `samples`: (slot, output position) drawn from its last token."""

    slot: int
    start: int
    tokens: Sequence[int]
    samples: Sequence[tuple[int, int]] = ()


def plan(
    *,
    step: int = 0,
    setups: Sequence[Setup] = (),
    table: Sequence[tuple[int, int, int]] = (),
    copies: Sequence[tuple[int, int]] = (),
    after: int = 0,
    rows: Sequence[Row] = (),
    groups: Sequence[tuple[Sequence[int], Sequence[int]]] = (),
    scores: Sequence[ScoredRow] = (),
) -> Plan:
    """`table`: (slot, index, page); `groups`: (pages, row numbers)."""
    entries = np.array(table, np.int32).reshape(-1, 3)
    samples = [(i, *sample) for i, row in enumerate(rows) for sample in row.samples]
    drawn = np.array(samples, np.int32).reshape(-1, 3)
    numbers = [(s.top_k, s.min_tokens, s.logprobs, s.sample) for s in setups]
    floats = [(s.temperature, s.top_p, s.min_p, s.presence, s.frequency, s.repetition) for s in setups]
    return Plan(
        step=step,
        after=after,
        setup_slots=np.array([s.slot for s in setups], np.int32),
        setup_floats=np.array(floats, np.float32).reshape(-1),
        setup_ints=np.array(numbers, np.int32).reshape(-1),
        setup_seeds=np.array([s.seed for s in setups], np.int64),
        extras=[extras for s in setups if (extras := s.extras)],
        table_slots=entries[:, 0],
        table_indices=entries[:, 1],
        table_pages=entries[:, 2],
        copies=np.array(copies, np.int32).reshape(-1),
        row_slots=np.array([row.slot for row in rows], np.int32),
        row_starts=np.array([row.start for row in rows], np.int32),
        row_counts=np.array([len(row.tokens) for row in rows], np.int32),
        tokens=np.array([token for row in rows for token in row.tokens], np.int32),
        sample_rows=drawn[:, 0],
        sample_slots=drawn[:, 1],
        sample_positions=drawn[:, 2],
        scores=list(scores),
        group_pages=np.array([page for pages, _ in groups for page in pages], np.int32),
        group_page_counts=np.array([len(pages) for pages, _ in groups], np.int32),
        group_rows=np.array([row for _, rows_ in groups for row in rows_], np.int32),
        group_row_counts=np.array([len(rows_) for _, rows_ in groups], np.int32),
    )
