"""What a call waits for: its prompts, each a request to the engine, and their samples."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from frontend.errors import ApiError
from frontend.sample import Sample
from frontend.scores import PromptScores
from toka.messages import REQUEST_ID_BYTES, Finish, SamplingParams, Submit, Work, encode

SHARD_SAMPLES = 64
"""Samples of a request that go to one replica together, where it is not fewer for the other replicas' sake."""
WHOLE_DELIVERY = 64
"""Tokens of a sample that are asked for together where nobody looks at each. Handling a row takes this process as
long as many tokens; and what a lost replica had not sent has to be computed again."""


@dataclass(slots=True, eq=False)
class Shard:
    """Samples of a generation that the broker handles as one."""

    first: int
    samples: Sequence[Sample]
    accepted: bool = False

    @property
    def unfinished(self) -> list[Sample]:
        return [sample for sample in self.samples if not sample.finish]


@dataclass(slots=True, eq=False)
class Generation:
    """One prompt and the samples drawn from it: what the rest of Toka calls a request."""

    prompt: NDArray[np.int32]
    params: SamplingParams
    samples: Sequence[Sample]
    priority: int
    delivery: int
    """Tokens of a sample that come together."""
    call: Call
    scores: PromptScores | None = None
    """Where the prompt's log-probabilities are asked for."""
    id: bytes = field(default_factory=lambda: secrets.token_bytes(REQUEST_ID_BYTES))
    cached: int = 0
    """Tokens of the prompt that its first sample found in the prefix cache."""
    left: int = 0
    """Samples that have not finished."""
    shards: list[Shard] = field(default_factory=list)
    share: int = SHARD_SAMPLES
    """Samples of a shard."""
    heard: float = 0.0
    """When something last came for it, in seconds of the loop's clock."""
    quiet: float = 0.0
    """Seconds of silence after which it is asked for again."""

    def __post_init__(self) -> None:
        self.left = len(self.samples)
        self.call.add(self)

    def divide(self, share: int) -> None:
        """Divide the samples into shards of at most `share`, and let the call wait until each is accepted."""
        self.share = share
        for first in range(0, len(self.samples), share):
            self.shards.append(Shard(first, self.samples[first : first + share]))
        self.call.pending += len(self.shards)

    def shard(self, first: int) -> Shard | None:
        """The shard whose first sample this is."""
        place, rest = divmod(first, self.share)
        return self.shards[place] if not rest and 0 <= place < len(self.shards) else None

    @property
    def unscored(self) -> bool:
        """Whether log-probabilities of the prompt are still to come."""
        return self.scores is not None and not self.scores.complete

    def submit(self, shard: Shard, frontend: bytes, page_hashes: bytes) -> Submit:
        """The message that runs the shard's unfinished samples, on from what they have.

        page_hashes: keys of the prompt's full pages, or empty.
        """
        samples = shard.unfinished
        params = self.params
        # One shard has the prompt scored, once; where nothing is generated, all end with that.
        if params.max_tokens and (shard.first or not self.unscored):
            params = dataclasses.replace(params, prompt_logprobs=-1)
        work = Work(
            params=params,
            samples=[sample.number for sample in samples],
            output_counts=[len(sample.ids) for sample in samples],
            delivery=self.delivery,
            prompt=self.prompt,
            outputs=np.array([number for sample in samples for number in sample.ids], dtype=np.int32),
        )
        return Submit(
            frontend=frontend,
            request=self.id,
            first_sample=shard.first,
            sequences=len(samples),
            prompt_tokens=len(self.prompt),
            priority=self.priority,
            page_hashes=page_hashes,
            payload=encode(work),
        )


class Call:
    """One HTTP request's generations, and the one who waits for them.

    `streaming`: wake at every change, and not at the end alone.
    """

    def __init__(self, streaming: bool) -> None:
        self.generations: list[Generation] = []
        self.streaming = streaming
        self.error: ApiError | None = None
        self.accepted = asyncio.Event()
        """All shards are queued or run, or the call has failed."""
        self.pending = 0
        """Shards that were not accepted yet."""
        self.left = 0
        """Samples that have not finished."""
        self._wake = asyncio.Event()
        self._changed: list[Sample] = []

    def add(self, generation: Generation) -> None:
        self.generations.append(generation)
        self.left += generation.left

    def accept(self, shard: Shard) -> None:
        if not shard.accepted:
            shard.accepted = True
            self.pending -= 1
            if not self.pending:
                self.accepted.set()

    def change(self, sample: Sample) -> None:
        """There is more of this sample."""
        if self.streaming and not sample.changed:
            sample.changed = True
            self._changed.append(sample)
            self._wake.set()

    def finish(self, generation: Generation) -> None:
        """One sample of it has finished."""
        generation.left -= 1
        self.left -= 1
        if not self.left:
            self._wake.set()

    @property
    def done(self) -> bool:
        """Whether nothing is left to wait for."""
        return not self.left and not self._changed

    def end(self, finish: Finish) -> None:
        """Finish all samples that have not, as they are, without the engine."""
        self.accepted.set()
        for generation in self.generations:
            for sample in generation.samples:
                if not sample.finish:
                    sample.add((), finish, ())
                    self.change(sample)
                    self.finish(generation)

    def fail(self, error: ApiError) -> None:
        """No more comes, because of `error`."""
        self.error = error
        self.accepted.set()
        self._wake.set()

    def nudge(self) -> None:
        """Wake who waits, although nothing changed."""
        self._wake.set()

    async def wait_accepted(self) -> None:
        """Raises ApiError where the call was refused."""
        await self.accepted.wait()
        if self.error:
            raise self.error

    async def wait(self) -> list[Sample]:
        """The samples that changed since the last call, once there are any or all have finished.

        Raises ApiError where the call has failed.
        """
        await self._wake.wait()
        self._wake.clear()
        if self.error:
            raise self.error
        changed, self._changed = self._changed, []
        for sample in changed:
            sample.changed = False
        return changed
