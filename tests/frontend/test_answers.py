"""What comes back, whole and streamed, through the openai client's strict validation."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import openai
import pytest

from tests.support.demo import ids_of, peer_text
from tests.support.engine_peer import EnginePeer, logprob_of, script, some_token
from tests.support.frontend_process import FrontendProcess
from toka.messages import Cancel, Release, Submit, Work, decode

CHAT: list[Any] = [{"role": "user", "content": "Hello"}]


def events(response: httpx.Response) -> list[Any]:
    """The data of a stream's events."""
    assert response.status_code == 200, response.text
    blocks = response.text.removesuffix("\n\n").split("\n\n")
    data = [block.removeprefix("data: ") for block in blocks if not block.startswith(":")]
    return [json.loads(each) if each != "[DONE]" else each for each in data]


def text_of(chunks: list[Any], index: int = 0) -> str:
    choices = [choice for chunk in chunks if chunk != "[DONE]" for choice in chunk["choices"]]
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content", "")
        for choice in choices
        if choice["index"] == index
    )


def test_a_completion(sdk: openai.OpenAI, peer: EnginePeer) -> None:
    peer.cached = 1
    answer = sdk.completions.create(model="default", prompt="Hello there", max_tokens=6, n=3, seed=5)
    assert [choice.text for choice in answer.choices] == [peer_text(5, sample, 6) for sample in range(3)]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (2, 18, 20)
    assert answer.usage.prompt_tokens_details.cached_tokens == 1
    assert answer.id.startswith("cmpl-") and answer.object == "text_completion" and answer.system_fingerprint


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("Hello there", [ids_of("Hello there")]),
        (["Hello", "you there"], [ids_of("Hello"), ids_of("you there")]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
def test_every_form_of_prompt(sdk: openai.OpenAI, peer: EnginePeer, prompt: Any, ids: list[list[int]]) -> None:
    answer = sdk.completions.create(model="default", prompt=prompt, max_tokens=2, n=2, seed=1)
    works = [decode(submit.payload) for submit in peer.of(Submit)]
    assert [work.prompt.tolist() for work in works if isinstance(work, Work)] == ids
    assert [choice.index for choice in answer.choices] == list(range(2 * len(ids)))
    assert [choice.text for choice in answer.choices] == [peer_text(1, sample, 2) for sample in (0, 1)] * len(ids)


def test_the_defaults_are_those_of_openai(http: httpx.Client, peer: EnginePeer) -> None:
    http.post("/v1/completions", json={"prompt": "Hello"})
    http.post("/v1/chat/completions", json={"messages": CHAT, "stop_token_ids": [some_token(0, 0, 0)], "seed": 0})
    first, second = [decode(submit.payload) for submit in peer.of(Submit)]
    assert isinstance(first, Work) and isinstance(second, Work)
    params = first.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.logprobs) == (16, 1, 1, 0, -1)
    assert second.params.max_tokens == 6000 - len(second.prompt)
    assert second.prompt.tolist() == ids_of(
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_every_parameter_arrives(http: httpx.Client, peer: EnginePeer) -> None:
    given = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "presence_penalty": 1.5,
        "frequency_penalty": -1.5,
        "repetition_penalty": 1.25,
        "seed": -1,
        "min_tokens": 1,
        "ignore_eos": True,
        "max_tokens": 3,
        "logprobs": 2,
    }
    body = {"prompt": "x", "logit_bias": {"7": -100, "8": 2.5}, "stop_token_ids": [9, 4, 9], "priority": -3}
    http.post("/v1/completions", json=body | given)
    (submit,) = peer.of(Submit)
    assert (submit.priority, submit.sequences, submit.prompt_tokens) == (-3, 1, 1)
    work = decode(submit.payload)
    assert isinstance(work, Work)
    assert {key: getattr(work.params, key) for key in given} == given | {"seed": (1 << 64) - 1}
    assert work.params.logit_bias == {7: -100, 8: 2.5}
    assert work.params.stop_token_ids == [4, 9]


def test_seeds_are_drawn_where_none_is_given(http: httpx.Client, peer: EnginePeer) -> None:
    for _ in range(2):
        http.post("/v1/completions", json={"prompt": ["x", "y"], "max_tokens": 1})
    works = [decode(submit.payload) for submit in peer.of(Submit)]
    assert len({work.params.seed for work in works if isinstance(work, Work)}) == 4


