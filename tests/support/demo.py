"""The demo model's tokenizer, read once."""

from __future__ import annotations

import functools

from tokenizers import Tokenizer

from tests.support.engine_peer import some_token
from toka.model import open_model


@functools.cache
def demo_tokenizer() -> Tokenizer:
    return open_model("").tokenizer()


def ids_of(text: str) -> list[int]:
    return list(demo_tokenizer().encode(text).ids)


def peer_text(seed: int, sample: int, count: int) -> str:
    """The text of a sample's first tokens, as an EnginePeer makes them by default."""
    return str(demo_tokenizer().decode([some_token(seed, sample, position) for position in range(count)]))
