from __future__ import annotations

import json
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend import parse as parsing
from frontend.errors import ApiError
from frontend.parse import parse
from frontend.schema import CompletionRequest

PAD = " " * parsing.LARGE_BYTES
IDS = st.lists(st.integers(-5, 50_000), max_size=4)
PROMPTS = st.one_of(
    st.lists(IDS, max_size=4),
    IDS,
    st.text(max_size=5),
    st.lists(st.text(max_size=5), max_size=3),
    st.none(),
    st.recursive(st.integers() | st.floats() | st.text(max_size=3), st.lists, max_leaves=6),
)


async def outcome(body: bytes) -> Any:
    try:
        request = await parse(body, CompletionRequest)
    except ApiError as error:
        return error.body
    if isinstance(request.prompt, list):
        request.prompt = [list(each) if isinstance(each, array) else each for each in request.prompt]
    return request


@given(prompt=PROMPTS, indent=st.sampled_from([None, 1]))
async def test_a_large_body_is_parsed_like_a_small_one(prompt: Any, indent: int | None) -> None:
    body = json.dumps({"n": 2, "prompt": prompt, "stop": ["]"]}, indent=indent)
    assert await outcome((body + PAD).encode()) == await outcome(body.encode())


@pytest.mark.parametrize(
    "prompt",
    [
        "[[1] [2]]",
        "[[1],,[2]]",
        "[[1],]",
        "[[1]],",
        "[[1]]]",
        "[[1], 2]",
        "[[1, [2]]]",
        "[,[1]]",
        "[[1]",
        f"[[{1 << 70}]]",
    ],
)
async def test_what_is_malformed_is_refused_at_any_size(prompt: str) -> None:
    small, large = [await outcome((f'{{"prompt": {prompt}}}' + pad).encode()) for pad in ("", PAD)]
    assert small == large


@pytest.mark.parametrize("prompts", [["a"] * 100_000, [[]] * 100_000, [[5]] * 100_000])
async def test_far_too_many_prompts_are_refused_before_they_are_made(prompts: list[Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(parsing, "_lists_of_ids", lambda raw: pytest.fail("made"))
    monkeypatch.setattr(parsing, "_parse", lambda body, kind: pytest.fail("made"))
    with pytest.raises(ApiError, match="100000 prompts") as caught:
        await parse(json.dumps({"prompt": prompts}).encode() + PAD.encode(), CompletionRequest, 99_999)
    assert caught.value.body["error"]["param"] == "prompt"


@given(prompts=st.lists(st.text(st.sampled_from('a"\\,[]'), max_size=4), min_size=1))
def test_prompts_are_never_counted_too_high(prompts: list[str]) -> None:
    assert parsing._prompts_at_least(json.dumps(prompts).encode()) <= len(prompts)
