"""What a stage keeps for each running sequence: its sampling parameters, its last token, its counts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from toka.messages import Plan, SlotExtras

TEMPERATURE, TOP_P, MIN_P, PRESENCE, FREQUENCY, REPETITION = range(6)
TOP_K, MIN_TOKENS, LOGPROBS, SAMPLE = range(4)


@dataclass(slots=True)
class Edits:
    """Changes to the logits of a slot: ids and what is added to them; ids that are banned at first.

    Ids are columns of the logits.
    """

    bias_ids: Tensor
    bias_values: Tensor
    banned_ids: Tensor


@dataclass(slots=True)
class _Counts:
    """Penalties' state of the slots that need it: row r of the tensors belongs to one slot."""

    in_prompt: Tensor
    """[rows, vocabulary], bool."""
    outputs: Tensor
    """[rows, vocabulary], int32: how often an id was sampled."""
    rows: dict[int, int] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)


class Slots:
    """The arrays are indexed by slot. `floats` and `ints` have the columns of Plan's `setup_*`."""

    def __init__(self, count: int, vocabulary: int, device: torch.device, first: int = 0) -> None:
        """vocabulary: how many ids the logits here have, from `first` on: a rank's share, or all."""
        self.device = device
        self.vocabulary = vocabulary
        self.first = first
        self._held = range(first, first + vocabulary)
        self.tokens = torch.zeros(count, dtype=torch.int64, device=device)
        """The id last sampled in each slot."""
        self.floats: NDArray[np.float32] = np.zeros((count, 6), np.float32)
        self.ints: NDArray[np.int32] = np.zeros((count, 4), np.int32)
        self.seeds: NDArray[np.int64] = np.zeros(count, np.int64)
        self.constrained: NDArray[np.bool_] = np.zeros(count, np.bool_)
        """Whether a slot's samples wait for masks."""
        self.edits: dict[int, Edits] = {}
        self._counts = _Counts(*self._count_rows(0))

    def set_up(self, plan: Plan) -> None:
        """Hand slots over to new sequences."""
        slots = plan.setup_slots
        self.floats[slots] = plan.setup_floats.reshape(-1, 6)
        self.ints[slots] = plan.setup_ints.reshape(-1, 4)
        self.seeds[slots] = plan.setup_seeds
        self.constrained[slots] = False
        for slot in slots.tolist():
            self.edits.pop(slot, None)
            if slot in self._counts.rows:
                self._counts.free.append(self._counts.rows.pop(slot))
        for extras in plan.extras:
            self._set_extras(extras)

    def _set_extras(self, extras: SlotExtras) -> None:
        self.constrained[extras.slot] = extras.constrained
        if extras.logit_bias or extras.banned_ids:
            bias = {token - self.first: value for token, value in extras.logit_bias.items() if token in self._held}
            # Also where none of the ids is held here: every rank knows which slots are edited.
            self.edits[extras.slot] = Edits(
                self._tensor(list(bias), torch.int64),
                self._tensor(list(bias.values()), torch.float32),
                self._tensor([token - self.first for token in extras.banned_ids if token in self._held], torch.int64),
            )
        if extras.penalised:
            prompt, outputs = (self._columns(np.frombuffer(ids, np.int32)) for ids in (extras.prompt, extras.outputs))
            row = self._take_row(extras.slot)
            self._counts.in_prompt[row] = False
            self._counts.in_prompt[row, torch.from_numpy(prompt).to(self.device)] = True
            counted = torch.from_numpy(np.bincount(outputs, minlength=self.vocabulary).astype(np.int32))
            self._counts.outputs[row] = counted.to(self.device)

    def _columns(self, ids: NDArray[np.int32]) -> NDArray[np.int64]:
        columns = ids.astype(np.int64) - self.first
        return columns[(columns >= 0) & (columns < self.vocabulary)]

    def _tensor(self, values: list[int] | list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def _take_row(self, slot: int) -> int:
        counts = self._counts
        if not counts.free:
            had = len(counts.in_prompt)
            more = self._count_rows(max(8, had))
            counts.in_prompt = torch.cat([counts.in_prompt, more[0]])
            counts.outputs = torch.cat([counts.outputs, more[1]])
            counts.free = list(range(had, len(counts.in_prompt)))
        counts.rows[slot] = counts.free.pop()
        return counts.rows[slot]

    def _count_rows(self, rows: int) -> tuple[Tensor, Tensor]:
        shape = (rows, self.vocabulary)
        return (
            torch.zeros(shape, dtype=torch.bool, device=self.device),
            torch.zeros(shape, dtype=torch.int32, device=self.device),
        )

    def penalised(self, slots: NDArray[np.int64]) -> NDArray[np.intp]:
        """Which entries of `slots` have counts."""
        if not self._counts.rows:
            return np.empty(0, np.intp)
        return np.flatnonzero([slot in self._counts.rows for slot in slots.tolist()])

    def counts(self, slots: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """[slots, vocabulary]: whether an id is in the prompt, and how often it was sampled; of penalised slots."""
        rows = torch.tensor([self._counts.rows[slot] for slot in slots.tolist()], device=self.device)
        return self._counts.in_prompt[rows], self._counts.outputs[rows]

    def record(self, slots: NDArray[np.int64], tokens: Tensor) -> None:
        """Take in the ids sampled by a step: slots: [n], tokens: [n]."""
        self.tokens[torch.from_numpy(slots).to(self.device)] = tokens
        counted = self.penalised(slots)
        if len(counted):
            rows = torch.tensor([self._counts.rows[slot] for slot in slots[counted].tolist()], device=self.device)
            columns, held = self.columns(tokens[torch.from_numpy(counted).to(self.device)])
            self._counts.outputs[rows, columns] += held

    def columns(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Where the logits here have these ids, and whether they do; a column they do have where not."""
        columns = tokens - self.first
        inside = columns.clamp(0, self.vocabulary - 1)
        return inside, inside == columns
