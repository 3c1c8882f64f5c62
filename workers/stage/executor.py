"""Executes plans: slots, page tables, copies, the forward pass, sampling, in the order a Plan states."""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor

from toka.messages import Plan, StepResult
from workers.stage.attention import Attention
from workers.stage.batch import Batch, Ints, from_plan
from workers.stage.decoder import Decoder
from workers.stage.kv_cache import KVCache
from workers.stage.sampler import Drawn, Sampler
from workers.stage.sizes import Sizes
from workers.stage.slots import Slots


class Executor:
    def __init__(
        self, model: Decoder, sizes: Sizes, cache: KVCache, num_heads: int, vocabulary: int, device: torch.device
    ) -> None:
        self.model = model
        self.sizes = sizes
        self.device = device
        self.cache = cache
        self.table = torch.zeros(sizes.max_seqs, sizes.pages_per_seq, dtype=torch.int32, device=device)
        self.slots = Slots(sizes.max_seqs, vocabulary, device)
        self.attention = Attention(cache, num_heads, self.table)
        self.sampler = Sampler(self.slots)

    @torch.inference_mode()
    def execute(self, plan: Plan) -> StepResult:
        began = time.perf_counter()
        self.slots.set_up(plan)
        self.table[self._index(plan.table_slots), self._index(plan.table_indices)] = self._copy(plan.table_pages)
        if len(plan.copies):
            sources, targets = plan.copies.reshape(-1, 2).T
            self.cache.copy(self._index(sources), self._index(targets))
            self.attention.forget_copies()
        drawn = self._forward(plan, from_plan(plan)) if len(plan.row_slots) else None
        return _result(plan.step, began, drawn)

    def _forward(self, plan: Plan, batch: Batch) -> Drawn | None:
        self.attention.begin(batch)
        tokens = self._index(plan.tokens)
        sampled = np.flatnonzero(plan.tokens < 0)
        if len(sampled):
            slots = np.repeat(batch.slots, batch.counts)[sampled]
            tokens[self._index(sampled)] = self.slots.tokens[self._index(slots)]
        hidden = self.model.hidden(tokens, self._index(batch.positions), self.attention)
        if not len(plan.sample_rows):
            return None
        rows, which = np.unique(plan.sample_rows, return_inverse=True)
        last = batch.offsets[rows + 1] - 1
        if len(last) < len(hidden):
            hidden = hidden[self._index(last)]
        slots = plan.sample_slots.astype(np.int64)
        drawn = self.sampler.sample(self.model.logits(hidden), which, slots, plan.sample_positions.astype(np.int64))
        self.slots.record(slots, drawn.tokens)
        return drawn

    def _index(self, values: Ints | np.ndarray[tuple[int, ...], np.dtype[np.integer]]) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self.device)

    def _copy(self, values: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> Tensor:
        return torch.from_numpy(values.copy()).to(self.device)


def _result(step: int, began: float, drawn: Drawn | None) -> StepResult:
    tokens, chosen, ids, values = (
        (np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32), np.empty(0, np.float32))
        if drawn is None
        else (each.cpu().numpy() for each in (drawn.tokens, drawn.chosen, drawn.top_ids, drawn.top_values))
    )
    return StepResult(
        step=step,
        busy_us=int((time.perf_counter() - began) * 1e6),
        tokens=tokens,
        chosen=chosen,
        top_ids=ids,
        top_values=values,
    )
