"""The running sequences, as arrays by slot: what a step touches for every one of them at once."""

from __future__ import annotations

import enum

import numpy as np

from toka.messages import Int32
from workers.manager.sequences import Sequence


class SlotState(enum.IntEnum):
    FREE = 0
    PREFILL = 1
    """Its prompt (and outputs it had before) is being planned into the KV cache."""
    DECODE = 2
    PREEMPTED = 3
    """In no further plan; goes back to the queue when the tokens in flight have arrived."""
    ENDED = 4
    """Finished or cancelled; tokens still in flight are thrown away."""


class Slots:
    """`count` slots; positions and counts are in tokens, `planned` in the time of the plans already sent."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.state = np.zeros(count, np.int8)
        self.sequence: list[Sequence | None] = [None] * count
        self.requests = np.zeros((count, 16), np.uint8)
        self.samples = np.zeros(count, np.int32)
        self.frontends = np.zeros(count, np.int32)
        self.table = np.zeros((count, 64), np.int32)
        """Pages by slot, grown in width as sequences grow."""
        self.num_pages = np.zeros(count, np.int32)
        self.target = np.zeros(count, np.int32)
        """Tokens that prefill has to bring into the KV cache."""
        self.planned = np.zeros(count, np.int32)
        """Tokens in the KV cache once all plans sent have run."""
        self.sampled = np.zeros(count, np.int32)
        """Output tokens whose sampling has been planned."""
        self.arrived = np.zeros(count, np.int32)
        """Output tokens known here, ..."""
        self.told = np.zeros(count, np.int32)
        """... those of them that the frontend has or was told, ..."""
        self.delivery = np.ones(count, np.int32)
        """... and how many more it is told together."""
        self.in_flight = np.zeros(count, np.int32)
        """Tokens and parts of its prompt's log-probabilities that plans sent give and that have not arrived."""
        self.last_step = np.zeros(count, np.int64)
        """The step that samples, or sampled, its last token."""
        self.max_tokens = np.zeros(count, np.int32)
        self.cached = np.zeros(count, np.int32)
        self.stop_set = np.zeros(count, np.int32)
        self.logprobs = np.full(count, -1, np.int32)
        self.length_class = np.zeros(count, np.int32)
        self.age = np.zeros(count, np.int64)
        """Order of admission."""
        self.fresh = np.zeros(count, np.bool_)
        """Whether the stages have still to be told of the slot's sequence, ..."""
        self.pages_sent = np.zeros(count, np.int32)
        """... and how many of its pages they know."""
        self.priority = np.zeros(count, np.int32)
        self.constrained = np.zeros(count, np.bool_)
        """Whether its sequence has a grammar."""
        self.outputs = np.zeros((count, 256), np.int32)
        """Output ids by slot, grown in width as outputs grow."""
        self._free = list(range(count - 1, -1, -1))
        self._admitted = 0

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, sequence: Sequence, frontend: int) -> int:
        """A slot for `sequence`, in state PREFILL with no pages and nothing planned."""
        slot = self._free.pop()
        shard = sequence.shard
        self._admitted += 1
        self.state[slot] = SlotState.PREFILL
        self.sequence[slot] = sequence
        self.requests[slot] = np.frombuffer(shard.request, np.uint8)
        self.samples[slot] = sequence.sample
        self.frontends[slot] = frontend
        self.fresh[slot] = True
        self.num_pages[slot] = self.pages_sent[slot] = 0
        self.planned[slot] = self.in_flight[slot] = 0
        self.target[slot] = len(shard.prompt) + len(sequence.outputs)
        self.sampled[slot] = self.arrived[slot] = len(sequence.outputs)
        self.told[slot], self.delivery[slot] = sequence.told, shard.delivery
        self.max_tokens[slot] = shard.params.max_tokens
        self.cached[slot] = max(0, sequence.cached)
        self.stop_set[slot] = shard.stop_set
        self.logprobs[slot] = shard.params.logprobs
        self.length_class[slot] = shard.length_class
        self.age[slot] = self._admitted
        self.priority[slot] = shard.priority
        self.constrained[slot] = bool(shard.params.grammar)
        self._widen(len(sequence.outputs))
        self.outputs[slot, : len(sequence.outputs)] = sequence.outputs
        sequence.slot = slot
        return slot

    def _widen(self, width: int) -> None:
        old = self.outputs.shape[1]
        if width <= old:
            return
        wider = np.zeros((self.count, max(width, 2 * old)), np.int32)
        for slot in np.flatnonzero(self.state):
            wider[slot, : self.arrived[slot]] = self.outputs[slot, : self.arrived[slot]]
        self.outputs = wider

    def add_pages(self, slot: int, pages: Int32) -> None:
        first = int(self.num_pages[slot])
        self._widen_table(first + len(pages))
        self.table[slot, first : first + len(pages)] = pages
        self.num_pages[slot] += len(pages)

    def grow(self, slots: Int32, pages: Int32) -> None:
        """One more page for each of `slots`."""
        at = self.num_pages[slots]
        self._widen_table(int(at.max(initial=0)) + 1)
        self.table[slots, at] = pages
        self.num_pages[slots] += 1

    def _widen_table(self, width: int) -> None:
        old = self.table.shape[1]
        if width > old:
            wider = np.zeros((self.count, max(width, 2 * old)), np.int32)
            wider[:, :old] = self.table
            self.table = wider

    def pages(self, slot: int) -> Int32:
        held: Int32 = self.table[slot, : self.num_pages[slot]]
        return held

    def append_outputs(self, slots: Int32, tokens: Int32) -> None:
        """One token for each of `slots` (each at most once)."""
        at = self.arrived[slots]
        self._widen(int(at.max(initial=0)) + 1)
        self.outputs[slots, at] = tokens
        self.arrived[slots] += 1

    def take_untold(self, slots: Int32) -> tuple[Int32, Int32, Int32]:
        """The outputs of `slots` that are not told, told from now on: for each the first one's position and their
        number; and the ids, slot after slot."""
        first, arrived = self.told[slots], self.arrived[slots]
        counts = arrived - first
        self.told[slots] = arrived
        ends = np.cumsum(counts)
        # Where each slot's run begins in `outputs`, less where it begins in the result.
        shifts = slots.astype(np.int64) * self.outputs.shape[1] + first - (ends - counts)
        places = np.arange(counts.sum()) + np.repeat(shifts, counts)
        return first, counts, self.outputs.reshape(-1)[places]

    def known_outputs(self, slot: int) -> Int32:
        return self.outputs[slot, : self.arrived[slot]].copy()

    def give_back(self, slot: int) -> Sequence:
        """Free the slot; the sequence that had it takes its output ids along."""
        sequence = self.sequence[slot]
        assert sequence is not None and self.in_flight[slot] == 0
        sequence.outputs, sequence.told = self.known_outputs(slot), int(self.told[slot])
        sequence.slot = -1
        self.sequence[slot] = None
        self.state[slot] = SlotState.FREE
        self.fresh[slot] = False
        self._free.append(slot)
        return sequence

    def active(self) -> Int32:
        """Slots whose sequences prefill or decode, ascending."""
        return np.flatnonzero((self.state == SlotState.PREFILL) | (self.state == SlotState.DECODE)).astype(np.int32)

    def last(self) -> int:
        """Of the least urgent sequences that hold pages, the last one admitted: who gives way; -1 for none."""
        running = self.active()
        return int(running[np.lexsort((self.age[running], self.priority[running]))[-1]]) if len(running) else -1

    def in_state(self, state: SlotState) -> Int32:
        """Slots in `state`, ascending."""
        return np.flatnonzero(self.state == state).astype(np.int32)