def test_the_fingerprint_is_that_of_model_and_settings(frontend: FrontendProcess, peer: EnginePeer) -> None:
    def fingerprints(url: str) -> set[str]:
        bodies: list[dict[str, Any]] = [{"prompt": "x", "max_tokens": 1, "seed": seed} for seed in (1, 2)]
        return {httpx.post(f"{url}/v1/completions", json=body).json()["system_fingerprint"] for body in bodies}

    (here,) = fingerprints(frontend.url)
    assert re.fullmatch("fp_[0-9a-f]{12}", here)
    for setting, same in (("port=0", True), ("dtype=bfloat16", False), ("served_model_name=other", False)):
        with FrontendProcess(peer.endpoint, setting) as other:
            other.wait_until_serving()
            assert (fingerprints(other.url) == {here}) is same


def test_a_group_of_samples_is_sharded(http: httpx.Client, peer: EnginePeer) -> None:
    answer = http.post("/v1/completions", json={"prompt": "x", "n": 128, "max_tokens": 2, "seed": 3}).json()
    assert [(each.first_sample, each.sequences) for each in peer.of(Submit)] == [(0, 64), (64, 64)]
    assert [choice["text"] for choice in answer["choices"]] == [peer_text(3, sample, 2) for sample in range(128)]
    assert len(peer.wait_for(Release)) == 1 and not peer.of(Cancel)


def test_a_chat(sdk: openai.OpenAI, peer: EnginePeer) -> None:
    peer.token_of = script(ids_of("The capital is Paris 🦜."))
    answer = sdk.chat.completions.create(model="default", messages=CHAT, n=2)
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert [choice.message.content for choice in answer.choices] == ["The capital is Paris 🦜."] * 2
    assert {(choice.finish_reason, choice.message.role) for choice in answer.choices} == {("stop", "assistant")}
    back = [
        *CHAT,
        answer.choices[0].message.model_dump(),
        {"role": "user", "content": [{"type": "text", "text": "ok"}]},
    ]
    sdk.chat.completions.create(model="default", messages=back, max_completion_tokens=1)


def test_a_streamed_chat(sdk: openai.OpenAI, peer: EnginePeer) -> None:
    peer.token_of = script(ids_of("The capital is Paris 🦜."))
    options: Any = {"include_usage": True}
    chunks = list(sdk.chat.completions.create(model="default", messages=CHAT, stream=True, stream_options=options, n=2))
    *parts, usage = chunks
    assert usage.choices == [] and usage.usage is not None
    assert usage.usage.completion_tokens == 2 * (len(ids_of("The capital is Paris 🦜.")) + 1)
    assert len({chunk.id for chunk in chunks}) == 1 and all(chunk.usage is None for chunk in parts)
    for index in (0, 1):
        of_it = [choice for chunk in parts for choice in chunk.choices if choice.index == index]
        assert of_it[0].delta.role == "assistant" and all(each.delta.role is None for each in of_it[1:])
        assert "".join(each.delta.content or "" for each in of_it) == "The capital is Paris 🦜."
        assert [each.finish_reason for each in of_it] == [None] * (len(of_it) - 1) + ["stop"]
        assert all("�" not in (each.delta.content or "") for each in of_it)


async def test_the_asynchronous_client(frontend: FrontendProcess, peer: EnginePeer) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{frontend.url}/v1", api_key="any", max_retries=0, _strict_response_validation=True
    ) as sdk:
        answer = await sdk.completions.create(model="default", prompt="x", max_tokens=3, seed=1)
        assert answer.choices[0].text == peer_text(1, 0, 3)
        text = ""
        async for chunk in await sdk.chat.completions.create(
            model="default", messages=CHAT, max_tokens=3, seed=1, stream=True
        ):
            text += chunk.choices[0].delta.content or ""
        assert text == peer_text(1, 0, 3)
        assert [model.id async for model in sdk.models.list()] == ["SmolLM2-135M-Instruct"]


def test_a_streamed_completion(http: httpx.Client, peer: EnginePeer) -> None:
    """Not through the strict client: its type has no place for the null finish_reason that OpenAI itself sends."""
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 3, "seed": 1, "stream": True}
    chunks = events(http.post("/v1/completions", json=body | {"stream_options": {"include_usage": True}}))
    *parts, usage, done = chunks
    assert done == "[DONE]" and usage["choices"] == []
    assert usage["usage"] | {"prompt_tokens_details": 0} == {
        "prompt_tokens": 2,
        "completion_tokens": 12,
        "total_tokens": 14,
        "prompt_tokens_details": 0,
    }
    assert all(chunk["usage"] is None and chunk["object"] == "text_completion" for chunk in parts)
    assert [text_of(parts, index) for index in range(4)] == [peer_text(1, index % 2, 3) for index in range(4)]
    reasons = [choice["finish_reason"] for chunk in parts for choice in chunk["choices"]]
    assert reasons.count("length") == 4 and set(reasons) == {None, "length"}
    without = events(http.post("/v1/completions", json=body))
    assert all("usage" not in chunk for chunk in without[:-1])


