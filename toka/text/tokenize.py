"""Text to token ids, on threads: the event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from toka.text.chat import NEW_TURN, ChatTemplate, Message, Rendering

Ids = NDArray[np.int32]
T = TypeVar("T")

TURN_CHARACTERS = 65_536
"""About so much of a request is tokenized before others get their turn: some 20 ms."""


class TokenizerPool:
    """A few threads around one tokenizer, which lets go of the interpreter while it works.

    What is cancelled before its turn is not computed. Work that waits is bounded by whoever submits it.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, threads: int = 0) -> None:
        self.template = template
        self._tokenizer = tokenizer
        self._pool = ThreadPoolExecutor(threads or min(4, os.cpu_count() or 1), "tokenize")
        # A text is one thread's work. The tokenizer's own threads would only compete with the stages.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    async def encode(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[Ids]:
        """The ids of each text."""
        ids: list[Ids] = []
        for turn in _turns(texts):
            ids += await self._run(partial(self._all_ids, turn, add_special_tokens))
        return ids

    async def render_chat(
        self, messages: Sequence[Message], rendering: Rendering = NEW_TURN, source: str | None = None
    ) -> str:
        """A chat as text, by the template `source` where one is given; to be encoded without special tokens, which
        the template writes itself.

        Raises ValueError where there is no template or it refuses the messages.
        """
        template = self.template
        if template is None:
            raise ValueError("the model has no chat template; use /v1/completions")

        def render() -> str:
            chosen = template if source is None else ChatTemplate(source, template.special_tokens)
            return chosen.render(messages, rendering)

        return await self._run(render)

    async def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens written out."""
        return await self._run(lambda: self._tokenizer.decode(ids, skip_special_tokens=False))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _all_ids(self, texts: Sequence[str], add_special_tokens: bool) -> list[Ids]:
        return [self._ids(text, add_special_tokens) for text in texts]

    def _ids(self, text: str, add_special_tokens: bool) -> Ids:
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return np.array(encoding.ids, dtype=np.int32)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


def _turns(texts: Sequence[str]) -> Iterator[list[str]]:
    turn: list[str] = []
    length = 0
    for text in texts:
        turn.append(text)
        length += len(text)
        if length >= TURN_CHARACTERS:
            yield turn
            turn, length = [], 0
    if turn:
        yield turn
