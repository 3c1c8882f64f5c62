"""Log-probabilities as OpenAI's clients expect them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec

from frontend.sample import Piece, TokenLogprob
from frontend.scores import PromptScores
from toka.text.detokenize import detokenizer
from toka.text.vocabulary import Vocabulary

LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot hold."""
VALUES_AT_ONCE = 4096
"""Log-probabilities of a prompt that are encoded before other tasks of the event loop get their turn."""
COLUMNS = "tokens", "token_logprobs", "top_logprobs", "text_offset"
"""Of a completion."""


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


class PromptLogprobs:
    """A completion's logprobs as far as they are of the prompt, as JSON: of a long prompt they are many."""

    def __init__(self, likely: int) -> None:
        self._likely = likely
        self._pieces: dict[str, list[bytes]] = {name: [] for name in COLUMNS}

    def add(self, columns: dict[str, list[Any]]) -> None:
        for name, values in columns.items():
            self._pieces[name].append(_items(values))

    def before(self, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """Joined with those of the completion, of which None has none."""
        joined: dict[str, Any] = {}
        for name in COLUMNS:
            rest = _items((logprobs and logprobs[name]) or [])
            pieces = [piece for piece in (*self._pieces[name], rest) if piece]
            joined[name] = msgspec.Raw(b"[" + b",".join(pieces) + b"]")
        return joined if self._likely else joined | {"top_logprobs": None}


def _items(values: list[Any]) -> bytes:
    return msgspec.json.encode(values)[1:-1]


async def prompt_logprobs(
    scores: PromptScores, ids: Sequence[int], echo: str, vocabulary: Vocabulary
) -> PromptLogprobs:
    """echo: the text of the prompt `ids`. Of its first id there is none, nor of those that have not come."""
    made, offsets = PromptLogprobs(scores.likely), _offsets(ids, echo, vocabulary)
    size = max(1, VALUES_AT_ONCE // (scores.likely + 1))
    for start in range(0, len(ids), size):
        some = ids[start : start + size]
        part = slice(max(0, start - 1), min(start - 1 + len(some), scores.have))
        columns = (each[part].tolist() for each in (scores.chosen, scores.top_ids, scores.top_values))
        of_them = some if start else some[1:]
        known = [TokenLogprob(number, value, list(zip(*top))) for number, value, *top in zip(of_them, *columns)]
        none: list[Any] = [None]
        before, behind = none * (not start), none * (len(of_them) - len(known))
        made.add(
            {
                "tokens": [token_text(vocabulary[number]) for number in some],
                "token_logprobs": [*before, *(_finite(each.value) for each in known), *behind],
                "top_logprobs": [*before, *(_by_text(each, vocabulary) for each in known), *behind],
                "text_offset": list(islice(offsets, len(some))),
            }
        )
        await asyncio.sleep(0)
    return made


def _offsets(ids: Sequence[int], echo: str, vocabulary: Vocabulary) -> Iterator[int]:
    """Where the text of each id begins in the prompt's, which may lack special tokens that the tokenizer added."""
    text, place = detokenizer(vocabulary), 0
    for number in ids:
        yield min(place, len(echo))
        if number in vocabulary.special:
            written = token_text(vocabulary[number])
            place += len(written) if echo.startswith(written, place) else 0
        else:
            place += len(text.feed([number]))


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
