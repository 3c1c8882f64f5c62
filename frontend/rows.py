"""The payload of Outputs, row by row."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from frontend.sample import TokenLogprob
from frontend.scores import ScoreRow
from toka.messages import REQUEST_ID_BYTES, Finish, Frame, Scores, Tokens
from toka.sockets import parse

log = logging.getLogger(__name__)

_FINISH = {int(each): each for each in Finish}


class Row(NamedTuple):
    """A run of one sample's ids, the first at position `first`."""

    request: bytes
    sample: int
    first: int
    ids: list[int]
    finish: Finish
    cached: int
    logprobs: Sequence[TokenLogprob]


def rows(payload: Sequence[Frame]) -> Iterator[Row | ScoreRow]:
    """The rows of an encoded Tokens or Scores; none, logged, where it is neither or its arrays do not fit together."""
    message = parse(payload)
    if isinstance(message, Tokens) and _fits(message):
        yield from _token_rows(message)
    elif isinstance(message, Scores) and _scores_fit(message):
        yield from _score_rows(message)
    else:
        log.warning("message dropped: the payload of Outputs is no Tokens and no Scores")


def _score_rows(scores: Scores) -> Iterator[ScoreRow]:
    place = top = 0
    for row, (first, count, likely) in enumerate(
        zip(scores.first.tolist(), scores.counts.tolist(), scores.logprobs.tolist())
    ):
        key = scores.requests[row * REQUEST_ID_BYTES : (row + 1) * REQUEST_ID_BYTES]
        chosen, tops = slice(place, place + count), slice(top, top + count * likely)
        top_ids = scores.top_ids[tops].reshape(count, likely)
        yield ScoreRow(key, first, scores.chosen[chosen], top_ids, scores.top_values[tops].reshape(count, likely))
        place += count
        top += count * likely


def _scores_fit(scores: Scores) -> bool:
    count = len(scores.first)
    if len(scores.requests) != REQUEST_ID_BYTES * count or not len(scores.counts) == len(scores.logprobs) == count:
        return False
    if any((each < 0).any() for each in (scores.first, scores.counts, scores.logprobs)):
        return False
    likely = int((scores.counts.astype(np.int64) * scores.logprobs).sum())
    return len(scores.chosen) == scores.counts.sum() and len(scores.top_ids) == len(scores.top_values) == likely


def _token_rows(tokens: Tokens) -> Iterator[Row]:
    ids = tokens.tokens.tolist()
    logprobs = _logprob_reader(tokens)
    place = request = 0
    for sample, first, count, finish, cached, top in zip(
        tokens.samples.tolist(),
        tokens.first.tolist(),
        tokens.counts.tolist(),
        tokens.finish.tolist(),
        tokens.cached.tolist(),
        tokens.logprobs.tolist(),
    ):
        key = tokens.requests[request : request + REQUEST_ID_BYTES]
        run = ids[place : place + count]
        values = logprobs(run, top) if top >= 0 else ()
        yield Row(key, sample, first, run, _FINISH[finish], cached, values)
        place += count
        request += REQUEST_ID_BYTES


def _fits(tokens: Tokens) -> bool:
    """Whether the arrays have the lengths and the values that they must."""
    count, top = len(tokens.samples), tokens.logprobs
    columns = (tokens.first, tokens.counts, tokens.finish, tokens.cached, top)
    if len(tokens.requests) != REQUEST_ID_BYTES * count or any(len(column) != count for column in columns):
        return False
    if count and (tokens.counts.min() < 0 or tokens.finish.max() > max(Finish)):
        return False
    chosen = int(tokens.counts[top >= 0].sum())
    likely = int((tokens.counts * np.maximum(top, 0)).sum())
    return (
        len(tokens.tokens) == tokens.counts.sum()
        and len(tokens.chosen) == chosen
        and len(tokens.top_ids) == len(tokens.top_values) == likely
    )


def _logprob_reader(tokens: Tokens) -> Callable[[list[int], int], list[TokenLogprob]]:
    """Reads the next row's log-probabilities, given its ids and how many of the most likely each has."""
    chosen = iter(tokens.chosen.tolist())
    likely = zip(tokens.top_ids.tolist(), tokens.top_values.tolist())

    def read(run: list[int], top: int) -> list[TokenLogprob]:
        return [TokenLogprob(token, next(chosen), [next(likely) for _ in range(top)]) for token in run]

    return read
