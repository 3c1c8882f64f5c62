"""Which waiting sequences get a slot, by a forecast of the pages that all running ones will need.

The urgent do not wait for the less urgent: only those that run and are at least as urgent count in the forecast, and
the others are preempted where there is no slot or no page left.
"""

from __future__ import annotations

import numpy as np

from toka.messages import Int32
from toka.page_keys import PromptKeys, page_keys
from workers.manager.forecast import Forecast, Need
from workers.manager.sequences import NOBODY, Sequence
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
        self._least = -NOBODY
        """The priority of the least urgent that runs."""
        self._counted = NOBODY
        """Of what runs, those of this priority or a more urgent one count in the two."""
        self._backlog = 0
        """Prompt tokens of those that are admitted and not planned yet."""
        self._coming = 0
        """Slots that come free when tokens in flight have arrived, and that no entry was promised."""
        self._spoken_for = (NOBODY, 0)
        """A priority, and the slots that are for siblings of more urgent sequences, once the prompt is computed."""
        self._frontends: dict[bytes, int] = {}
        self.frontend_ids: list[bytes] = []
        """Frontend identities by the number that Slots.frontends holds."""

    def begin_step(self) -> None:
        """What was known of the pages to come is out of date."""
        slots = self._state.slots
        self._least = int(slots.priority[slots.active()].max(initial=-NOBODY))
        self._count(NOBODY)

    def admit(self) -> None:
        """Give slots to waiting sequences, the urgent first, then first come first served, as long as the forecast
        fits."""
        slots = self._state.slots
        self._coming = len(slots.in_state(SlotState.ENDED)) + len(slots.in_state(SlotState.PREEMPTED))
        self._spoken_for = (-NOBODY, 0)
        held: list[Sequence] = []
        waiting = self._state.waiting
        while (slots.free or waiting.priority < self._least) and (entry := waiting.pop()) is not None:
            if not self._take_turn(entry, held):
                held.append(entry)
                break
        waiting.put_back(held)

    def _take_turn(self, entry: Sequence, held: list[Sequence]) -> bool:
        """Start `entry`, park it, or put it with those `held` for a slot that comes free; False where it has to wait,
        and all behind it."""
        slots, limits = self._state.slots, self._state.limits
        urgent = self._count_beside(entry.shard.priority)
        if slots.free and slots.free <= self._for_siblings(entry.shard.priority):
            return False
        if self._backlog >= BACKLOG_STEPS * (limits.microbatches + 1) * limits.max_tokens_per_step:
            return False
        found = self._find(entry)
        if not entry.shard.unscored and self._state.promises.park(entry, len(found)):
            return True
        need = self._need(entry, found)
        # Alone it always fits: no request longer than the whole cache is accepted.
        if not self._fitting(1, need) and len(self._active()):
            return False
        wanted = 1 if slots.free else self._make_slots(entry, need)
        if slots.free:
            return self._start(entry, found)
        if not urgent or not self._coming:
            return False
        self._coming -= min(self._coming, wanted)
        self._count_in(wanted, need)
        held.append(entry)
        return True

    def _count_beside(self, priority: int) -> bool:
        """Have those count that are at least as urgent; whether there are others."""
        counted = priority if priority < self._least else NOBODY
        if counted != self._counted:
            self._count(counted)
        return counted < NOBODY

    def _count(self, priority: int) -> None:
        """From now on those that are at least as urgent count."""
        slots = self._state.slots
        self._counted = priority
        self._forecast_made, self._most = False, -1
        prefilling = slots.in_state(SlotState.PREFILL)
        prefilling = prefilling[slots.priority[prefilling] <= priority]
        self._backlog = int((slots.target[prefilling] - slots.planned[prefilling]).sum())

    def _active(self) -> Int32:
        """The slots whose sequences count."""
        active = self._state.slots.active()
        return active[self._state.slots.priority[active] <= self._counted]

    def _for_siblings(self, priority: int) -> int:
        """The slots that are for siblings of sequences more urgent than that."""
        if self._spoken_for[0] != priority:
            slots = self._state.slots
            prefilling = slots.in_state(SlotState.PREFILL)
            leaders = [slots.sequence[slot] for slot in prefilling[slots.priority[prefilling] < priority].tolist()]
            self._spoken_for = priority, sum(len(each.siblings) for each in leaders if each is not None)
        return self._spoken_for[1]

    def _make_slots(self, entry: Sequence, need: Need) -> int:
        """Preempt what is less urgent until there are slots, free or to come, for as many of the group of `entry` as
        fit; their number."""
        slots = self._state.slots
        wanted = max(1, self._fitting(1 + len(entry.siblings), need))
        while slots.free + self._coming < wanted and self._preempt_for(entry.shard.priority):
            pass
        return wanted

    def _preempt_for(self, priority: int) -> bool:
        """Preempt the last of what is less urgent; False where nothing is."""
        state, slots = self._state, self._state.slots
        last = slots.last()
        if last < 0 or slots.priority[last] <= priority:
            return False
        free = slots.free
        state.preempt(last)
        self._coming += slots.free == free
        return True

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

    def _matched(self, entry: Sequence, found: Int32) -> Int32:
        """Those of the pages `found` that it may share: the last token is always computed anew."""
        total = len(entry.shard.prompt) + len(entry.outputs)
        return found[: (total - 1) // self._state.limits.page_size]

    def _need(self, entry: Sequence, found: Int32) -> Need:
        pages, limits = self._state.pages, self._state.limits
        total = len(entry.shard.prompt) + len(entry.outputs)
        matched = self._matched(entry, found)
        own = limits.pages_for(total) - int((pages.refs[matched] > 0).sum())
        left = entry.shard.params.max_tokens - len(entry.outputs)
        return Need(total, own, entry.shard.length_class, len(entry.outputs), left)

    def _start(self, entry: Sequence, found: Int32) -> bool:
        """Put `entry` into a slot with pages for all it has to prefill; False where they are not there yet."""
        state, size = self._state, self._state.limits.page_size
        need = self._need(entry, found)
        while need.own > state.pages.available:
            if not self._preempt_for(entry.shard.priority):
                return False
            need = self._need(entry, found)
        matched = self._matched(entry, found)
        state.pages.share(matched)
        if entry.cached < 0:
            entry.cached = len(matched) * size
        else:
            state.recomputed += need.tokens - len(matched) * size
        slot = self.take_slot(entry)
        new = state.limits.pages_for(need.tokens) - len(matched)
        state.slots.add_pages(slot, np.concatenate([matched, state.pages.take(new)]))
        state.slots.planned[slot] = len(matched) * size
        state.promises.promise(entry.keys[len(found) :], entry)
        self._count_in(1, need)
        self._backlog += need.tokens - len(matched) * size
        self._least = max(self._least, entry.shard.priority)
        return True

    def siblings_that_fit(self, leader: int, count: int) -> int:
        """How many of `count` siblings of the sequence in slot `leader` may start beside it."""
        slots, size = self._state.slots, self._state.limits.page_size
        self._count_beside(int(slots.priority[leader]))
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
            self._most = self._held() + self._growth()
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
        active = self._active()
        tokens = np.maximum(slots.target[active], slots.planned[active])
        left = slots.max_tokens[active] - slots.sampled[active]
        return int((-(-(tokens + left) // size) - -(-tokens // size)).sum())

    def _running(self) -> tuple[int, Int32, Int32, Int32, Int32, Int32]:
        """The arguments of `Forecast.begin`."""
        slots = self._state.slots
        active = self._active()
        own = slots.num_pages[active] - self._shared(active)
        tokens = np.maximum(slots.target[active], slots.planned[active])
        have = slots.sampled[active]
        shared = self._held() - int(own.sum())
        return shared, tokens, own, slots.length_class[active], have, slots.max_tokens[active] - have

    def _held(self) -> int:
        """Pages that those which count hold."""
        slots, pages = self._state.slots, self._state.pages
        if self._counted == NOBODY:
            return pages.held
        active = self._active()
        held = np.zeros(pages.num_pages, np.bool_)
        held[slots.table[active][np.arange(slots.table.shape[1]) < slots.num_pages[active, None]]] = True
        return int(held.sum())

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
