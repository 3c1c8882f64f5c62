"""The manager without its sockets: requests in, plans out, results in, outputs out."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np

from toka.messages import Compile, Compiled, Constrain, Finish, Outputs, Plan, StepResult, Submit, Work
from toka.trace import OFF, Recorder
from workers.manager.accounting import Accounting
from workers.manager.admission import Admission
from workers.manager.forecast import class_of
from workers.manager.outbox import Outbox
from workers.manager.planner import Planner, Sent
from workers.manager.scores import PromptScores
from workers.manager.sequences import Sequence, Shard, lead
from workers.manager.state import Limits, State
from workers.manager.updates import constraint

INT32 = 1 << 31
MOST_GRAMMAR = 1 << 18
"""Characters of a grammar."""


class Scheduler:
    """Continuous batching over a paged KV cache.

    `plan` may be called again before the results of earlier plans have come: it works in the time of the
    plans sent. `result` takes results in the order of the plans.
    """

    def __init__(self, limits: Limits, eos_token_ids: Iterable[int], trace: Recorder = OFF) -> None:
        assert limits.max_seqs <= limits.max_tokens_per_step, "every running sequence decodes in each step"
        self.limits = limits
        self._trace = trace
        self.state = State(limits)
        self.outbox = Outbox()
        self._eos = frozenset(eos_token_ids)
        self._compiling: dict[int, tuple[Shard, list[Sequence]]] = {}
        """What is not queued yet, since the matcher is not done with its grammar, by the number of the Compile."""
        self._compiles = itertools.count()
        self._admission = Admission(self.state)
        self._planner = Planner(self.state, self._admission)
        self.accounting = Accounting(self.state, self._admission, self.outbox)

    def check(self, work: Work) -> str:
        """Why `work` can never run here, or nothing."""
        limits = self.limits
        prompt, total = len(work.prompt), len(work.prompt) + work.params.max_tokens
        if prompt == 0 or work.params.max_tokens < (0 if work.params.prompt_logprobs >= 0 else 1):
            return "the prompt is empty or no token is wanted"
        if int(work.prompt.min()) < 0 or int(work.prompt.max()) >= limits.vocab_size:
            return f"token ids must be in 0..{limits.vocab_size - 1}"
        if total > limits.context_length:
            return f"prompt and max_tokens are {total} tokens, the context is {limits.context_length}"
        room = limits.pages * limits.page_size
        if total > room:
            return f"prompt and max_tokens are {total} tokens, the KV cache holds {room}"
        params, counts = work.params, (work.params.top_k, work.params.min_tokens)
        if not _within([*work.samples, *counts, work.delivery], INT32) or not _within([params.seed], 1 << 64):
            return "a sample, a count or the seed is out of range"
        if not _within([params.logprobs + 1, params.prompt_logprobs + 1], limits.vocab_size + 2):
            return f"logprobs and prompt_logprobs are from -1 to {limits.vocab_size}"
        if not _within([*params.logit_bias, *params.stop_token_ids], limits.vocab_size):
            return f"token ids of logit_bias and stop_token_ids must be in 0..{limits.vocab_size - 1}"
        if len(params.grammar) > MOST_GRAMMAR:
            return f"the grammar has {len(params.grammar)} characters, {MOST_GRAMMAR} are the most"
        if not _within([params.grammar_after + 1], limits.vocab_size + 1):
            return f"grammar_after must be a token id, or -1 for none: 0..{limits.vocab_size - 1}"
        if len(work.samples) != len(work.output_counts) or len(work.outputs) != sum(work.output_counts):
            return "the outputs do not match the samples"
        if any(count >= work.params.max_tokens for count in work.output_counts if count):
            return "a sample has all its tokens already"
        if params.prompt_logprobs >= 0 and len(work.outputs):
            return "log-probabilities of a prompt come before any output"
        return ""

    def submit(self, submit: Submit, work: Work) -> Compile | None:
        """Queue a shard that `check` accepts; it replaces one of the same name.

        One with a grammar is queued when the matcher has compiled it: what is returned is for the matcher.
        """
        shards = self.state.shards.setdefault(submit.request, {})
        old = shards.get(submit.first_sample)
        if old is not None:
            self._end_all(old.sequences.values())
        shard = shards[submit.first_sample] = self._shard(submit, work)
        self.state.live += len(shard.sequences)
        fresh = [s for s in shard.sequences.values() if not len(s.outputs)]
        entries = [lead(fresh)] if fresh else []
        entries += [s for s in shard.sequences.values() if len(s.outputs)]
        if not work.params.grammar:
            self._queue(entries)
            return None
        number = next(self._compiles)
        self._compiling[number] = shard, entries
        return Compile(number=number, grammar=work.params.grammar)

    def _queue(self, entries: list[Sequence]) -> None:
        for entry in entries:
            self.state.waiting.append(entry)

    def compiled(self, message: Compiled) -> Shard | None:
        """Queue what waited for a grammar. Where it failed, the shard, given up, that has to be refused instead."""
        shard, entries = self._compiling.pop(message.number)
        if message.error:
            return self._give_up(shard)
        self._queue(entries)
        return None

    def grammar_failed(self, slot: int) -> Shard | None:
        """The shard, given up, of a slot whose grammar cannot be followed; None where it has ended already."""
        sequence = self.state.slots.sequence[slot]
        return None if sequence is None or sequence.ended else self._give_up(sequence.shard)

    def _give_up(self, shard: Shard) -> Shard | None:
        """End and forget the shard, telling nobody; None where it has ended already."""
        if not self._end_all(shard.sequences.values()):
            return None
        shards = self.state.shards.get(shard.request, {})
        if shards.get(shard.first_sample) is shard:
            del shards[shard.first_sample]
        return shard

    def _shard(self, submit: Submit, work: Work) -> Shard:
        params = work.params
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        shard = Shard(
            frontend=submit.frontend,
            request=submit.request,
            first_sample=submit.first_sample,
            priority=submit.priority,
            params=params,
            prompt=work.prompt,
            stop_ids=stop_ids,
            stop_set=self.state.stops.intern(stop_ids),
            length_class=class_of(len(work.prompt), params.max_tokens, bool(stop_ids)),
            delivery=work.delivery,
            scores=PromptScores(len(work.prompt), params.prompt_logprobs) if params.prompt_logprobs >= 0 else None,
        )
        outputs = np.split(work.outputs, np.cumsum(work.output_counts)[:-1])
        shard.sequences = {s: Sequence(shard, s, o, len(o)) for s, o in zip(work.samples, outputs)}
        return shard

    def cancel(self, request: bytes, samples: list[int]) -> None:
        """End `samples` of `request` (all of them where empty); nothing more is sent of them."""
        for shard in self._shards(request):
            wanted = [shard.sequences[s] for s in samples if s in shard.sequences] if samples else None
            self._observe(wanted or [])
            ended = self._end_all(shard.sequences.values() if wanted is None else wanted)
            for _ in range(ended):
                self.outbox.ended(shard)

    def _observe(self, sequences: list[Sequence]) -> None:
        """Single samples are cancelled where the frontend found a stop string: that is their length."""
        for sequence in sequences:
            if sequence.slot >= 0 and not sequence.ended:
                length = int(self.state.slots.arrived[sequence.slot])
                self.state.lengths.observe(sequence.shard.length_class, length, stopped=True)

    def _end_all(self, sequences: Iterable[Sequence]) -> int:
        alive = [s for s in sequences if not s.ended]
        for sequence in alive:
            self.state.end(sequence, Finish.ABORT)
        return len(alive)

    def release(self, request: bytes) -> None:
        """Forget `request`; whatever of it still runs is cancelled."""
        self.cancel(request, [])
        self.state.shards.pop(request, None)

    def drop_everything(self) -> None:
        """Cancel and forget all requests, telling nobody; the prefix cache stays."""
        for request in list(self.state.shards):
            self.release(request)
        self.outbox.clear()

    def resume(self, request: bytes, sample: int, have: int, scored: int = 0) -> bool:
        """Send again what `sample` has from output `have` on, and of its prompt's log-probabilities all but the first
        `scored`; False where it is not known here."""
        for shard in self._shards(request):
            sequence = shard.sequences.get(sample)
            if sequence is not None:
                slot = sequence.slot
                outputs = self.state.slots.known_outputs(slot) if slot >= 0 else sequence.outputs
                if shard.scores is not None:
                    self.outbox.scored(shard, shard.scores.since(scored))
                self.outbox.resend(sequence, outputs, have)
                return True
        return False

    def _shards(self, request: bytes) -> list[Shard]:
        return list(self.state.shards.get(request, {}).values())

    def plan(self, admit: bool = True) -> tuple[Plan, Sent] | None:
        """Admit what fits, unless that is put off, and build the next step; None where nothing can run."""
        self._admission.begin_step()
        if admit:
            with self._trace.span("admit"):
                self._admission.admit()
        with self._trace.span("plan"):
            return self._planner.plan()

    def constrain(self, plan: Plan) -> Constrain | None:
        """What the matcher has to know of the plan made last, if anything."""
        return constraint(self.state.slots, plan)

    def result(self, sent: Sent, result: StepResult) -> None:
        self.accounting.take(sent, result)

    def outputs(self, epoch: int) -> list[Outputs]:
        return self.outbox.take(epoch)


def _within(numbers: Iterable[int], end: int) -> bool:
    """Whether all are from 0 to below `end`."""
    return all(0 <= number < end for number in numbers)
