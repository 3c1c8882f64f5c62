"""Which waiting sequences get a slot, by a forecast of the pages that all running ones will need."""

from __future__ import annotations

import numpy as np

from toka.messages import Int32
from toka.page_keys import PromptKeys, page_keys
from workers.manager.forecast import Forecast, Need
from workers.manager.sequences import Sequence
from workers.manager.slots import SlotState
from workers.manager.state import State

BACKLOG_STEPS = 1
"""For each microbatch, and once more: steps' worth of prompt tokens that may be admitted and not yet planned. More
would only hold pages idle."""


class Admission:
    def __init__(self, state: State) -> None:
        limits = state.limits
        self._state = state
        self._prompt_keys = PromptKeys(limits.page_size)
        self._forecast = Forecast(state.lengths, limits.pages, limits.page_size, limits.context_length)
        self._forecast_made = False
        """Whether the forecast is of this step."""
        self._most = -1
        """Pages in use were all that runs to run to its limit; -1: not known yet in this step."""
        self._frontends: dict[bytes, int] = {}
        self.frontend_ids: list[bytes] = []
        """Frontend identities by the number that Slots.frontends holds."""

    def begin_step(self) -> None:
        """What was known of the pages to come is out of date."""
        self._forecast_made = False
        self._most = -1

    def admit(self) -> None:
        """Give slots to waiting sequences, first come first served, as long as the forecast fits."""
        state, limits = self._state, self._state.limits
        slots = state.slots
        prefilling = slots.state == SlotState.PREFILL
        backlog = int((slots.target[prefilling] - slots.planned[prefilling]).sum())
        most = BACKLOG_STEPS * (limits.microbatches + 1) * limits.max_tokens_per_step
        while slots.free and backlog < most:
            entry = state.waiting.pop()
            if entry is None:
                break
            found = self._find(entry)
            if not entry.shard.unscored and state.promises.park(entry, len(found)):
                continue
            if not self._start(entry, found):
                state.waiting.put_back([entry])
                break
            backlog += int(slots.target[entry.slot] - slots.planned[entry.slot])

    def _find(self, entry: Sequence) -> Int32:
        """The pages in the cache that `entry` begins with, of tokens that need not be computed."""
        state, size = self._state, self._state.limits.page_size
        if state.limits.prefix_cache:
            shard, total = entry.shard, len(entry.shard.prompt) + len(entry.outputs)
            if len(entry.keys) < total // size:
                if len(shard.keys) < len(shard.prompt) // size:
                    shard.keys = self._prompt_keys.of(shard.prompt)
                entry.keys = page_keys(entry.ids(), size, shard.keys) if len(entry.outputs) else shard.keys
        # What its log-probabilities are computed from is not in the cache.
        scores = entry.shard.unscored
        return state.pages.match(entry.keys if scores is None else entry.keys[: scores.planned // size])

    def _start(self, entry: Sequence, found: Int32) -> bool:
        """Put `entry` into a slot with pages for all it has to prefill; False where it has no room yet."""
        state, size = self._state, self._state.limits.page_size
        total = len(entry.shard.prompt) + len(entry.outputs)
        matched = found[: (total - 1) // size]  # the last token is always computed anew
        new = state.limits.pages_for(total) - len(matched)
        idle = int((state.pages.refs[matched] == 0).sum())
        left = entry.shard.params.max_tokens - len(entry.outputs)
        need = Need(total, new + idle, entry.shard.length_class, len(entry.outputs), left)
        fits = self._fitting(1, need)
        # Alone it always fits: no request longer than the whole cache is accepted.
        if new + idle > state.pages.available or not (fits or self._nothing_runs()):
            return False
        state.pages.share(matched)
        if entry.cached < 0:
            entry.cached = len(matched) * size
        else:
            state.recomputed += total - len(matched) * size
        slot = self.take_slot(entry)
        state.slots.add_pages(slot, np.concatenate([matched, state.pages.take(new)]))
        state.slots.planned[slot] = len(matched) * size
        state.promises.promise(entry.keys[len(found) :], entry)
        self._count_in(1, need)
        return True

    def _nothing_runs(self) -> bool:
        return not len(self._state.slots.active())

    def siblings_that_fit(self, leader: int, count: int) -> int:
        """How many of `count` siblings of the sequence in slot `leader` may start beside it."""
        slots, size = self._state.slots, self._state.limits.page_size
        count = min(count, slots.free)
        target = int(slots.target[leader])
        own = int(target % size > 0)
        if own:
            count = min(count, self._state.pages.available)
        need = Need(target, own, int(slots.length_class[leader]), 0, int(slots.max_tokens[leader]))
        count = self._fitting(count, need)
        self._count_in(count, need)
        return count

    # The pages to come

    def _fitting(self, count: int, need: Need) -> int:
        """How many of `count` sequences with this need have room to their ends."""
        limits = self._state.limits
        if count == 0:
            return 0
        if self._most < 0:
            self._most = self._state.pages.held + self._growth()
        if self._most + count * self._most_of(need) <= limits.pages:
            return count
        if not self._forecast_made:
            self._forecast.begin(*self._running())
            self._forecast_made = True
        return self._forecast.fitting(count, need)

    def _count_in(self, count: int, need: Need) -> None:
        """`count` such sequences were started."""
        self._most += count * self._most_of(need)
        if self._forecast_made and count:
            self._forecast.add(*np.repeat(np.array(need, np.int32)[:, None], count, axis=1))

    def _most_of(self, need: Need) -> int:
        limits = self._state.limits
        return need.own + limits.pages_for(need.tokens + need.left) - limits.pages_for(need.tokens)

    def _growth(self) -> int:
        """Pages that what runs would still take to run to its limit."""
        slots, size = self._state.slots, self._state.limits.page_size
        active = slots.active()
        tokens = np.maximum(slots.target[active], slots.planned[active])
        left = slots.max_tokens[active] - slots.sampled[active]
        return int((-(-(tokens + left) // size) - -(-tokens // size)).sum())

    def _running(self) -> tuple[int, Int32, Int32, Int32, Int32, Int32]:
        """The arguments of `Forecast.begin`."""
        slots = self._state.slots
        active = slots.active()
        own = slots.num_pages[active] - self._shared(active)
        tokens = np.maximum(slots.target[active], slots.planned[active])
        have = slots.sampled[active]
        shared = self._state.pages.held - int(own.sum())
        return shared, tokens, own, slots.length_class[active], have, slots.max_tokens[active] - have

    def _shared(self, active: Int32) -> Int32:
        """For each slot of `active`, how many of its pages others hold as well: its first ones."""
        table, refs = self._state.slots.table, self._state.pages.refs
        low = np.zeros(len(active), np.int32)
        behind = np.flatnonzero(refs[table[active, 0]] > 1)
        slots = active[behind]
        least, most = low[behind], self._state.slots.num_pages[slots]
        while (least < most).any():
            middle = (least + most) // 2
            shared = (refs[table[slots, np.minimum(middle, table.shape[1] - 1)]] > 1) & (least < most)
            least = np.where(shared, middle + 1, least)
            most = np.where(shared, most, np.maximum(middle, least))
        low[behind] = least
        return low

    def take_slot(self, sequence: Sequence) -> int:
        frontend = sequence.shard.frontend
        if frontend not in self._frontends:
            self._frontends[frontend] = len(self.frontend_ids)
            self.frontend_ids.append(frontend)
        return self._state.slots.take(sequence, self._frontends[frontend])
