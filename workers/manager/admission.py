"""Which waiting sequences get a slot, by a forecast of the pages that all running ones will need."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from workers.manager.forecast import peak_pages
from workers.manager.pages import page_keys
from workers.manager.sequences import Sequence
from workers.manager.slots import SlotState
from workers.manager.state import State

BACKLOG_STEPS = 2
"""Steps' worth of prompt tokens that may be admitted and not yet planned: more would only hold pages idle."""


class Admission:
    def __init__(self, state: State) -> None:
        self._state = state
        self._frontends: dict[bytes, int] = {}
        self.frontend_ids: list[bytes] = []
        """Frontend identities by the number that Slots.frontends holds."""

    def admit(self) -> None:
        """Give slots to waiting sequences, first come first served, as long as the forecast fits."""
        state = self._state
        candidates, known = self._candidates()
        if not candidates:
            return
        count = self._most_that_fit(candidates, known)
        if count == 0 and not self._anything_runs():
            count = 1  # alone it always fits: no request longer than the whole cache is accepted
        admitted = 0
        while admitted < count and self._start(candidates[admitted]):
            admitted += 1
        back: list[Sequence] = []
        for entry in candidates[admitted:]:
            back += [entry, *state.promises.settle(entry.keys, entry)]
        state.waiting.put_back(back)

    def _anything_runs(self) -> bool:
        state = self._state.slots.state
        return bool(((state == SlotState.PREFILL) | (state == SlotState.DECODE)).any())

    def _candidates(self) -> tuple[list[Sequence], list[int]]:
        """Entries that could start now, and how many of each one's pages running sequences hold."""
        state, limits = self._state, self._state.limits
        slots = state.slots
        prefilling = slots.state == SlotState.PREFILL
        backlog = int((slots.target[prefilling] - slots.planned[prefilling]).sum())
        candidates: list[Sequence] = []
        known: list[int] = []
        while len(candidates) < slots.free and backlog < BACKLOG_STEPS * limits.max_tokens_per_step:
            entry = state.waiting.pop()
            if entry is None:
                break
            matched = self._matched(entry)
            if matched < len(entry.keys) and state.promises.promised(entry.keys[matched]):
                state.promises.park(entry.keys[matched], entry)
                continue
            state.promises.promise(entry.keys[matched:], entry)
            pages = state.pages.match(entry.keys[:matched])
            candidates.append(entry)
            known.append(int((state.pages.refs[pages] > 0).sum()))
            backlog += len(entry.ids()) - matched * limits.page_size
        return candidates, known

    def _matched(self, entry: Sequence) -> int:
        """How many leading pages of `entry` are in the cache. Its last token is always computed anew."""
        limits = self._state.limits
        if not limits.prefix_cache:
            return 0
        ids = entry.ids()
        if len(entry.outputs):
            entry.keys = page_keys(ids, limits.page_size, entry.shard.keys)
        else:
            entry.keys = entry.shard.keys
        return min(len(self._state.pages.match(entry.keys)), (len(ids) - 1) // limits.page_size)

    def _most_that_fit(self, candidates: list[Sequence], known: list[int]) -> int:
        """How many of `candidates`, taken in order, the forecast has room for."""
        limits = self._state.limits
        have = np.array([len(c.outputs) for c in candidates], np.int32)
        limit = np.array([c.shard.params.max_tokens for c in candidates], np.int32)
        classes = np.array([c.shard.length_class for c in candidates], np.int32)
        tokens = np.array([len(c.shard.prompt) + len(c.outputs) for c in candidates], np.int64)
        pages = -(-tokens // limits.page_size) - np.array(known, np.int64)
        steps = self._state.lengths.predict(classes, have, limit) - have
        return self._bisect(tokens, pages, steps)

    def siblings_that_fit(self, leader: int, count: int) -> int:
        """How many of `count` siblings of the sequence in slot `leader` may start beside it."""
        slots, limits = self._state.slots, self._state.limits
        count = min(count, slots.free)
        if count == 0:
            return 0
        ones = np.ones(count, np.int32)
        steps = self._state.lengths.predict(
            ones * slots.length_class[leader], ones * 0, ones * slots.max_tokens[leader]
        )
        own = limits.pages_for(int(slots.target[leader])) - int(slots.target[leader]) // limits.page_size
        return self._bisect(ones * np.int64(slots.target[leader]), ones * np.int64(own), steps)

    def _bisect(self, tokens: NDArray[np.int64], pages: NDArray[np.int64], steps: NDArray[np.int64]) -> int:
        """The most of n additional sequences, taken in order, with which the forecast peak fits."""
        limits = self._state.limits
        held, *running = self._running()
        fitting, failing = 0, len(tokens) + 1
        trial = len(tokens)
        while fitting < trial < failing:
            extra = (tokens[:trial], pages[:trial], steps[:trial])
            combined = [np.concatenate([r, e]) for r, e in zip(running, extra)]
            if peak_pages(held, combined[0], combined[1], combined[2], limits.page_size) <= limits.pages:
                fitting = trial
            else:
                failing = trial
            trial = (fitting + failing) // 2
        return fitting

    def _running(self) -> tuple[int, NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Pages held by several sequences, and tokens, own pages and steps to come of those that run."""
        state, slots = self._state, self._state.slots
        active = np.flatnonzero((slots.state == SlotState.PREFILL) | (slots.state == SlotState.DECODE))
        refs = state.pages.refs
        width = int(slots.num_pages[active].max(initial=0))
        table = slots.table[active, :width]
        held = np.arange(width) < slots.num_pages[active][:, None]
        own = ((refs[table] == 1) & held).sum(axis=1)
        shared = int((refs > 1).sum())
        tokens = np.maximum(slots.target[active], slots.planned[active]).astype(np.int64)
        predicted = state.lengths.predict(slots.length_class[active], slots.sampled[active], slots.max_tokens[active])
        return shared, tokens, own.astype(np.int64), predicted - slots.sampled[active]

    def _start(self, entry: Sequence) -> bool:
        """Put `entry` into a slot with pages for all it has to prefill; False where pages lack after all."""
        state, limits = self._state, self._state.limits
        matched = state.pages.match(entry.keys)[: (len(entry.ids()) - 1) // limits.page_size]
        new = limits.pages_for(len(entry.ids())) - len(matched)
        state.pages.share(matched)
        if new > state.pages.available:
            state.pages.release(matched)
            return False
        if entry.cached < 0:
            entry.cached = len(matched) * limits.page_size
        slot = self.take_slot(entry)
        state.slots.add_pages(slot, np.concatenate([matched, state.pages.take(new)]))
        state.slots.planned[slot] = len(matched) * limits.page_size
        # What was matched is no longer promised; the rest is, to those that come behind.
        state.waiting.put_back(state.promises.settle(entry.keys[: len(matched)], entry))
        return True

    def take_slot(self, sequence: Sequence) -> int:
        frontend = sequence.shard.frontend
        if frontend not in self._frontends:
            self._frontends[frontend] = len(self.frontend_ids)
            self.frontend_ids.append(frontend)
        self._state.grouping_stale = True
        return self._state.slots.take(sequence, self._frontends[frontend])
