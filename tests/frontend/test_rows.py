from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from frontend.rows import rows
from frontend.sample import TokenLogprob
from toka.messages import Finish, Scores, Tokens, encode

TOKENS = Tokens(
    requests=bytes(16) + bytes([1] * 16) + bytes([2] * 16),
    samples=np.array([0, 5, 1], dtype=np.int32),
    first=np.array([0, 7, 3], dtype=np.int32),
    counts=np.array([2, 1, 0], dtype=np.int32),
    finish=np.array([0, 1, 2], dtype=np.uint8),
    cached=np.array([16, 0, 0], dtype=np.int32),
    logprobs=np.array([-1, 2, 0], dtype=np.int32),
    tokens=np.array([11, 12, 13], dtype=np.int32),
    chosen=np.array([-0.5], dtype=np.float32),
    top_ids=np.array([13, 99], dtype=np.int32),
    top_values=np.array([-0.5, -1.5], dtype=np.float32),
)


def test_rows_are_what_the_arrays_say() -> None:
    first, second, third = rows(encode(TOKENS))
    assert first == (bytes(16), 0, 0, [11, 12], Finish.NONE, 16, ())
    assert second.logprobs == [TokenLogprob(13, -0.5, [(13, -0.5), (99, -1.5)])]
    assert (second.request, second.sample, second.first, second.finish) == (bytes([1] * 16), 5, 7, Finish.STOP)
    assert (third.ids, third.finish, third.logprobs) == ([], Finish.LENGTH, [])


@pytest.mark.parametrize(
    "change",
    [
        {"requests": bytes(47)},
        {"samples": np.array([0], dtype=np.int32)},
        {"counts": np.array([2, 2, 0], dtype=np.int32)},
        {"counts": np.array([4, 1, -2], dtype=np.int32)},
        {"finish": np.array([0, 1, 77], dtype=np.uint8)},
        {"chosen": np.array([], dtype=np.float32)},
        {"top_values": np.array([1], dtype=np.float32)},
    ],
)
def test_arrays_that_do_not_fit_together_are_dropped(change: dict[str, Any]) -> None:
    assert list(rows(encode(dataclasses.replace(TOKENS, **change)))) == []


def test_what_is_no_tokens_is_dropped() -> None:
    assert list(rows([])) == list(rows([b"\x93junk"])) == []


SCORES = Scores(
    requests=bytes(16) + bytes([1] * 16),
    first=np.array([0, 7], dtype=np.int32),
    counts=np.array([2, 1], dtype=np.int32),
    logprobs=np.array([0, 2], dtype=np.int32),
    chosen=np.array([-0.5, -1, -2], dtype=np.float32),
    top_ids=np.array([13, 99], dtype=np.int32),
    top_values=np.array([-0.5, -1.5], dtype=np.float32),
)


def test_rows_of_prompts() -> None:
    first, second = rows(encode(SCORES))
    assert (first.request, first.first, first.chosen.tolist(), first.top_ids.shape) == (
        bytes(16),
        0,
        [-0.5, -1],
        (2, 0),
    )
    assert (second.first, second.chosen.tolist(), second.top_ids.tolist()) == (7, [-2], [[13, 99]])


@pytest.mark.parametrize(
    "change",
    [
        {"requests": bytes(16)},
        {"first": np.array([0, -7], dtype=np.int32)},
        {"counts": np.array([3, 1], dtype=np.int32)},
        {"counts": np.array([4, -1], dtype=np.int32)},
        {"logprobs": np.array([2, -2], dtype=np.int32)},
        {"top_ids": np.array([1], dtype=np.int32)},
    ],
)
def test_arrays_of_prompts_that_do_not_fit_together_are_dropped(change: dict[str, Any]) -> None:
    assert list(rows(encode(dataclasses.replace(SCORES, **change)))) == []
