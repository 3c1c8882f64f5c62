"""The load client's counting, against a server whose answers are known."""

from __future__ import annotations

import itertools
import json

import pytest

from tests.support.canned import Canned, canned_server
from tools.bench.client import (
    Answer,
    LoadError,
    batch_completion,
    completion,
    random_prompts,
    run_round,
    summarise,
    text_completion,
)


def requests(count: int, tokens: int) -> list:
    return [completion("m", prompt, tokens) for prompt in random_prompts(count, 5, "seed")]


@pytest.mark.parametrize("done", [True, False])
def test_counts_usage_and_times(done: bool) -> None:
    with canned_server(Canned(pause=0.01, done=done)) as server:
        measured = run_round(server.url, requests(4, 8))
    assert (measured.prompt_tokens, measured.output_tokens) == (20, 32)
    assert measured.seconds >= 8 * 0.01
    assert measured.tokens_per_second == measured.output_tokens / measured.seconds
    assert 0.01 <= measured.ttft < measured.seconds
    assert 0.005 <= measured.itl < 0.08
    assert server.most_at_once == 4


def test_asks_for_exact_lengths() -> None:
    with canned_server(Canned()) as server:
        run_round(server.url, requests(1, 3))
    (body,) = server.bodies
    assert body["prompt"] == random_prompts(1, 5, "seed")[0]
    assert (body["max_tokens"], body["ignore_eos"], body["stream"]) == (3, True, True)
    assert body["stream_options"] == {"include_usage": True}


def test_a_batch_is_one_request_that_is_not_streamed() -> None:
    batch = batch_completion("m", random_prompts(4, 5, "seed"), 8)
    with canned_server(Canned(pause=0.01)) as server:
        measured = run_round(server.url, [batch])
    assert (measured.prompt_tokens, measured.output_tokens, measured.itl) == (20, 32, 0.0)
    assert measured.seconds >= 0.01
    (body,) = server.bodies
    assert body["prompt"] == random_prompts(4, 5, "seed")
    assert (body["max_tokens"], body["ignore_eos"]) == (8, True)
    with canned_server(Canned(tokens=7)) as server, pytest.raises(LoadError, match="28 tokens came, 32 were asked"):
        run_round(server.url, [batch])


@pytest.mark.parametrize(
    ("canned", "message"),
    [
        (Canned(tokens=7), "7 tokens came, 8 were asked for"),
        (Canned(usage=False), "ended before its usage"),
        (Canned(status=429), "429"),
        (Canned(fail_after=3), "the replica is gone"),
    ],
)
def test_a_server_that_falls_short_gives_no_figure(canned: Canned, message: str) -> None:
    with canned_server(canned) as server, pytest.raises(LoadError, match=message):
        run_round(server.url, requests(2, 8))


def test_no_server_is_a_load_error() -> None:
    with canned_server(Canned()) as server:
        pass
    with pytest.raises(LoadError):
        run_round(server.url, requests(1, 1))


def test_medians() -> None:
    answers = [Answer(0.0, (1.0, 1.1, 1.2), 5, 3), Answer(0.0, (2.0, 2.3), 5, 2), Answer(1.0, (4.0, 4.4), 5, 2)]
    measured = summarise(answers, 4.0)
    assert (measured.prompt_tokens, measured.output_tokens, measured.ttft) == (15, 7, 2.0)
    assert measured.itl == pytest.approx(0.2)
    assert measured.tokens_per_second == 7 / 4


def test_prompts_repeat_for_a_seed_only() -> None:
    prompts = random_prompts(3, 10, "a", prefix=[7, 8])
    assert prompts == random_prompts(3, 10, "a", prefix=[7, 8]) != random_prompts(3, 10, "b", prefix=[7, 8])
    assert all(prompt[:2] == [7, 8] and len(prompt) == 12 for prompt in prompts)
    assert all(one != other for one, other in itertools.combinations(prompts, 2))


def test_text_prompts_cannot_end_early() -> None:
    body = text_completion("m", 64, 16, "a").body
    assert len(body["prompt"].split()) == 64
    assert json.loads(body["generation_config"])["min_new_tokens"] == 16
