"""`echo` with `logprobs`: those of the prompt's tokens, then the completion's, as OpenAI's first API had them."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx
import openai
import pytest

from tests.frontend.test_answers import events
from tests.frontend.test_recovery import works
from tests.support.demo import demo_tokenizer, ids_of, peer_text
from tests.support.engine_peer import EnginePeer, logprob_of, some_token
from tests.support.frontend_process import FrontendProcess
from toka.messages import Resume, Submit

TEXT = "The old man 🦜 rowed out"
BODY: dict[str, Any] = {"prompt": TEXT, "echo": True, "max_tokens": 2, "seed": 1, "logprobs": 2}
COLUMNS = "tokens", "token_logprobs", "top_logprobs", "text_offset"


def post(http: httpx.Client, **fields: Any) -> list[Any]:
    """The choices; those of a stream put together from their chunks."""
    response = http.post("/v1/completions", json=BODY | fields)
    assert response.status_code == 200, response.text
    if not fields.get("stream"):
        return response.json()["choices"]  # type: ignore[no-any-return]
    parts: dict[int, list[Any]] = {}
    for chunk in events(response)[:-1]:
        for choice in chunk["choices"]:
            parts.setdefault(choice["index"], []).append(choice)
    return [joined(parts[index]) for index in sorted(parts)]


def joined(parts: list[Any]) -> Any:
    logprobs = [part["logprobs"] for part in parts if part["logprobs"]]
    columns = {name: [each for part in logprobs for each in part[name] or []] for name in COLUMNS}
    choice = parts[0] | {"text": "".join(part["text"] for part in parts), "logprobs": columns}
    ids = [number for part in parts for number in part.get("token_ids", [])]
    return choice | {"token_ids": ids, "finish_reason": parts[-1]["finish_reason"], "first": parts[0]}


def check(choice: Any, prompt: list[int], sample: int, text: str, tokens: int = 2, likely: int = 2) -> None:
    logprobs, completion = choice["logprobs"], [some_token(1, sample, position) for position in range(tokens)]
    assert choice["text"] == text + peer_text(1, sample, tokens)
    assert logprobs["token_logprobs"] == [None, *(logprob_of(number) for number in [*prompt[1:], *completion])]
    assert [len(logprobs[name]) for name in ("tokens", "text_offset")] == [len(prompt) + tokens] * 2
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"]):
        assert token.startswith("bytes:") or choice["text"].startswith(token, offset)
    assert logprobs["text_offset"][0] == 0 and (not tokens or logprobs["text_offset"][len(prompt)] == len(text))
    if likely:
        tops = logprobs["top_logprobs"]
        assert tops[0] is None and len(tops) == len(prompt) + tokens
        for number, token, top in zip(prompt[1:], logprobs["tokens"][1:], tops[1:]):
            assert top[token] == logprob_of(number) and max(top.values()) == logprob_of(number) / 2
    else:
        assert not logprobs["top_logprobs"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("tokens", "likely"), [(0, 2), (1, 1), (2, 0), (2, 5)])
def test_a_prompt_and_its_samples(http: httpx.Client, peer: EnginePeer, stream: bool, tokens: int, likely: int) -> None:
    peer.chunk = 3
    choices = post(http, max_tokens=tokens, logprobs=likely, n=3, stream=stream)
    assert [choice["finish_reason"] for choice in choices] == ["length"] * 3
    for sample, choice in enumerate(choices):
        check(choice, ids_of(TEXT), sample, TEXT, tokens, likely)
        if stream:
            assert choice["first"]["text"] == TEXT
            assert len(choice["first"]["logprobs"]["tokens"]) == len(ids_of(TEXT))
    (work,) = works(peer)
    assert (work.params.max_tokens, work.params.prompt_logprobs, work.params.logprobs) == (tokens, likely, likely)
    assert work.samples == [0, 1, 2]


def test_the_openai_client(frontend: FrontendProcess) -> None:
    """Not the strict one: its type has no place for the first token's null, which OpenAI itself sends."""
    with openai.OpenAI(base_url=f"{frontend.url}/v1", api_key="any", max_retries=0) as sdk:
        answer = sdk.completions.create(model="default", **BODY)
        check(answer.choices[0].model_dump(), ids_of(TEXT), 0, TEXT)
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids_of(TEXT)), 2)


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_as_ids(http: httpx.Client, stream: bool) -> None:
    prompts = [ids_of("<|im_start|>user\nYou there"), [some_token(7, 0, 3)], ids_of("今日は良い")]
    choices = post(http, prompt=prompts, n=2, stream=stream, return_token_ids=True)
    for index, choice in enumerate(choices):
        prompt = prompts[index // 2]
        check(choice, prompt, index % 2, demo_tokenizer().decode(prompt, skip_special_tokens=False))
        assert choice["prompt_token_ids" if not stream else "index"] == (index if stream else prompt)
        told = [*(choice["first"] if stream else choice)["prompt_token_ids"], *choice["token_ids"]]
        assert len(told) == len(choice["logprobs"]["tokens"]), "one to one"


def test_a_long_prompt(http: httpx.Client, peer: EnginePeer) -> None:
    peer.chunk = 700
    prompt = ids_of(TEXT) * 500
    (choice,) = post(http, prompt=prompt, max_tokens=0, logprobs=20)
    check(choice, prompt, 0, demo_tokenizer().decode(prompt), 0, 20)


def test_a_prompt_of_one_token(http: httpx.Client) -> None:
    (choice,) = post(http, prompt="Hello", max_tokens=0)
    assert choice["logprobs"] == {
        "tokens": ["Hello"], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0],
    }  # fmt: skip


