"""The `openai` client and curl against the whole server."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from typing import Any

import numpy as np
import openai
import pytest

from tests.support.needs import needs
from tests.support.server import until
from tests.support.tiny import VOCAB_SIZE

ENDLESS = {"ignore_eos": True}
PROMPT = "The old man rowed out"
IDS = [40, 71, 68, 111, 222, 333, 17, 99]


def random_prompts(count: int, seed: int = 1) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB_SIZE, int(n)).tolist() for n in rng.integers(1, 150, count)]


def test_greedy_text_is_that_of_transformers_streamed_and_not(sdk, lenient, greedy):
    for ids in random_prompts(5):
        whole = sdk.completions.create(model="default", prompt=ids, max_tokens=24, temperature=0)
        stream = lenient.completions.create(model="tiny", prompt=ids, max_tokens=24, temperature=0, stream=True)
        expected = greedy(ids, 24)
        assert whole.choices[0].text == expected
        assert "".join(chunk.choices[0].text for chunk in stream) == expected
        assert whole.usage.prompt_tokens == len(ids)


async def test_32_at_once_are_each_as_alone(server, greedy):
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", timeout=60) as client:

        async def ask(ids: list[int], stream: bool) -> str:
            answer: Any = await client.completions.create(
                model="default", prompt=ids, max_tokens=20, temperature=0, stream=stream
            )
            if not stream:
                return str(answer.choices[0].text)
            return "".join([chunk.choices[0].text async for chunk in answer])

        prompts = random_prompts(32, seed=2)
        texts = await asyncio.gather(*(ask(ids, i % 2 == 0) for i, ids in enumerate(prompts)))
    assert texts == [greedy(ids, 20) for ids in prompts]


def test_chat_streams_with_usage(sdk):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    whole = sdk.chat.completions.create(model="default", messages=messages, max_tokens=16, temperature=0)
    chunks = list(
        sdk.chat.completions.create(
            model="default", messages=messages, max_completion_tokens=16, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], whole.usage.completion_tokens)


def test_responses_say_what_chats_say(sdk):
    fields = {"model": "default", "temperature": 0}
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    chat = sdk.chat.completions.create(messages=messages, max_tokens=16, **fields)
    fields |= {"input": "Hello", "instructions": "Be brief.", "max_output_tokens": 16}
    whole = sdk.responses.create(**fields)
    with sdk.responses.stream(**fields) as stream:
        events = list(stream)
    assert whole.output_text == chat.choices[0].message.content
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text and len(deltas) > 1
    assert whole.usage.output_tokens == events[-1].response.usage.output_tokens == chat.usage.completion_tokens
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 22]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"format": {"type": "json_schema", "name": "a", "schema": schema}}
    assert json.loads(sdk.responses.create(model="default", input="x", text=form).output_text)["a"] in (1, 22)


def test_seed_and_samples(sdk):
    ask = lambda **k: sdk.completions.create(model="default", prompt=PROMPT, max_tokens=12, temperature=1.2, **k)  # noqa: E731
    first, again, other = ask(seed=7, n=5), ask(seed=7, n=5), ask(seed=8, n=5)
    texts = [c.text for c in first.choices]
    assert texts == [c.text for c in again.choices] and texts != [c.text for c in other.choices]
    assert [c.index for c in first.choices] == [0, 1, 2, 3, 4] and len(set(texts)) > 1
    assert first.usage.completion_tokens == 60
    assert ask(seed=7).choices[0].text == texts[0], "a sample does not depend on how many there are"


def test_many_prompts_many_samples(sdk):
    answer = sdk.completions.create(
        model="default",
        prompt=[PROMPT, "Once upon", "x"],
        n=3,
        max_tokens=4,
        temperature=0,
        extra_body=ENDLESS,
    )
    texts = [c.text for c in answer.choices]
    assert len(texts) == 9 and texts[0] == texts[1] == texts[2] and texts[3] == texts[5]
    assert answer.usage.completion_tokens == 36


def test_logprobs_are_those_of_the_tokens(sdk):
    chat = sdk.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=6,
        temperature=0,
        logprobs=True,
        top_logprobs=4,
    )
    content = chat.choices[0].logprobs.content
    assert len(content) == chat.usage.completion_tokens
    for each in content:
        best = max(each.top_logprobs, key=lambda t: t.logprob)
        assert (best.token, best.logprob) == (each.token, each.logprob), "greedy is the most likely"
    plain = sdk.completions.create(model="default", prompt=PROMPT, max_tokens=6, temperature=0, logprobs=2)
    assert len(plain.choices[0].logprobs.token_logprobs) == 6
    assert len(plain.choices[0].logprobs.top_logprobs[0]) == 2


def test_stop_string_cuts_text_and_usage(sdk, lenient):
    whole = sdk.completions.create(model="default", prompt=PROMPT, max_tokens=30, temperature=0, extra_body=ENDLESS)
    text = whole.choices[0].text
    stop = text[10:14]
    cut = sdk.completions.create(
        model="default", prompt=PROMPT, max_tokens=30, temperature=0, stop=stop, extra_body=ENDLESS
    )
    assert cut.choices[0].text == text[: text.index(stop)] and cut.choices[0].finish_reason == "stop"
    assert cut.usage.completion_tokens < 30
    stream = lenient.completions.create(
        model="default",
        prompt=PROMPT,
        max_tokens=30,
        temperature=0,
        stop=stop,
        stream=True,
        extra_body=ENDLESS,
    )
    assert "".join(c.choices[0].text for c in stream) == cut.choices[0].text


def test_options_reach_the_sampler(sdk):
    ask = lambda **k: sdk.completions.create(  # noqa: E731
        model="default", prompt=IDS, max_tokens=12, temperature=0, **k
    )
    plain = ask(logprobs=1)
    first = plain.choices[0].logprobs.tokens[0]
    best = ask(logprobs=0, extra_body={"repetition_penalty": 1.9, "ignore_eos": True}).choices[0].text
    assert best != plain.choices[0].text
    banned = ask(logit_bias={"5": 100}, extra_body=ENDLESS, logprobs=0).choices[0].logprobs.tokens
    assert len(set(banned)) == 1 and banned[0] != first
    only = sdk.completions.create(
        model="default", prompt=IDS, max_tokens=12, temperature=2, extra_body={"top_k": 1, "ignore_eos": True}
    )
    assert only.choices[0].text == ask(extra_body=ENDLESS).choices[0].text
    even = {"stop_token_ids": list(range(0, VOCAB_SIZE, 2)), "ignore_eos": True}
    soon = sdk.completions.create(model="default", prompt=IDS, max_tokens=40, temperature=1, seed=3, extra_body=even)
    later = sdk.completions.create(
        model="default", prompt=IDS, max_tokens=40, temperature=1, seed=3, extra_body={**even, "min_tokens": 9}
    )
    assert soon.choices[0].finish_reason == later.choices[0].finish_reason == "stop"
    assert soon.usage.completion_tokens < 9 < later.usage.completion_tokens


def test_cached_prompts_are_counted(sdk):
    ids = random_prompts(1, seed=77)[0] * 3 + list(range(3, 70))
    first = sdk.completions.create(model="default", prompt=ids, max_tokens=2)
    again = sdk.completions.create(model="default", prompt=ids, max_tokens=2)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert again.usage.prompt_tokens_details.cached_tokens == (len(ids) - 1) // 16 * 16


def test_models(sdk, http):
    assert [m.id for m in sdk.models.list()] == ["tiny"]
    assert sdk.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("gpt-4")


def test_health_asks_the_manager(http):
    health = http.get("/health")
    assert health.status_code == 200 and health.json()["pages"] == 1024
    assert http.get("/ready").status_code == 200


def test_a_client_that_goes_away_frees_its_sequences(http, server):
    def running() -> int:
        state = http.get("/health").json()
        return int(state["running"]) + int(state["waiting"])

    for stream in (True, False):
        body = {"prompt": IDS, "max_tokens": 3000, "ignore_eos": True, "stream": stream}
        process = subprocess.Popen(
            [needs("curl"), "-sN", f"{server.url}/v1/completions", "-d", json.dumps(body)], stdout=subprocess.DEVNULL
        )
        until(lambda: running() == 1, 20, "the request runs")
        process.kill()
        process.wait()
        until(lambda: running() == 0, 5, "its sequence is freed")


def test_a_queued_stream_has_its_headers_at_once_and_pings(http):
    bodies = [{"prompt": IDS, "max_tokens": 2500, "ignore_eos": True, "stream": True, "seed": i} for i in range(18)]
    streams = [http.stream("POST", "/v1/completions", json=body) for body in bodies]
    began = time.monotonic()
    opened = [stream.__enter__() for stream in streams]
    assert all(answer.status_code == 200 for answer in opened) and time.monotonic() - began < 10
    lines = opened[-1].iter_lines()
    assert next(lines) == ": ping", "sixteen run, the others wait"
    for stream in streams:
        stream.__exit__(None, None, None)


def test_bad_requests_leave_the_server_serving(http):
    bad = [
        b"{",
        b"[]",
        b'{"prompt": [99999]}',
        b'{"prompt": [-1]}',
        b'{"prompt": ""}',
        b'{"prompt": "x", "n": 0}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "nonsense": 1}',
        b'{"prompt": "x", "max_tokens": 0}',
        json.dumps({"prompt": [5] * 5000}).encode(),
        b"[" * 100_000,
    ]
    for body in bad:
        answer = http.post("/v1/completions", content=body)
        assert answer.status_code == 400 and answer.json()["error"]["message"], body[:40]
    assert http.post("/v1/completions", json={"prompt": "x", "model": "gpt-4"}).status_code == 404
    long = http.post("/v1/completions", json={"prompt": [5] * 5000}).json()["error"]
    assert "5000" in long["message"] and "4096" in long["message"]
    assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200


def test_more_than_fits_at_once_all_finishes(server):
    """Forty requests whose sum is several times the cache, some of one token."""

    async def all_of_them() -> list[dict[str, Any]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", timeout=120) as client:
            asks = [
                client.completions.create(
                    model="default", prompt=ids * 6, max_tokens=1 if i % 5 == 0 else 60, temperature=0,
                    extra_body=ENDLESS,
                )
                for i, ids in enumerate(random_prompts(40, seed=5))
            ]  # fmt: skip
            return [a.usage.completion_tokens for a in await asyncio.gather(*asks)]

    assert asyncio.run(all_of_them()) == [1 if i % 5 == 0 else 60 for i in range(40)]
