"""The fields of the API that are not about sampling, with the `openai` client against the whole server."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.server import until

IDS = [40, 71, 68, 111, 222, 333, 17, 99]
CHAT: list[Any] = [{"role": "user", "content": "Hello"}]
ENDLESS = {"ignore_eos": True}
ASK: dict[str, Any] = {"model": "default", "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="session")
def tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def test_token_ids_are_the_trajectory(sdk, tokenizer, greedy):
    """A prompt of the first ids goes on as they did: nothing was tokenized again."""
    more = {"return_token_ids": True}
    (choice,) = sdk.completions.create(**ASK, prompt=IDS, logprobs=1, extra_body=more | ENDLESS).model_dump()["choices"]
    assert choice["prompt_token_ids"] == IDS and len(choice["token_ids"]) == 12
    assert tokenizer.decode(choice["token_ids"], skip_special_tokens=True) == choice["text"]
    for number, value in zip(choice["token_ids"], choice["logprobs"]["tokens"], strict=True):
        assert value.startswith("bytes:") or tokenizer.decode([number]) == value
    assert greedy(IDS + choice["token_ids"][:5], 7) == tokenizer.decode(
        choice["token_ids"][5:], skip_special_tokens=True
    )


def test_token_ids_of_chats_streamed_and_not(sdk, tokenizer):
    args = ASK | {"messages": CHAT, "extra_body": {"return_token_ids": True}, "n": 3, "logprobs": True}
    whole = sdk.chat.completions.create(**args).model_dump()
    assert whole["prompt_token_ids"] == tokenizer.apply_chat_template(
        CHAT, add_generation_prompt=True, return_dict=False
    )
    chunks = [chunk.model_dump() for chunk in sdk.chat.completions.create(**args, stream=True)]
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [whole["prompt_token_ids"]] + [None] * (
        len(chunks) - 1
    )
    for index, choice in enumerate(whole["choices"]):
        parts = [each for chunk in chunks for each in chunk["choices"] if each["index"] == index]
        assert [number for part in parts for number in part["token_ids"]] == choice["token_ids"]
        assert len(choice["token_ids"]) == len(choice["logprobs"]["content"])
    assert sum(len(choice["token_ids"]) for choice in whole["choices"]) == whole["usage"]["completion_tokens"]


def test_an_answer_that_was_begun_is_continued(sdk):
    messages = [{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}, *CHAT]
    begun = {"role": "assistant", "content": "Once upon "}
    chat = sdk.chat.completions.create(**ASK, messages=[*messages, begun])
    rendered = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nOnce upon "
    )
    plain = sdk.completions.create(**ASK, prompt=rendered)
    assert chat.choices[0].message.content == plain.choices[0].text
    assert chat.usage.prompt_tokens == plain.usage.prompt_tokens
    more = {"add_generation_prompt": True}
    anew = sdk.chat.completions.create(**ASK, messages=[*messages, begun], extra_body=more)
    assert anew.usage.prompt_tokens > chat.usage.prompt_tokens


def test_what_has_no_effect_and_what_says_how_a_seed_was_served(sdk):
    fields: dict[str, Any] = {
        "user": "u",
        "metadata": {"run": "7"},
        "store": True,
        "service_tier": "flex",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
    }
    args = ASK | {"messages": CHAT, "temperature": 1.5, "seed": 11}
    first, again = sdk.chat.completions.create(**args, **fields), sdk.chat.completions.create(**args)
    assert first.choices[0].message.content == again.choices[0].message.content
    assert first.system_fingerprint == again.system_fingerprint and first.system_fingerprint.startswith("fp_")


def test_a_thousand_samples_of_one_prompt(sdk):
    answer = sdk.completions.create(model="default", prompt=IDS, n=1024, max_tokens=1, seed=1, extra_body=ENDLESS)
    assert [choice.index for choice in answer.choices] == list(range(1024))
    assert len({choice.text for choice in answer.choices}) > 20 and answer.usage.completion_tokens == 1024


@pytest.mark.parametrize("most", [0, 4])
def test_echo(sdk, lenient, tokenizer, most):
    args = ASK | {"max_tokens": most, "echo": True, "n": 2}
    for prompt in ("The old man rowed out", IDS):
        text = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
        whole = sdk.completions.create(**args, prompt=prompt)
        chunks = list(lenient.completions.create(**args, prompt=prompt, stream=True))
        for index, choice in enumerate(whole.choices):
            assert choice.text.startswith(text) and (choice.text == text) is (most == 0)
            parts = [each.text for chunk in chunks for each in chunk.choices if each.index == index]
            assert "".join(parts) == choice.text
        assert whole.usage.completion_tokens == 2 * most


def test_abort_frees_the_sequences(http, lenient):
    stream = lenient.completions.create(model="default", prompt=IDS, max_tokens=3000, stream=True, extra_body=ENDLESS)
    first = next(stream)
    assert http.post("/v1/abort", json={"request_id": first.id}).json() == {"aborted": 1}
    *_, last = stream
    assert last.choices[0].finish_reason == "abort"
    until(lambda: http.get("/health").json()["running"] == 0, 5, "its sequence is freed")
    assert http.post("/v1/abort", json={"request_id": first.id}).status_code == 404


def test_the_tokenizer_is_that_of_transformers(http, tokenizer):
    info = http.get("/tokenizer_info").json()
    assert (info["eos_token"], info["chat_template"]) == (tokenizer.eos_token, tokenizer.chat_template)
    texts = ["Zwölf Boxkämpfer", "今日は 🚀\n\n", "<|im_end|>", ""]
    for text in texts:
        ids = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
        assert ids == tokenizer.encode(text, add_special_tokens=False)
        assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": text}
    assert http.post("/tokenize", json={"texts": texts}).json()["tokens"] == [tokenizer.encode(each) for each in texts]
    ids = np.random.default_rng(5).integers(3, 500, 40).tolist()
    assert http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == tokenizer.decode(ids)
