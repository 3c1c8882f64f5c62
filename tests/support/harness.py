"""The scheduler with a null stage behind it, turn by turn."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

import numpy as np

from tests.support.null_stage import NullStage, draw, score
from tests.support.submission import header
from toka.messages import Finish, Outputs, Plan, SamplingParams, Scores, Tokens, Work, decode
from workers.manager.forecast import class_of
from workers.manager.planner import Sent
from workers.manager.scheduler import Scheduler
from workers.manager.state import Limits

VOCAB = 97
EOS = 0
FRONTEND = b"f-test"


class Harness:
    """A scheduler, a null stage that runs behind it, and what the frontends have got so far."""

    def __init__(self, *, depth: int = 2, hurried: Sequence[bool] = (False,), **limits: object) -> None:
        values = dict(pages=24, page_size=4, max_seqs=4, max_tokens_per_step=16, context_length=96, vocab_size=VOCAB)
        self.limits = Limits(**(values | limits))  # type: ignore[arg-type]
        self.scheduler = Scheduler(self.limits, [EOS])
        self.stage = NullStage(
            self.limits.pages,
            self.limits.page_size,
            self.limits.max_seqs,
            self.limits.pages_for(self.limits.context_length),
            VOCAB,
        )
        self.depth = depth
        self.hurried = hurried
        self.flying: deque[tuple[Sent, object]] = deque()
        self.got: dict[tuple[bytes, int], list[int]] = {}
        self.finish: dict[tuple[bytes, int], Finish] = {}
        self.cached: dict[tuple[bytes, int], int] = {}
        self.credits: dict[bytes, int] = {}
        self.runs: dict[tuple[bytes, int], list[int]] = {}
        """Tokens of each row that came."""
        self.prompts: dict[bytes, list[int]] = {}
        """Of requests for log-probabilities of their prompt, ..."""
        self.scores: dict[bytes, list[float]] = {}
        """... and these."""
        self.steps = 0
        self._count = 0

    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        n: int = 1,
        *,
        outputs: int = 0,
        ignore_eos: bool = False,
        priority: int = 0,
        stop_token_ids: list[int] | None = None,
        logprobs: int = -1,
        prompt_logprobs: int = -1,
        delivery: int = 1,
    ) -> bytes:
        self._count += 1
        request, seed = self._count.to_bytes(16, "big"), self._count
        params = SamplingParams(
            max_tokens=max_tokens,
            seed=seed,
            ignore_eos=ignore_eos,
            stop_token_ids=stop_token_ids or [],
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        ids = np.array(prompt, np.int32)
        had = [[draw(seed, s, p, VOCAB) for p in range(outputs)] for s in range(n)]
        work = Work(
            params=params,
            samples=list(range(n)),
            output_counts=[outputs] * n,
            delivery=delivery,
            prompt=ids,
            outputs=np.array([t for h in had for t in h], np.int32),
        )
        assert self.scheduler.check(work) == ""
        if prompt_logprobs >= 0:
            self.prompts[request] = prompt
        for s in range(n):
            self.stage.expect[seed, s] = ids
            self.got[request, s] = had[s]
        self.scheduler.submit(header(FRONTEND, request, work, priority=priority), work)
        return request

    def step(self) -> bool:
        """One turn of the manager: a plan if there is room ahead of the stage, a result where one is due.

        In a hurried turn, `hurried` says when, the plan goes before admission and before one result more.
        """
        hurry = self.hurried[self.steps % len(self.hurried)] and len(self.flying) <= self.depth
        planned = self.scheduler.plan(admit=False) if hurry else None
        if planned is None:
            hurry = False
            planned = self.scheduler.plan() if len(self.flying) < self.depth else None
        if planned is not None:
            plan, sent = planned
            assert len(plan.tokens) <= self.limits.max_tokens_per_step
            self._check_pipeline(plan)
            self.flying.append((sent, self.stage.run(plan)))
        due = bool(self.flying) and (planned is None or (len(self.flying) >= self.depth and not hurry))
        if due:
            sent, result = self.flying.popleft()
            self.scheduler.result(sent, result)  # type: ignore[arg-type]
        self.deliver(self.scheduler.outputs(epoch=1))
        self.scheduler.state.pages.check()
        self.steps += 1
        return planned is not None or due

    def _check_pipeline(self, plan: Plan) -> None:
        """No sequence is in two of the steps that are on their way through the stages at once."""
        at = np.concatenate([[0], np.cumsum(plan.row_counts)[:-1]])
        decoding = plan.row_slots[plan.tokens[at] == -1] if len(plan.row_slots) else plan.row_slots
        assert (plan.step - self.stage.sampled_in[decoding] >= self.limits.microbatches).all()

    def deliver(self, messages: list[Outputs]) -> None:
        for message in messages:
            for request, count in zip(message.finished, message.finished_sequences):
                self.credits[request] = self.credits.get(request, 0) + count
            tokens = decode(message.payload)
            if isinstance(tokens, Scores):
                self._score(tokens)
                continue
            assert isinstance(tokens, Tokens)
            at = 0
            for i, sample in enumerate(tokens.samples.tolist()):
                name = tokens.requests[16 * i : 16 * i + 16], sample
                count = int(tokens.counts[i])
                assert tokens.first[i] == len(self.got[name]), "a gap or a repetition"
                wanted = self.prompts.get(name[0], [0])
                assert len(self.scores.get(name[0], [])) == len(wanted) - 1, "a prompt's log-probabilities come first"
                assert name not in self.finish, "tokens after the end"
                self.got[name] += tokens.tokens[at : at + count].tolist()
                self.cached[name] = int(tokens.cached[i])
                self.runs.setdefault(name, []).append(count)
                at += count
                if tokens.finish[i]:
                    self.finish[name] = Finish(int(tokens.finish[i]))

    def _score(self, scores: Scores) -> None:
        at = top = 0
        for i, (first, count, likely) in enumerate(zip(scores.first, scores.counts, scores.logprobs)):
            request = scores.requests[16 * i : 16 * i + 16]
            had = self.scores.setdefault(request, [])
            assert first == len(had), "a gap or a repetition of log-probabilities"
            had += scores.chosen[at : at + count].tolist()
            ids = self.prompts[request][first + 1 : first + 1 + count]
            for place, following in enumerate(ids, start=int(first)):
                assert had[place] == np.float32(score(place, following))
                ends = slice(top, top + likely)
                assert scores.top_ids[ends].tolist() == [following + rank for rank in range(likely)]
                values = [score(place, following, rank) for rank in range(likely)]
                assert (scores.top_values[ends] == np.array(values, np.float32)).all()
                top += likely
            at += count
        assert (at, top, top) == (len(scores.chosen), len(scores.top_ids), len(scores.top_values))

    def drain(self, bound: int = 20_000) -> None:
        while self.scheduler.state.live or self.flying:
            assert self.steps < bound, "requests do not finish"
            assert self.step() or not self.scheduler.state.live, "nothing can run, yet requests wait"
        self.deliver(self.scheduler.outputs(epoch=1))
        assert self.scheduler.state.slots.free == self.limits.max_seqs
        assert self.scheduler.state.pages.held == 0, "pages leaked"

    def expected(self, request: bytes, sample: int, max_tokens: int, stops: set[int]) -> tuple[list[int], Finish]:
        seed = int.from_bytes(request, "big")
        tokens: list[int] = []
        while len(tokens) < max_tokens:
            tokens.append(draw(seed, sample, len(tokens), VOCAB))
            if tokens[-1] in stops:
                return tokens, Finish.STOP
        return tokens, Finish.LENGTH


def expect_short_outputs(harness: Harness) -> None:
    """So that more is admitted than fits to its end."""
    for prompt, max_tokens in itertools.product([1 << bits for bits in range(7)], [1 << bits for bits in range(7)]):
        for stops in (False, True):
            for _ in range(20):
                harness.scheduler.state.lengths.observe(class_of(prompt, max_tokens, stops), 1, stopped=True)