@pytest.mark.parametrize("stream", [False, True])
def test_echo(http: httpx.Client, peer: EnginePeer, stream: bool) -> None:
    def texts(body: dict[str, Any]) -> list[str]:
        response = http.post("/v1/completions", json=body | {"stream": stream, "echo": True, "seed": 1})
        if stream:
            return [text_of(events(response), index) for index in range(len(body["prompt"]))]
        return [choice["text"] for choice in response.json()["choices"]]

    assert texts({"prompt": ["Hello", "World"], "max_tokens": 2}) == [
        "Hello" + peer_text(1, 0, 2),
        "World" + peer_text(1, 0, 2),
    ]
    submitted = len(peer.of(Submit))
    prompt = [ids_of("<|im_start|>Hello"), ids_of("you")]
    assert texts({"prompt": prompt, "max_tokens": 0}) == ["<|im_start|>Hello", "you"]
    assert len(peer.of(Submit)) == submitted, "nothing to generate, nobody to ask"


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(http: httpx.Client, peer: EnginePeer, stream: bool) -> None:
    ids = ids_of("One two three four five")
    peer.token_of, peer.step_seconds = script(ids), 0.01
    body = {"prompt": "x", "max_tokens": 50, "stop": ["three fo", "nothing"], "n": 2, "stream": stream}
    if stream:
        chunks = events(http.post("/v1/completions", json=body | {"stream_options": {"include_usage": True}}))
        text, usage = text_of(chunks), chunks[-2]["usage"]
    else:
        answer = http.post("/v1/completions", json=body).json()
        text, usage = answer["choices"][0]["text"], answer["usage"]
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}
    assert text == "One two "
    assert usage["completion_tokens"] == 2 * len(ids_of("One two three four"))
    assert sorted(cancel.samples[0] for cancel in peer.wait_for(Cancel, 2)) == [0, 1]
    assert len(peer.wait_for(Release)) == 1


def test_logprobs_of_a_completion(sdk: openai.OpenAI, peer: EnginePeer) -> None:
    ids = ids_of("One 🦜 two STOP it")
    peer.token_of = script(ids)
    answer = sdk.completions.create(model="default", prompt="x", echo=False, max_tokens=50, logprobs=2, stop="STOP it")
    choice = answer.choices[0]
    assert choice.text == "One 🦜 two " and choice.logprobs is not None
    kept = ids[: len(ids_of("One 🦜 two "))]
    values = choice.logprobs
    assert values.token_logprobs == [logprob_of(number) for number in kept]
    assert values.tokens is not None and values.text_offset is not None and values.top_logprobs is not None
    assert values.tokens[0] == "One" and any(token.startswith("bytes:") for token in values.tokens)
    assert [len(values.tokens), len(values.text_offset), len(values.top_logprobs)] == [len(kept)] * 3
    for token, offset in zip(values.tokens, values.text_offset):
        assert token.startswith(("bytes:", choice.text[offset:][: len(token)]))
    assert values.top_logprobs[0][values.tokens[0]] == logprob_of(kept[0])


def test_logprobs_of_the_chosen_token_alone(sdk: openai.OpenAI) -> None:
    values = sdk.completions.create(model="default", prompt="x", max_tokens=2, logprobs=0).choices[0].logprobs
    assert values is not None and values.top_logprobs is None and values.token_logprobs is not None
    assert len(values.token_logprobs) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_chat(sdk: openai.OpenAI, peer: EnginePeer, stream: bool) -> None:
    ids = ids_of("One 🦜 two")
    peer.token_of = script(ids)
    args: dict[str, Any] = {"model": "default", "messages": CHAT, "logprobs": True, "top_logprobs": 3}
    entries: list[Any] = []
    if stream:
        for chunk in sdk.chat.completions.create(**args, stream=True):
            values = chunk.choices[0].logprobs
            entries += (values.content or []) if values else []
    else:
        values = sdk.chat.completions.create(**args).choices[0].logprobs
        assert values is not None
        entries = values.content or []
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == "One 🦜 two"
    assert [entry.logprob for entry in entries] == [logprob_of(number) for number in ids]
    assert [len(entry.top_logprobs) for entry in entries] == [3] * len(ids)
    assert entries[0].top_logprobs[0].token == entries[0].token == "One"
