"""What the manager keeps of a request: its shards, their sequences, and the queue they wait in."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from toka.messages import Finish, Int32, SamplingParams
from workers.manager.scores import PromptScores

NO_OUTPUTS: Int32 = np.empty(0, np.int32)
PRUNE_LEAST = 256
NOBODY = 1 << 31
"""No priority is as high."""


@dataclass(slots=True, eq=False)
class TokenLogprobs:
    """Log-probabilities of one output token: its own, and the k most likely ids with theirs."""

    chosen: float
    top_ids: Int32
    top_values: NDArray[np.float32]


@dataclass(slots=True, eq=False)
class Shard:
    """A range of samples of one request: they share the prompt and the parameters."""

    frontend: bytes
    request: bytes
    first_sample: int
    priority: int
    params: SamplingParams
    prompt: Int32
    stop_ids: frozenset[int]
    stop_set: int
    """The number of `stop_ids` in StopSets."""
    length_class: int
    delivery: int
    """Tokens of a sequence that its frontend is told together."""
    scores: PromptScores | None = None
    """Where the prompt's log-probabilities are asked for."""
    keys: list[bytes] = field(default_factory=list)
    """Keys of the prompt's full pages, once they were asked for; empty without the prefix cache."""
    sequences: dict[int, Sequence] = field(default_factory=dict)
    """By sample, whether ended or not; kept until the frontend releases the request."""

    @property
    def unfinished(self) -> int:
        return sum(not s.ended for s in self.sequences.values())

    @property
    def unscored(self) -> PromptScores | None:
        """`scores`, where the plans sent do not score all of the prompt yet."""
        return None if self.scores is None or self.scores.all_planned else self.scores


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample. While it runs, its output ids stand in `Slots.outputs`; otherwise here."""

    shard: Shard
    sample: int
    outputs: Int32 = field(default_factory=lambda: NO_OUTPUTS)
    told: int = 0
    """Output ids that its frontend has or was told."""
    slot: int = -1
    ended: bool = False
    finish: Finish = Finish.NONE
    keys: list[bytes] = field(default_factory=list)
    """Keys of the full pages that prefill brings into the KV cache; set at admission."""
    cached: int = -1
    """Prompt tokens found in the prefix cache when it was first admitted; -1 before."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    siblings: list[Sequence] = field(default_factory=list)
    """Sequences of the same shard, without outputs, that start from this one's first logits."""

    def ids(self) -> Int32:
        """Prompt and outputs so far: what has to be in the KV cache before the next token is sampled."""
        return np.concatenate([self.shard.prompt, self.outputs]) if len(self.outputs) else self.shard.prompt

    def group(self) -> list[Sequence]:
        """Itself and its siblings."""
        return [self, *self.siblings]


class WaitingQueue:
    """Sequences that wait for a slot: lower priority numbers first, first come first served within one.

    A sequence waits together with its siblings, as one entry. One that is cancelled is dropped when its turn
    comes, or when as many entries have come since the last look as there were then.
    """

    def __init__(self) -> None:
        self._queues: dict[int, deque[Sequence]] = {}
        self._priorities: list[int] = []
        self._room = PRUNE_LEAST
        """Entries that may still be appended before the cancelled ones are looked for."""

    def __len__(self) -> int:
        """Entries, with those that were cancelled and not dropped yet."""
        return sum(map(len, self._queues.values()))

    @property
    def priority(self) -> int:
        """The most urgent that waits, as far as is known without a look at who was cancelled; very high for none."""
        return self._priorities[0] if self._priorities else NOBODY

    def _queue(self, priority: int) -> deque[Sequence]:
        if priority not in self._queues:
            self._queues[priority] = deque()
            heapq.heappush(self._priorities, priority)
        return self._queues[priority]

    def append(self, entry: Sequence) -> None:
        self._room -= 1
        if self._room < 0:
            self._prune()
        self._queue(entry.shard.priority).append(entry)

    def put_back(self, entries: list[Sequence]) -> None:
        """Queue `entries`, in their order, ahead of all others of their priorities."""
        for entry in reversed(entries):
            self._queue(entry.shard.priority).appendleft(entry)

    def pop(self) -> Sequence | None:
        """The next entry, without what was cancelled of it; None where none waits."""
        while self._priorities:
            queue = self._queues[self._priorities[0]]
            entry = queue.popleft() if queue else None
            if entry is None:
                del self._queues[heapq.heappop(self._priorities)]
            elif alive := [s for s in entry.group() if not s.ended]:
                return lead(alive)
        return None

    def _prune(self) -> None:
        for queue in self._queues.values():
            waiting = [entry for entry in queue if not all(s.ended for s in entry.group())]
            queue.clear()
            queue.extend(waiting)
        self._room = max(PRUNE_LEAST, len(self))


def lead(sequences: list[Sequence]) -> Sequence:
    """The first of `sequences`, the others its siblings."""
    first, *rest = sequences
    for each in rest:
        each.siblings = []
    first.siblings = rest
    return first
