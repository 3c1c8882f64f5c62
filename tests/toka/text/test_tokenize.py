from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from tests.support.tiny import TEXTS, tiny_config
from toka.model import ModelSource, open_model
from toka.text.chat import ChatTemplate
from toka.text.tokenize import TokenizerPool

CHAT = [{"role": "user", "content": "Hello <|im_end|> 世界"}]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return open_model(str(tiny_config(tmp_path_factory.mktemp("tiny"))))


@pytest.fixture
async def pool(source: ModelSource) -> AsyncIterator[TokenizerPool]:
    template = source.chat_template()
    assert template is not None
    pool = TokenizerPool(source.tokenizer(), ChatTemplate(template, source.special_tokens()), threads=1)
    yield pool
    pool.close()


async def test_ids_equal_those_of_transformers(source: ModelSource, pool: TokenizerPool) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(source.path)
    texts = [*TEXTS, "", " ", "\n\n", "a\u0000b", "<|im_start|>user"]
    for special in (True, False):
        ours = await pool.encode(texts, special)
        assert [ids.tolist() for ids in ours] == [theirs.encode(text, add_special_tokens=special) for text in texts]
    text = await pool.render_chat(CHAT)
    assert text == theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    (ids,) = await pool.encode([text], False)
    assert ids.tolist() == theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)


async def test_ids_give_their_text_back(pool: TokenizerPool) -> None:
    for text, ids in zip(TEXTS, await pool.encode(TEXTS)):
        assert await pool.decode(ids.tolist()) == text


async def test_a_model_without_a_template_has_no_chat(source: ModelSource) -> None:
    with pytest.raises(ValueError, match="no chat template"):
        await TokenizerPool(source.tokenizer(), None, threads=1).render_chat(CHAT)


async def test_the_loop_goes_on_and_others_get_their_turn(pool: TokenizerPool) -> None:
    """Much text does not keep a short one waiting to its end."""
    much = asyncio.create_task(pool.encode(["word " * 10_000] * 60))
    await asyncio.sleep(0.02)
    await pool.encode(["short"])
    assert not much.done()
    assert len(await much) == 60


async def test_what_was_cancelled_is_not_tokenized(pool: TokenizerPool) -> None:
    gate, began = threading.Event(), threading.Event()

    def block() -> None:
        began.set()
        gate.wait(10)

    blocking = asyncio.create_task(pool._run(block))
    assert await asyncio.to_thread(began.wait, 5)
    ran: list[int] = []
    waiting = asyncio.create_task(pool._run(lambda: ran.append(1)))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.sleep(0.01)
    gate.set()
    await blocking
    await pool.encode(["behind it"])
    assert not ran
