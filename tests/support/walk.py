"""Random walks through what a grammar allows: what a model that knows nothing would write under it."""

from __future__ import annotations

import functools
import random

import llguidance
import numpy as np
from tokenizers import AddedToken, Tokenizer

from tests.support.demo import demo_tokenizer
from toka.model import open_model

EOS = 2
PATIENCE = 30
"""Tokens after which a walk prefers those that end something."""
_ENDS = ('"', "}", "]", '"}', '"]', '",', "},", "],", "1", '":', ":", ",", "\n", "</", "Z")


@functools.cache
def marked_tokenizer() -> Tokenizer:
    """The demo model's, with the tokens that models with tools and thoughts have."""
    tokenizer = open_model("").tokenizer()
    names = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in names])
    tokenizer.add_special_tokens([AddedToken("<|python_tag|>", special=True, normalized=False)])
    return tokenizer


@functools.cache
def matching(marked: bool) -> llguidance.LLTokenizer:
    tokenizer = marked_tokenizer() if marked else demo_tokenizer()
    return llguidance.LLTokenizer(tokenizer.to_str(), n_vocab=tokenizer.get_vocab_size(), eos_token=EOS)


def matcher(grammar: str, marked: bool = False) -> llguidance.LLMatcher:
    found = llguidance.LLMatcher(matching(marked), grammar, log_level=0)
    assert not found.is_error(), found.get_error()
    return found


def accepted(grammar: str, text: str) -> bool:
    """Whether the tokens of `text` are what the grammar allows, all of it."""
    ids = marked_tokenizer().encode(text, add_special_tokens=False).ids
    walking = matcher(grammar, marked=True)
    return walking.try_consume_tokens(ids) == len(ids) and walking.is_accepting()


def walk(grammar: str, chance: random.Random, most: int = 200, marked: bool = False) -> str | None:
    """The text of tokens that were drawn evenly from those allowed; None where it has not ended after `most`."""
    tokenizer = marked_tokenizer() if marked else demo_tokenizer()
    walking, ids, ends = matcher(grammar, marked), list[int](), _ends(marked)
    while len(ids) < most:
        bits = np.frombuffer(walking.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")
        if len(ids) >= PATIENCE:
            if allowed[EOS]:
                break
            preferred = ends[allowed[ends] > 0]
        choice = preferred if len(ids) >= PATIENCE and len(preferred) else np.flatnonzero(allowed)
        token = int(choice[chance.randrange(len(choice))])
        if token == EOS:
            break
        assert walking.consume_token(token), walking.get_error()
        ids.append(token)
        if walking.is_stopped():
            break
    else:
        return None
    return str(tokenizer.decode(ids, skip_special_tokens=False))


@functools.cache
def _ends(marked: bool) -> np.typing.NDArray[np.int64]:
    tokenizer = marked_tokenizer() if marked else demo_tokenizer()
    return np.array([number for text in _ENDS if (number := tokenizer.token_to_id(text)) is not None])
