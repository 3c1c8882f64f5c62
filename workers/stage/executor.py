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
from workers.stage.masks import Allowed, Matcher, allowed
from workers.stage.partition import Partition
from workers.stage.pipe import Dry, Pipe
from workers.stage.sampler import Drawn, Sampler
from workers.stage.scoring import Scored, Scorer
from workers.stage.sizes import Sizes


class Executor:
    """One stage's part of every step. `pipe`: to the stages before and behind it; `matcher`: where samples may have
    grammars; `waited`: seconds, for these."""

    def __init__(
        self, model: Decoder, sizes: Sizes, cache: KVCache, part: Partition, sampler: Sampler, device: torch.device
    ) -> None:
        self.model = model
        self.sizes = sizes
        self.device = device
        self.cache = cache
        self.part = part
        self.pipe: Pipe = Dry(model.config.hidden_size, model.activations, device)
        self.matcher: Matcher | None = None
        self.waited = 0.0
        self.table = torch.zeros(sizes.max_seqs, sizes.pages_per_seq, dtype=torch.int32, device=device)
        self.slots = sampler.slots
        self.attention = Attention(cache, model.config.num_heads, self.table)
        self.sampler = sampler
        self.scorer = Scorer(model, sampler.slots.first, sampler.chunk)

    @torch.inference_mode()
    def execute(self, plan: Plan) -> StepResult | None:
        """The step's result, from a stage that samples."""
        began = time.perf_counter()
        if self.part.last:
            self.slots.set_up(plan)
        self.table[self._index(plan.table_slots), self._index(plan.table_indices)] = self._copy(plan.table_pages)
        if len(plan.copies):
            sources, targets = plan.copies.reshape(-1, 2).T
            self.cache.copy(self._index(sources), self._index(targets))
            self.attention.forget_copies()
        drawn, scored = self._forward(plan, from_plan(plan)) if len(plan.row_slots) else (None, None)
        return _result(plan.step, began, drawn, scored) if self.part.last else None

    def _forward(self, plan: Plan, batch: Batch) -> tuple[Drawn | None, Scored | None]:
        self.attention.begin(batch)
        x = self._embedded(plan, batch) if self.part.first else self._received(plan)
        x = self.model.run(x, self._index(batch.positions), self.attention)
        if not self.part.last:
            self.pipe.send(plan.step, x)
            return None, None
        drawn = self._sample(plan, batch, x) if len(plan.sample_rows) else None
        # Behind the draw: the first stage of a pipeline waits for its ids.
        return drawn, self.scorer.score(plan, batch.offsets[:-1], x) if plan.scores else None

    def _embedded(self, plan: Plan, batch: Batch) -> Tensor:
        tokens = self._index(plan.tokens)
        sampled = np.flatnonzero(plan.tokens < 0)
        if not self.part.last:
            self._take_sampled(plan.after)
        if len(sampled):
            slots = np.repeat(batch.slots, batch.counts)[sampled]
            tokens[self._index(sampled)] = self.slots.tokens[self._index(slots)]
        return self.model.embed(tokens)

    def _take_sampled(self, step: int) -> None:
        began = time.perf_counter()
        for slots, ids in self.pipe.sampled(step):
            self.slots.tokens[self._index(slots)] = self._index(ids)
        self.waited += time.perf_counter() - began

    def _received(self, plan: Plan) -> Tensor:
        began = time.perf_counter()
        x = self.pipe.receive(plan.step, len(plan.tokens))
        self.waited += time.perf_counter() - began
        return x

    def _sample(self, plan: Plan, batch: Batch, x: Tensor) -> Drawn:
        rows, which = np.unique(plan.sample_rows, return_inverse=True)
        last = batch.offsets[rows + 1] - 1
        hidden = self.model.finish(x[self._index(last)] if len(last) < len(x) else x)
        logits, slots = self.model.logits(hidden), plan.sample_slots.astype(np.int64)
        masks = self._allowed(plan)
        drawn = self.sampler.sample(logits, which, slots, plan.sample_positions.astype(np.int64), masks)
        if masks is not None:
            self._tell_matcher(plan, masks, drawn.tokens)
        self.slots.record(slots, drawn.tokens)
        if not self.part.first:
            self.pipe.send_sampled(plan.step, plan.sample_slots, drawn.tokens.cpu().numpy())
        return drawn

    def _allowed(self, plan: Plan) -> Allowed | None:
        began = time.perf_counter()
        found = allowed(self.matcher, plan.step, self.slots.constrained[plan.sample_slots])
        self.waited += time.perf_counter() - began
        return found

    def _tell_matcher(self, plan: Plan, masks: Allowed, tokens: Tensor) -> None:
        if self.part.answers and self.matcher is not None:
            ids = tokens.cpu().numpy().astype(np.int32)[masks.constrained]
            self.matcher.sampled(plan.step, plan.sample_slots[masks.constrained], ids)

    def _index(self, values: Ints | np.ndarray[tuple[int, ...], np.dtype[np.integer]]) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self.device)

    def _copy(self, values: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> Tensor:
        return torch.from_numpy(values.copy()).to(self.device)


def _result(step: int, began: float, drawn: Drawn | None, scored: Scored | None) -> StepResult:
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
        **({} if scored is None else scored.fields()),
    )
