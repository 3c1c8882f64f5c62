"""Takes in what a step sampled: new tokens, stops and limits, slots that come free."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from toka.messages import Finish, StepResult
from workers.manager.admission import Admission
from workers.manager.outbox import Outbox, Rows, finish_codes
from workers.manager.planner import Sent
from workers.manager.sequences import TokenLogprobs
from workers.manager.slots import SlotArray, SlotState
from workers.manager.state import State


class Accounting:
    def __init__(self, state: State, admission: Admission, outbox: Outbox) -> None:
        self._state = state
        self._admission = admission
        self._outbox = outbox
        self.tokens = 0
        """Tokens delivered."""
        self.discarded = 0
        """Tokens computed past the end of their sequence and thrown away."""

    def take(self, sent: Sent, result: StepResult) -> None:
        """Account the result of the plan that `sent` remembers."""
        assert result.step == sent.step and len(result.tokens) == len(sent.slots)
        slots = self._state.slots
        slots.in_flight[sent.slots] -= 1
        state = slots.state[sent.slots]
        live = (state == SlotState.DECODE) | (state == SlotState.PREEMPTED)
        self.tokens += int(live.sum())
        self.discarded += int((~live).sum())
        details = self._details(sent.slots, live, result)
        self._deliver(sent.slots[live], result.tokens[live], details)
        left = (slots.in_flight[sent.slots] == 0) & (
            (slots.state[sent.slots] == SlotState.ENDED) | (slots.state[sent.slots] == SlotState.PREEMPTED)
        )
        for slot in sent.slots[left].tolist():
            self._state.leave(slot)

    def _deliver(self, rows: SlotArray, tokens: NDArray[np.int32], details: dict[int, TokenLogprobs]) -> None:
        """Append one token to each of the slots `rows`, tell the frontends, and end what has ended."""
        slots = self._state.slots
        first = slots.arrived[rows].copy()
        slots.append_outputs(rows, tokens)
        stop = self._state.stops.contain(slots.stop_set[rows], tokens)
        finish = finish_codes(stop, slots.arrived[rows] >= slots.max_tokens[rows])
        frontends = slots.frontends[rows]
        for frontend in np.unique(frontends).tolist():
            of = np.flatnonzero(frontends == frontend)
            mine = rows[of]
            self._outbox.add(
                self._admission.frontend_ids[frontend],
                Rows(
                    requests=slots.requests[mine].reshape(-1),
                    samples=slots.samples[mine],
                    first=first[of],
                    counts=np.ones(len(of), np.int32),
                    finish=finish[of],
                    cached=slots.cached[mine],
                    logprobs=slots.logprobs[mine],
                    tokens=tokens[of],
                    details=[details[slot] for slot in mine.tolist() if slot in details] if details else [],
                ),
            )
        for slot, code in zip(rows[finish > 0].tolist(), finish[finish > 0].tolist()):
            self._end(slot, Finish(code))

    def _end(self, slot: int, finish: Finish) -> None:
        sequence = self._state.slots.sequence[slot]
        assert sequence is not None
        self._state.lengths.observe(int(self._state.slots.length_class[slot]), int(self._state.slots.arrived[slot]))
        self._outbox.ended(sequence.shard)
        self._state.end(sequence, finish)

    def _details(self, sent: SlotArray, live: NDArray[np.bool_], result: StepResult) -> dict[int, TokenLogprobs]:
        """Log-probabilities by slot, for the rows that asked; kept with their sequences as well."""
        wanted = self._state.slots.logprobs[sent]
        details: dict[int, TokenLogprobs] = {}
        if not len(result.chosen):
            return details
        at = 0
        for i, row in enumerate(np.flatnonzero(wanted >= 0).tolist()):
            k = int(wanted[row])
            one = TokenLogprobs(float(result.chosen[i]), result.top_ids[at : at + k], result.top_values[at : at + k])
            at += k
            slot = int(sent[row])
            sequence = self._state.slots.sequence[slot]
            if live[row] and sequence is not None:
                sequence.logprobs.append(one)
                details[slot] = one
        return details
