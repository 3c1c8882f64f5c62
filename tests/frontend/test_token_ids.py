"""`return_token_ids`: the prompt's ids and those of every choice, one to one with the log-probabilities."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.frontend.test_answers import CHAT, events
from tests.support.demo import ids_of
from tests.support.engine_peer import EnginePeer, logprob_of, script, some_token
from toka.messages import Submit, Work, decode

EOS = 2
IDS = {"return_token_ids": True}


def prompt_sent(peer: EnginePeer) -> list[int]:
    work = decode(peer.of(Submit)[-1].payload)
    assert isinstance(work, Work)
    return work.prompt.tolist()  # type: ignore[no-any-return]


def choices_of(chunks: list[Any], index: int) -> list[Any]:
    return [choice for chunk in chunks[:-1] for choice in chunk["choices"] if choice["index"] == index]


def ids_told(choices: list[Any]) -> list[int]:
    return [number for choice in choices for number in choice["token_ids"]]


def test_of_completions(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(
        model="default", prompt=["Hello there", "you"], n=2, max_tokens=3, seed=1, extra_body=IDS
    )
    choices = [choice.model_dump() for choice in answer.choices]
    prompts = [ids_of("Hello there"), ids_of("you")]
    assert [choice["prompt_token_ids"] for choice in choices] == [prompts[0]] * 2 + [prompts[1]] * 2
    assert [choice["token_ids"] for choice in choices] == [
        [some_token(1, sample, position) for position in range(3)] for sample in (0, 1, 0, 1)
    ]


def test_of_streamed_completions(http: httpx.Client) -> None:
    body = {"prompt": ["Hello there", "you"], "max_tokens": 3, "seed": 1, "stream": True, **IDS}
    chunks = events(http.post("/v1/completions", json=body))
    for index, prompt in enumerate(("Hello there", "you")):
        first, *others = choices_of(chunks, index)
        assert first["prompt_token_ids"] == ids_of(prompt)
        assert all("prompt_token_ids" not in choice for choice in others)
        assert ids_told([first, *others]) == [some_token(1, 0, position) for position in range(3)]


@pytest.mark.parametrize("stream", [False, True])
def test_of_chats(sdk: openai.OpenAI, peer: EnginePeer, stream: bool) -> None:
    ids = ids_of("The capital is Paris 🦜.")
    peer.token_of = script(ids, EOS)
    args: dict[str, Any] = {"model": "default", "messages": CHAT, "n": 2, "extra_body": IDS}
    if stream:
        chunks = [chunk.model_dump() for chunk in sdk.chat.completions.create(**args, stream=True)]
        assert chunks[0]["prompt_token_ids"] == prompt_sent(peer)
        assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
        parts = [choices_of([*chunks, None], index) for index in (0, 1)]
        told = [ids_told(each) for each in parts]
    else:
        answer = sdk.chat.completions.create(**args).model_dump()
        assert answer["prompt_token_ids"] == prompt_sent(peer)
        told = [choice["token_ids"] for choice in answer["choices"]]
    assert told == [[*ids, EOS]] * 2, "the id that ended it is part of the trajectory"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("end", ["eos", "stop", "length"])
def test_each_has_its_logprob(http: httpx.Client, peer: EnginePeer, stream: bool, end: str) -> None:
    """Also those that completed a stop string, and the end's: what usage counts."""
    ids = ids_of("One 🦜 two STOP it")
    peer.token_of = script(ids, EOS)
    asked = ids[:4] if end == "length" else ids_of("One 🦜 two STOP") if end == "stop" else [*ids, EOS]
    body = {"max_tokens": 4 if end == "length" else 50, "stop": "STOP" if end == "stop" else None, "stream": stream}
    chat = http.post("/v1/chat/completions", json=body | IDS | {"messages": CHAT, "logprobs": True})
    plain = http.post("/v1/completions", json=body | IDS | {"prompt": "x", "logprobs": 1})
    for response in (chat, plain):
        choices = choices_of(events(response), 0) if stream else response.json()["choices"]
        told = ids_told(choices)
        values = [choice["logprobs"] or {} for choice in choices]
        logprobs = [each["logprob"] for value in values for each in value.get("content", [])]
        logprobs += [each for value in values for each in value.get("token_logprobs", [])]
        assert (told, logprobs) == (asked, [logprob_of(number) for number in asked])
        for choice, value in zip(choices, values):
            entries = value.get("content", value.get("text_offset", []))
            assert len(choice["token_ids"]) == len(entries), "chunk by chunk"


def test_with_nothing_generated(http: httpx.Client) -> None:
    body = {"prompt": "Hello", "echo": True, "max_tokens": 0} | IDS
    (choice,) = http.post("/v1/completions", json=body).json()["choices"]
    assert (choice["text"], choice["prompt_token_ids"], choice["token_ids"]) == ("Hello", ids_of("Hello"), [])


def test_not_where_they_are_not_asked_for(http: httpx.Client) -> None:
    for stream in (True, False):
        body = {"prompt": "x", "max_tokens": 2, "stream": stream}
        assert "token_ids" not in http.post("/v1/completions", json=body).text
