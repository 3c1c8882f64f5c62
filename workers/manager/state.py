"""The manager's state, and the few ways in which a sequence leaves its slot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from toka.messages import Finish, Int32
from toka.page_keys import page_keys
from workers.manager.forecast import LengthPredictor
from workers.manager.pages import PagePool
from workers.manager.promises import Promises
from workers.manager.sequences import Sequence, Shard, WaitingQueue, lead
from workers.manager.slots import Slots, SlotState
from workers.manager.stops import StopSets


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the stages have room for and the settings that shape plans."""

    pages: int
    page_size: int
    max_seqs: int
    max_tokens_per_step: int
    context_length: int
    """Most tokens of one sequence, prompt and output together."""
    vocab_size: int
    prefill_chunk: int = 0
    microbatches: int = 1
    """Steps on their way through the stages of a pipeline."""
    passes: int = 2
    """Steps of one sequence that are planned before the result of the first of them is accounted."""
    prefix_cache: bool = True
    shared_prefix: bool = True

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)


class State:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.slots = Slots(limits.max_seqs)
        self.pages = PagePool(limits.pages)
        self.waiting = WaitingQueue()
        self.promises = Promises()
        self.stops = StopSets(limits.vocab_size)
        self.lengths = LengthPredictor()
        self.shards: dict[bytes, dict[int, Shard]] = {}
        """Every shard that has not been released, by request and then first sample."""
        self.copies: dict[int, int] = {}
        """Page copies that the next plan makes before anything else: source by target."""
        self.live = 0
        """Sequences that have not ended, running or not."""
        self.preemptions = 0
        self.recomputed = 0
        """Tokens computed again after a preemption."""

    @property
    def running(self) -> int:
        """Sequences in a slot that have not ended."""
        return int((self.slots.state != SlotState.FREE).sum() - (self.slots.state == SlotState.ENDED).sum())

    def end(self, sequence: Sequence, finish: Finish) -> None:
        """`sequence` gets no more tokens. It leaves its slot if it has one; its siblings do without it."""
        assert not sequence.ended
        sequence.ended, sequence.finish = True, finish
        self.live -= 1
        shard = sequence.shard
        if not shard.unfinished:
            self.stops.release(shard.stop_set)
        if sequence.slot >= 0:
            siblings = self._alive_siblings(sequence)
            if siblings:
                self.waiting.put_back([lead(siblings)])
            if self.slots.state[sequence.slot] == SlotState.PREEMPTED:
                self.slots.state[sequence.slot] = SlotState.ENDED
            else:
                self._vacate(sequence.slot, SlotState.ENDED)

    def preempt(self, slot: int) -> None:
        """Take the slot's pages; its sequence goes back to the queue with the tokens it has."""
        self.preemptions += 1
        self._vacate(slot, SlotState.PREEMPTED)

    def _vacate(self, slot: int, state: SlotState) -> None:
        slots = self.slots
        sequence = slots.sequence[slot]
        assert sequence is not None
        pages = slots.pages(slot).copy()
        self._key_outputs(slot, sequence, pages)
        for page in pages.tolist() if self.copies else ():
            self.copies.pop(page, None)
        self.pages.release(pages)
        slots.num_pages[slot] = 0
        if slots.state[slot] == SlotState.PREFILL:
            self.waiting.put_back(self.promises.settle(sequence.keys, sequence))
        slots.state[slot] = state
        if slots.in_flight[slot] == 0:
            self.leave(slot)

    def _key_outputs(self, slot: int, sequence: Sequence, pages: Int32) -> None:
        """Make the full pages that hold generated tokens findable."""
        if not self.limits.prefix_cache or self.slots.state[slot] != SlotState.DECODE:
            return
        known = np.concatenate([sequence.shard.prompt, self.slots.known_outputs(slot)])
        known = known[: self.slots.planned[slot]]
        keys = page_keys(known, self.limits.page_size, sequence.keys)
        prompt = len(sequence.keys)
        self.pages.key(pages[prompt : len(keys)].tolist(), keys[prompt:])

    def leave(self, slot: int) -> None:
        """Free a slot whose tokens have all arrived; a preempted sequence queues again."""
        ended = self.slots.state[slot] == SlotState.ENDED
        sequence = self.slots.give_back(slot)
        if not ended:
            self.waiting.put_back([lead([sequence, *self._alive_siblings(sequence)])])

    @staticmethod
    def _alive_siblings(sequence: Sequence) -> list[Sequence]:
        siblings = [s for s in sequence.siblings if not s.ended]
        sequence.siblings = []
        return siblings
