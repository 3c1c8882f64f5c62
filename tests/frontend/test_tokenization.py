"""`/tokenizer_info`, `/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.frontend.test_bad_requests import said
from tests.support.demo import ids_of
from tests.support.engine_peer import EnginePeer
from toka.messages import Submit
from toka.model import open_model

TEXTS = ["Hello there", "", "naïve 🦜 <|im_end|>"]


def test_text_to_ids_and_back(http: httpx.Client, peer: EnginePeer) -> None:
    for text in TEXTS:
        answer = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
        assert answer == {"tokens": ids_of(text), "count": len(ids_of(text))}
        assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}
    answer = http.post("/tokenize", json={"texts": TEXTS, "model": "default"}).json()
    assert answer == {"tokens": [ids_of(text) for text in TEXTS], "count": sum(len(ids_of(text)) for text in TEXTS)}
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"texts": TEXTS}
    assert http.post("/tokenize", json={"texts": []}).json() == {"tokens": [], "count": 0}
    assert not peer.of(Submit)


def test_what_the_tokenizer_is(http: httpx.Client) -> None:
    info, source = http.get("/tokenizer_info").json(), open_model("")
    assert info["eos_token"] == "<|im_end|>" and {"bos_token", "pad_token"} < set(info)
    assert (info["chat_template"], info["vocab_size"]) == (source.chat_template(), 49_152)


@pytest.mark.parametrize(
    ("route", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "texts": ["b"]}, 400, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt"),
        ("/tokenize", {"texts": "a"}, 400, "texts"),
        ("/tokenize", {"texts": ["a", 5]}, 400, "texts[1]"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, 400, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "nonsense": 1}, 400, "nonsense"),
        ("/tokenize", {"prompt": "a", "model": "gpt-5"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [49_152]}, 400, "tokens"),
        ("/detokenize", {"tokens": [[5], [49_152]]}, 400, "tokens"),
        ("/detokenize", {"tokens": [5, [5]]}, 400, "tokens"),
        ("/detokenize", {"tokens": [5], "model": "gpt-5"}, 404, "model"),
    ],
)
def test_wrong_requests(http: httpx.Client, route: str, body: dict[str, Any], status: int, param: str) -> None:
    said(http.post(route, json=body), status, param)
