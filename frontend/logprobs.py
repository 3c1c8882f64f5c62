"""Log-probabilities as OpenAI's clients expect them."""

from __future__ import annotations

from typing import Any

from frontend.sample import Piece, TokenLogprob
from toka.text.vocabulary import Vocabulary

LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot hold."""


def chat_logprobs(piece: Piece, vocabulary: Vocabulary) -> dict[str, Any]:
    return {"content": [_chat_token(each, vocabulary) for each in piece.logprobs], "refusal": None}


def completion_logprobs(piece: Piece, vocabulary: Vocabulary, offset: int) -> dict[str, Any]:
    """`offset`: characters that stand before the sample's text."""
    tops = [_by_text(each, vocabulary) for each in piece.logprobs if each.top]
    return {
        "tokens": [token_text(vocabulary[each.token]) for each in piece.logprobs],
        "token_logprobs": [_finite(each.value) for each in piece.logprobs],
        "top_logprobs": tops or None,
        "text_offset": [offset + each for each in piece.offsets],
    }


def token_text(value: bytes) -> str:
    r"""The token's text, or `bytes:\xe2\x82` where it is part of a character."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in value)


def _chat_token(each: TokenLogprob, vocabulary: Vocabulary) -> dict[str, Any]:
    return _entry(each.token, each.value, vocabulary) | {
        "top_logprobs": [_entry(token, value, vocabulary) for token, value in each.top]
    }


def _entry(token: int, value: float, vocabulary: Vocabulary) -> dict[str, Any]:
    stands_for = vocabulary[token]
    return {"token": token_text(stands_for), "logprob": _finite(value), "bytes": list(stands_for)}


def _by_text(each: TokenLogprob, vocabulary: Vocabulary) -> dict[str, float]:
    """The most likely tokens and the chosen one; of several with one text, the likeliest."""
    values: dict[str, float] = {}
    for token, value in [*each.top, (each.token, each.value)]:
        text = token_text(vocabulary[token])
        values[text] = max(values.get(text, LEAST), _finite(value))
    return values


def _finite(value: float) -> float:
    return value if value > LEAST else LEAST