def test_more_than_an_answer_holds(http: httpx.Client, peer: EnginePeer) -> None:
    body = BODY | {"prompt": [5] * 5000, "n": 10, "logprobs": 20}
    error = http.post("/v1/completions", json=body).json()["error"]
    assert error["param"] == "logprobs" and "1050000" in error["message"] and not peer.of(Submit)


@pytest.mark.parametrize("stream", [False, True])
def test_one_shard_has_the_prompt_scored(http: httpx.Client, peer: EnginePeer, stream: bool) -> None:
    choices = post(http, n=70, stream=stream)
    assert [work.params.prompt_logprobs for work in works(peer)] == [2, -1]
    for sample, choice in enumerate(choices):
        check(choice, ids_of(TEXT), sample, TEXT)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", ["drop", "repeat", "lose", "lose late", "all but the end"])
def test_what_is_lost_comes_again_and_once(http: httpx.Client, peer: EnginePeer, stream: bool, fault: str) -> None:
    peer.step_seconds, peer.repeat = 0.3 if fault == "lose" else 0.02, 2 * (fault == "repeat")
    answers: list[list[Any]] = []
    late = threading.Event()

    def token_of(seed: int, sample: int, position: int) -> int:
        if position == 5:
            late.set()
        return some_token(seed, sample, position)

    peer.token_of = token_of
    asking = threading.Thread(target=lambda: answers.append(post(http, n=3, max_tokens=30, stream=stream)))
    if fault == "all but the end":
        peer.chunk, peer.drop = 30, 1
    asking.start()
    peer.wait_for(Submit)
    if fault == "drop":
        peer.drop = 2
    if fault.startswith("lose"):
        if fault == "lose late":
            assert late.wait(10)
        peer.lose_all()
        peer.wait_for(Submit, 2)
        peer.step_seconds = 0.0
    asking.join(20)
    for sample, choice in enumerate(answers[0]):
        check(choice, ids_of(TEXT), sample, TEXT, 30)
    if fault.startswith("lose"):
        second = works(peer)[1]
        assert second.params.prompt_logprobs == (2 if fault == "lose" else -1)
        assert (len(second.outputs) == 0) is (fault == "lose")
    if fault in ("drop", "all but the end"):
        assert peer.of(Resume)


def test_an_abort_gives_what_has_come(http: httpx.Client, peer: EnginePeer) -> None:
    peer.step_seconds = 0.05
    answers: list[list[Any]] = []
    asking = threading.Thread(target=lambda: answers.append(post(http, prompt=[7] * 200, request_id="mine")))
    asking.start()
    peer.wait_for(Submit)
    time.sleep(0.3)
    assert http.post("/v1/abort", json={"request_id": "mine"}).json() == {"aborted": 1}
    asking.join(20)
    ((choice,),) = answers
    values = choice["logprobs"]["token_logprobs"]
    assert choice["finish_reason"] == "abort" and len(values) == len(choice["logprobs"]["tokens"]) == 200
    known = [value for value in values[1:] if value is not None]
    assert 0 < len(known) < 199 and values[1 : 1 + len(known)] == known == [logprob_of(7)] * len(known)
