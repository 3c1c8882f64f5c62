"""Takes in what a step sampled and scored: new tokens, stops and limits, slots that come free."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from toka.messages import Finish, Int32, StepResult
from workers.manager.admission import Admission
from workers.manager.outbox import Outbox, Rows, finish_codes
from workers.manager.planner import Sent
from workers.manager.scores import Run
from workers.manager.sequences import NO_OUTPUTS, Shard, TokenLogprobs
from workers.manager.slots import SlotState
from workers.manager.state import State


class Accounting:
    def __init__(self, state: State, admission: Admission, outbox: Outbox) -> None:
        self._state = state
        self._admission = admission
        self._outbox = outbox
        self.tokens = 0
        """Tokens that belong to an answer, whether told yet or not."""
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
        self._keep_logprobs(sent.slots, live, result)
        if sent.scored:
            self._take_scores(sent, result)
        self._append(sent.slots[live], result.tokens[live])
        self._leave(sent)

    def _leave(self, sent: Sent) -> None:
        """Free the slots whose sequences have left and for which nothing is in flight any more."""
        slots, concerned = self._state.slots, sent.slots
        if sent.scored:
            concerned = np.union1d(concerned, np.array([chunk.slot for chunk in sent.scored], np.int32))
        left = (slots.in_flight[concerned] == 0) & (
            (slots.state[concerned] == SlotState.ENDED) | (slots.state[concerned] == SlotState.PREEMPTED)
        )
        leaving = concerned[left]
        # Who is put back last goes first again: the one that was admitted first.
        for slot in leaving[np.argsort(-slots.age[leaving])].tolist():
            self._state.leave(slot)

    def _take_scores(self, sent: Sent, result: StepResult) -> None:
        """Keep the step's log-probabilities of prompts, tell the frontends, and end what wants no more than these."""
        at = top_at = 0
        for chunk in sent.scored:
            self._state.slots.in_flight[chunk.slot] -= 1
            scores, end = chunk.shard.scores, at + chunk.ids
            assert scores is not None
            top_end = top_at + chunk.ids * scores.likely
            tops = result.scored_top_ids[top_at:top_end], result.scored_top_values[top_at:top_end]
            new = scores.take(chunk.end, Run(chunk.start, result.scored[at:end], *tops))
            at, top_at = end, top_end
            if chunk.shard.unfinished:
                self._outbox.scored(chunk.shard, new)
                if scores.complete and not chunk.shard.params.max_tokens:
                    self._end_scored(chunk.shard)
        assert at == len(result.scored) and top_at == len(result.scored_top_ids)

    def _end_scored(self, shard: Shard) -> None:
        """All of a shard that generates nothing. Those without a slot first: they are siblings of one that has one."""
        for sequence in sorted(shard.sequences.values(), key=lambda sequence: sequence.slot):
            if not sequence.ended:
                self._outbox.ended(shard)
                self._state.end(sequence, Finish.LENGTH)
                self._outbox.resend(sequence, NO_OUTPUTS, 0)

    def _append(self, rows: Int32, tokens: Int32) -> None:
        """Append one token to each of the slots `rows`, tell the frontends what is due, and end what has ended."""
        slots = self._state.slots
        slots.append_outputs(rows, tokens)
        arrived = slots.arrived[rows]
        stop = self._state.stops.contain(slots.stop_set[rows], tokens)
        finish = finish_codes(stop, arrived >= slots.max_tokens[rows])
        ended = finish > 0
        due = ended | (arrived - slots.told[rows] >= slots.delivery[rows])
        self._deliver(rows[due], finish[due])
        for slot, code in zip(rows[ended].tolist(), finish[ended].tolist()):
            self._end(slot, Finish(code))

    def _deliver(self, rows: Int32, finish: NDArray[np.uint8]) -> None:
        """Tell the frontends all that is not told of the slots `rows`."""
        slots = self._state.slots
        frontends = slots.frontends[rows]
        for frontend in np.flatnonzero(np.bincount(frontends)).tolist():
            of = np.flatnonzero(frontends == frontend)
            mine = rows[of]
            first, counts, tokens = slots.take_untold(mine)
            self._outbox.add(
                self._admission.frontend_ids[frontend],
                Rows(
                    requests=slots.requests[mine].reshape(-1),
                    samples=slots.samples[mine],
                    first=first,
                    counts=counts,
                    finish=finish[of],
                    cached=slots.cached[mine],
                    logprobs=slots.logprobs[mine],
                    tokens=tokens,
                    details=self._last_logprobs(mine, counts),
                ),
            )

    def _end(self, slot: int, finish: Finish) -> None:
        slots = self._state.slots
        sequence = slots.sequence[slot]
        assert sequence is not None
        self._state.lengths.observe(sequence.shard.length_class, int(slots.arrived[slot]), finish == Finish.STOP)
        self._outbox.ended(sequence.shard)
        self._state.end(sequence, finish)

    def _keep_logprobs(self, sent: Int32, live: NDArray[np.bool_], result: StepResult) -> None:
        """Append the step's log-probabilities to the sequences that asked for them."""
        if not len(result.chosen):
            return
        wanted = self._state.slots.logprobs[sent]
        at = 0
        for i, row in enumerate(np.flatnonzero(wanted >= 0).tolist()):
            k = int(wanted[row])
            sequence = self._state.slots.sequence[sent[row]]
            if live[row] and sequence is not None:
                top_ids, top_values = result.top_ids[at : at + k], result.top_values[at : at + k]
                sequence.logprobs.append(TokenLogprobs(float(result.chosen[i]), top_ids, top_values))
            at += k

    def _last_logprobs(self, rows: Int32, counts: Int32) -> list[TokenLogprobs]:
        """Those of the last `counts[i]` tokens of each slot `rows[i]` that asked for them."""
        slots = self._state.slots
        found: list[TokenLogprobs] = []
        for i in np.flatnonzero(slots.logprobs[rows] >= 0).tolist():
            sequence = slots.sequence[rows[i]]
            assert sequence is not None
            found += sequence.logprobs[-int(counts[i]) :]
        return found
