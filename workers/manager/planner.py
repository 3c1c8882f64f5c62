"""Builds the plan of the next step: decode rows, prefill chunks, page tables, sampling, groups."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from toka.messages import Int32, Plan, ScoredRow
from workers.manager.admission import Admission
from workers.manager.groups import Grouping
from workers.manager.microbatches import Microbatches
from workers.manager.sequences import Sequence, Shard, lead
from workers.manager.slots import SlotState
from workers.manager.state import State
from workers.manager.updates import setups, table_changes

NONE: Int32 = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """A part of one sequence's prefill."""

    slot: int
    start: int
    ids: Int32
    last: bool


@dataclass(frozen=True, slots=True, eq=False)
class ScoredChunk:
    """A part of a prompt whose log-probabilities a step finds: tokens `start` to `end`."""

    slot: int
    shard: Shard
    start: int
    end: int

    @property
    def ids(self) -> int:
        """How many ids get one: none follows the prompt's last token."""
        return self.end - self.start - (self.end == len(self.shard.prompt))


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """What the manager has to remember of a plan until its result comes."""

    step: int
    slots: Int32
    """The slots it samples for, in order."""
    scored: list[ScoredChunk] = field(default_factory=list)


class Planner:
    def __init__(self, state: State, admission: Admission) -> None:
        self._state = state
        self._admission = admission
        self._step = 0
        self._grouping = Grouping(state.slots.count, state.limits.page_size)
        self._microbatches = Microbatches(state.limits.microbatches, state.limits.passes)

    def plan(self) -> tuple[Plan, Sent] | None:
        """The next step, or None where no sequence can take one. All bookkeeping assumes it is sent."""
        state = self._state
        decode, step = self._growing_decode_slots()
        chunks = self._chunks(state.limits.max_tokens_per_step - len(decode))
        if not len(decode) and not chunks:
            return None
        self._step = step
        after = int(state.slots.last_step[decode].max(initial=0))
        starts = np.concatenate([state.slots.planned[decode], np.array([c.start for c in chunks], np.int32)])
        row_slots = np.concatenate([decode, np.array([c.slot for c in chunks], np.int32)])
        copies = self._take_copies()
        sample_rows, sample_slots = self._advance(decode, chunks)
        positions = state.slots.sampled[sample_slots].copy()
        state.slots.sampled[sample_slots] += 1
        state.slots.in_flight[sample_slots] += 1
        state.slots.last_step[sample_slots] = step
        scores, scored = self._score(len(decode), chunks)
        plan = Plan(
            step=step,
            after=after,
            **setups(state.slots),
            **table_changes(state.slots),
            copies=copies,
            row_slots=row_slots,
            row_starts=starts,
            row_counts=np.concatenate(
                [np.ones(len(decode), np.int32), np.array([len(c.ids) for c in chunks], np.int32)]
            ),
            tokens=np.concatenate([np.full(len(decode), -1, np.int32), *(c.ids for c in chunks)]),
            sample_rows=sample_rows,
            sample_slots=sample_slots,
            sample_positions=positions,
            scores=scores,
            **self._group_fields(row_slots, starts),
        )
        return plan, Sent(step, sample_slots, scored)

    # Decode rows

    def _growing_decode_slots(self) -> tuple[Int32, int]:
        """Slots that decode in the next step, each with room for one more token, and that step's number.

        The youngest of the least urgent sequences give way for the room.
        """
        state, slots = self._state, self._state.slots
        while True:
            decode = slots.in_state(SlotState.DECODE)
            decode = decode[slots.sampled[decode] < slots.max_tokens[decode]]
            waiting = bool((slots.state == SlotState.PREFILL).any())
            decode, step = self._microbatches.ready(slots, decode, self._step + 1, waiting)
            full = decode[slots.planned[decode] == slots.num_pages[decode] * state.limits.page_size]
            if len(full) <= state.pages.available:
                break
            assert len(slots.active()) > 1, "one sequence alone does not fit the cache"
            state.preempt(slots.last())
        slots.grow(full, state.pages.take(len(full)))
        return decode, step

    # Prefill rows

    def _chunks(self, budget: int) -> list[Chunk]:
        """Prefill chunks, the urgent first, then the first admitted, of at most `budget` tokens together."""
        state, slots = self._state, self._state.slots
        prefilling = slots.in_state(SlotState.PREFILL)
        waiting = int((slots.target[prefilling] - slots.planned[prefilling]).sum())
        budget = self._microbatches.prefill(waiting, budget)
        chunks: list[Chunk] = []
        for slot in prefilling[np.lexsort((slots.age[prefilling], slots.priority[prefilling]))].tolist():
            if budget <= 0:
                break
            start, target = int(slots.planned[slot]), int(slots.target[slot])
            count = min(target - start, budget, state.limits.prefill_chunk or budget)
            sequence = slots.sequence[slot]
            assert sequence is not None
            ids = sequence.ids()[start : start + count]
            chunks.append(Chunk(slot, start, ids, start + count == target))
            budget -= count
        return chunks

    def _advance(self, decode: Int32, chunks: list[Chunk]) -> tuple[Int32, Int32]:
        """Move decode rows and chunks on as if they had run; (row, slot) of everything sampled."""
        slots = self._state.slots
        slots.planned[decode] += 1
        rows, sampled = [], []
        for row, chunk in enumerate(chunks, start=len(decode)):
            slots.planned[chunk.slot] += len(chunk.ids)
            sequence = slots.sequence[chunk.slot]
            assert sequence is not None
            self._key_prefilled(sequence, chunk)
            if chunk.last:
                slots.state[chunk.slot] = SlotState.DECODE
                # Where no token is wanted, siblings end with the prompt's log-probabilities, as this one does.
                group = [chunk.slot, *self._start_siblings(sequence)] if slots.max_tokens[chunk.slot] else []
                sampled += group
                rows += [row] * len(group)
        return (
            np.concatenate([np.arange(len(decode), dtype=np.int32), np.array(rows, np.int32)]),
            np.concatenate([decode, np.array(sampled, np.int32)]),
        )

    def _score(self, row: int, chunks: list[Chunk]) -> tuple[list[ScoredRow], list[ScoredChunk]]:
        """The chunks whose prompts' log-probabilities are asked for and not planned yet; their rows begin at `row`."""
        slots = self._state.slots
        rows, scored = [], []
        for number, chunk in enumerate(chunks, start=row):
            sequence, end = slots.sequence[chunk.slot], chunk.start + len(chunk.ids)
            assert sequence is not None
            shard, scores = sequence.shard, sequence.shard.unscored
            if scores is not None and end > scores.planned:
                scores.planned = end
                following = int(shard.prompt[end]) if end < len(shard.prompt) else -1
                rows.append(ScoredRow(row=number, likely=scores.likely, following=following))
                scored.append(ScoredChunk(chunk.slot, shard, chunk.start, end))
                slots.in_flight[chunk.slot] += 1
        return rows, scored

    def _key_prefilled(self, sequence: Sequence, chunk: Chunk) -> None:
        """Publish the full pages that the chunk completes, and let those parked on them go on."""
        state, size = self._state, self._state.limits.page_size
        first, last = chunk.start // size, (chunk.start + len(chunk.ids)) // size
        keys = sequence.keys[first:last]
        state.pages.key(state.slots.pages(chunk.slot)[first:last].tolist(), keys)
        state.waiting.put_back(state.promises.settle(keys, sequence))

    def _start_siblings(self, leader: Sequence) -> list[int]:
        """Slots for as many siblings as fit: they share the leader's full pages and copy the partial one."""
        state, slots, size = self._state, self._state.slots, self._state.limits.page_size
        siblings = [s for s in leader.siblings if not s.ended]
        leader.siblings = []
        if not siblings:
            return []
        target = int(slots.target[leader.slot])
        held = slots.pages(leader.slot)
        shared, partial = held[: target // size].copy(), held[target // size :].copy()
        count = self._admission.siblings_that_fit(leader.slot, len(siblings))
        started = [self._start_sibling(s, shared, partial, target) for s in siblings[:count]]
        if siblings[count:]:
            state.waiting.put_back([lead(siblings[count:])])
        return started

    def _start_sibling(self, sibling: Sequence, shared: Int32, partial: Int32, target: int) -> int:
        state = self._state
        sibling.keys, sibling.cached = sibling.shard.keys, target
        slot = self._admission.take_slot(sibling)
        state.pages.share(shared)
        own = state.pages.take(len(partial))
        state.slots.add_pages(slot, np.concatenate([shared, own]))
        state.copies.update(zip(own.tolist(), partial.tolist()))
        state.slots.planned[slot] = target
        state.slots.state[slot] = SlotState.DECODE
        return slot

    # What the stages are told beside the rows

    def _take_copies(self) -> Int32:
        pairs = np.array([(source, target) for target, source in self._state.copies.items()], np.int32)
        self._state.copies.clear()
        return pairs

    def _group_fields(self, row_slots: Int32, starts: Int32) -> dict[str, Any]:
        state, slots = self._state, self._state.slots
        groups = []
        if state.limits.shared_prefix:
            others = np.setdiff1d(slots.in_state(SlotState.DECODE), row_slots, assume_unique=True)
            groups = self._grouping.rows(slots, state.pages.refs, row_slots, starts, others)
        return {
            "group_pages": np.concatenate([NONE, *(g.pages for g in groups)]),
            "group_page_counts": np.array([len(g.pages) for g in groups], np.int32),
            "group_rows": np.concatenate([NONE, *(g.rows for g in groups)]),
            "group_row_counts": np.array([len(g.rows) for g in groups], np.int32),
        }
