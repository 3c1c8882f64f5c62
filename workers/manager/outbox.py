"""What has to be told to the frontends: token rows and ended sequences, gathered into one message for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from toka.messages import Finish, Frame, Int32, Outputs, Scores, Tokens, encode
from workers.manager.scores import Run
from workers.manager.sequences import Sequence, Shard, TokenLogprobs

NO_FLOATS: NDArray[np.float32] = np.empty(0, np.float32)
NO_INTS: Int32 = np.empty(0, np.int32)
NONE_ENDED: Mapping[tuple[bytes, int], int] = {}


@dataclass(slots=True, eq=False)
class Rows:
    """Token rows for one frontend, as the columns of a Tokens message; see there."""

    requests: NDArray[np.uint8]
    samples: Int32
    first: Int32
    counts: Int32
    finish: NDArray[np.uint8]
    cached: Int32
    logprobs: Int32
    tokens: Int32
    details: list[TokenLogprobs] = field(default_factory=list)
    """One for each token of the rows that asked for log-probabilities, in order."""


class Outbox:
    def __init__(self) -> None:
        self._rows: dict[bytes, list[Rows]] = {}
        self._ended: dict[bytes, Counter[tuple[bytes, int]]] = {}
        self._scores: dict[bytes, dict[tuple[bytes, int, int], tuple[Shard, Run]]] = {}

    def add(self, frontend: bytes, rows: Rows) -> None:
        self._rows.setdefault(frontend, []).append(rows)

    def scored(self, shard: Shard, run: Run) -> None:
        """Log-probabilities of the prompt of `shard`."""
        if len(run.chosen):
            # Once, where several samples' gaps are asked for.
            name = shard.request, shard.first_sample, run.first
            self._scores.setdefault(shard.frontend, {})[name] = shard, run

    def ended(self, shard: Shard) -> None:
        """One sequence of `shard` ended: its credit goes back with the next message."""
        self._ended.setdefault(shard.frontend, Counter())[shard.request, shard.first_sample] += 1

    def resend(self, sequence: Sequence, outputs: Int32, have: int) -> None:
        """Everything of `sequence` from output `have` on, once more."""
        shard = sequence.shard
        tokens = outputs[have:]
        one = np.ones(1, np.int32)
        self.add(
            shard.frontend,
            Rows(
                requests=np.frombuffer(shard.request, np.uint8),
                samples=one * sequence.sample,
                first=one * have,
                counts=one * len(tokens),
                finish=np.full(1, sequence.finish, np.uint8),
                cached=one * max(0, sequence.cached),
                logprobs=one * shard.params.logprobs,
                tokens=tokens,
                # Those of outputs that came with the request are not here, nor asked for.
                details=sequence.logprobs[len(sequence.logprobs) - len(tokens) :],
            ),
        )

    def take(self, epoch: int) -> list[Outputs]:
        """The messages for all that was added; the outbox is empty afterwards.

        One for each frontend, and one before it where prompts were scored.
        """
        messages = [
            _outputs(frontend, epoch, encode(_scores([*runs.values()]))) for frontend, runs in self._scores.items()
        ]
        for frontend in self._rows.keys() | self._ended.keys():
            ended = self._ended.get(frontend, Counter())
            messages.append(_outputs(frontend, epoch, encode(_tokens(self._rows.get(frontend, []))), ended))
        self.clear()
        return messages

    def clear(self) -> None:
        self._rows.clear()
        self._ended.clear()
        self._scores.clear()


def _outputs(
    frontend: bytes, epoch: int, payload: list[Frame], ended: Mapping[tuple[bytes, int], int] = NONE_ENDED
) -> Outputs:
    return Outputs(
        frontend=frontend,
        epoch=epoch,
        finished=[request for request, _ in ended],
        finished_first=[first for _, first in ended],
        finished_sequences=list(ended.values()),
        payload=payload,
    )


def _scores(runs: list[tuple[Shard, Run]]) -> Scores:
    return Scores(
        requests=b"".join(shard.request for shard, _ in runs),
        first=np.array([run.first for _, run in runs], np.int32),
        counts=np.array([len(run.chosen) for _, run in runs], np.int32),
        logprobs=np.array([shard.params.prompt_logprobs for shard, _ in runs], np.int32),
        chosen=np.concatenate([run.chosen for _, run in runs]),
        top_ids=np.concatenate([run.top_ids for _, run in runs]),
        top_values=np.concatenate([run.top_values for _, run in runs]),
    )


def _tokens(rows: list[Rows]) -> Tokens:
    details = [each for r in rows for each in r.details]
    return Tokens(
        requests=b"".join(r.requests.tobytes() for r in rows),
        samples=_join([r.samples for r in rows]),
        first=_join([r.first for r in rows]),
        counts=_join([r.counts for r in rows]),
        finish=np.concatenate([np.empty(0, np.uint8), *(r.finish for r in rows)]),
        cached=_join([r.cached for r in rows]),
        logprobs=_join([r.logprobs for r in rows]),
        tokens=_join([r.tokens for r in rows]),
        chosen=np.array([d.chosen for d in details], np.float32),
        top_ids=_join([d.top_ids for d in details]),
        top_values=np.concatenate([NO_FLOATS, *(d.top_values for d in details)]),
    )


def _join(columns: list[Int32]) -> Int32:
    return np.concatenate([NO_INTS, *columns])


def finish_codes(stop: NDArray[np.bool_], full: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Finish for each row: a stop id on the last allowed token is a stop."""
    return np.where(stop, Finish.STOP, np.where(full, Finish.LENGTH, Finish.NONE)).astype(np.uint8)
