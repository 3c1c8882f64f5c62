from __future__ import annotations

import asyncio

import pytest

from frontend.errors import ApiError
from frontend.jobs import Limits, Planner
from frontend.schema import ChatMessage, ChatRequest
from tests.support.demo import demo_tokenizer
from tests.support.engine_peer import CARD
from toka.text.tokenize import TokenizerPool
from toka.text.vocabulary import Vocabulary


async def test_others_get_their_turn_while_a_long_chat_is_looked_at() -> None:
    tokenizer = demo_tokenizer()
    limits = Limits(max_n=1, max_samples=1, max_logprobs=0, client_chat_template=False)
    planner = Planner(TokenizerPool(tokenizer, None), Vocabulary(tokenizer), limits)
    messages = [ChatMessage(role="user", content="") for _ in range(2000)] + [ChatMessage(role="user")]
    chat, turns = asyncio.create_task(planner.chat(ChatRequest(messages=messages), CARD)), 0
    while not chat.done():
        await asyncio.sleep(0)
        turns += 1
    with pytest.raises(ApiError, match=r"messages\[2000\]"):
        chat.result()
    assert turns > 10
