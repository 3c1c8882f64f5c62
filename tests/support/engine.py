"""A whole replica in this process: the manager's scheduler and a stage's executor, joined by calls."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.matching import LocalMatcher
from tests.support.submission import header
from toka.config import Config
from toka.messages import Plan, SamplingParams, Scores, StageReady, StepResult, Tokens, Work, decode
from toka.model import open_model
from workers.manager.__main__ import limits
from workers.manager.planner import Sent
from workers.manager.scheduler import Scheduler
from workers.stage.build import build


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    chosen: list[float] = field(default_factory=list)
    finish: int = 0
    cached: int = 0


class Engine:
    """`depth` plans are made before the result of the first is taken in, as in a server."""

    def __init__(self, model: Path | str = "", *, depth: int = 2, **settings: Any) -> None:
        config = Config(model=str(model), **settings)
        self.executor = build(config)
        source = open_model(config.model)
        sizes = self.executor.sizes
        ready = StageReady(stage=0, pages=sizes.pages, max_seqs=sizes.max_seqs, max_tokens_per_step=sizes.max_tokens)
        self.limits = limits(config, source.config, [ready])
        self.scheduler = Scheduler(self.limits, source.config.eos_token_ids)
        self.matcher = self.executor.matcher = LocalMatcher(str(model))
        self.answers: dict[tuple[bytes, int], Answer] = {}
        self.scores: dict[bytes, list[float]] = {}
        """Log-probabilities of prompts, by request."""
        self.refused: dict[bytes, str] = {}
        self.plans: list[Plan] = []
        self._depth = depth
        self._flying: deque[tuple[Sent, StepResult]] = deque()
        self._count = 0

    def submit(self, prompt: list[int], max_tokens: int, n: int = 1, **params: Any) -> bytes:
        self._count += 1
        request = self._count.to_bytes(16, "big")
        params = {"seed": self._count, "temperature": 0.0, **params}
        work = Work(
            params=SamplingParams(max_tokens=max_tokens, **params),
            samples=list(range(n)),
            output_counts=[0] * n,
            prompt=np.array(prompt, np.int32),
            outputs=np.empty(0, np.int32),
        )
        assert self.scheduler.check(work) == ""
        for sample in range(n):
            self.answers[request, sample] = Answer()
        compile = self.scheduler.submit(header(b"f-test", request, work), work)
        if compile is not None:
            compiled = self.matcher.compile(compile)
            if shard := self.scheduler.compiled(compiled):
                self.refused[shard.request] = compiled.error
        return request

    def step(self) -> None:
        """One plan, and one result if enough plans are under way or no plan can be made."""
        planned = self.scheduler.plan()
        if planned is not None:
            self.plans.append(planned[0])
            self._constrain(planned[0])
            self._flying.append((planned[1], self.executor.execute(planned[0])))
        if self._flying and (planned is None or len(self._flying) >= self._depth):
            self.scheduler.result(*self._flying.popleft())
        for message in self.scheduler.outputs(epoch=1):
            payload = decode(message.payload)
            if isinstance(payload, Scores):
                self._take_scores(payload)
            else:
                assert isinstance(payload, Tokens)
                self._take(payload)

    def _take_scores(self, scores: Scores) -> None:
        at = 0
        for i, (first, count) in enumerate(zip(scores.first.tolist(), scores.counts.tolist())):
            had = self.scores.setdefault(scores.requests[16 * i : 16 * i + 16], [])
            assert first == len(had), "a gap or a repetition"
            had += scores.chosen[at : at + count].tolist()
            at += count

    def _constrain(self, plan: Plan) -> None:
        """Let the matcher compute the plan's masks, and give up what it cannot go on with."""
        constrain = self.scheduler.constrain(plan)
        for failed in self.matcher.advance(constrain) if constrain is not None else ():
            if shard := self.scheduler.grammar_failed(failed.slot):
                self.refused[shard.request] = failed.reason

    def _take(self, tokens: Tokens) -> None:
        at = logprobs_at = 0
        for i, sample in enumerate(tokens.samples.tolist()):
            answer = self.answers[tokens.requests[16 * i : 16 * i + 16], sample]
            count = int(tokens.counts[i])
            answer.tokens += tokens.tokens[at : at + count].tolist()
            answer.finish, answer.cached = int(tokens.finish[i]), int(tokens.cached[i])
            at += count
            if tokens.logprobs[i] >= 0:
                answer.chosen += tokens.chosen[logprobs_at : logprobs_at + count].tolist()
                logprobs_at += count

    def finish(self) -> None:
        """Run until everything submitted has ended."""
        while self.scheduler.state.live or self._flying:
            self.step()
        self.scheduler.state.pages.check()
        assert self.scheduler.state.pages.held == 0, "pages leaked"

    def generate(self, prompts: list[list[int]], max_tokens: int, **params: Any) -> list[list[int]]:
        """The outputs of all `prompts`, run together."""
        requests = [self.submit(prompt, max_tokens, **params) for prompt in prompts]
        self.finish()
        return [self.answers[request, 0].tokens for request in requests]
