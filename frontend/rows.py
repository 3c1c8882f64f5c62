"""The payload of Outputs, row by row."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from frontend.sample import TokenLogprob
from toka.messages import REQUEST_ID_BYTES, Finish, Frame, Tokens
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


def rows(payload: Sequence[Frame]) -> Iterator[Row]:
    """The rows of an encoded Tokens; none, logged, where it is not one or its arrays do not fit together."""
    tokens = parse(payload)
    if not isinstance(tokens, Tokens) or not _fits(tokens):
        log.warning("message dropped: the payload of Outputs is no Tokens")
        return
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
