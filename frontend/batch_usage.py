"""The tokens that a batch's answers have used, as its object sums them up."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from frontend.records import Usage


class _Details(Struct):
    cached_tokens: int = 0


class Tokens(Struct):
    """What an answer says of its usage, on any route."""

    prompt_tokens: int = 0
    input_tokens: int = 0
    completion_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _Details = msgspec.field(default_factory=_Details)
    input_tokens_details: _Details = msgspec.field(default_factory=_Details)


class _Used(Struct):
    usage: Tokens = msgspec.field(default_factory=Tokens)


def tokens_of(body: bytes) -> Tokens:
    """What an answer used; nothing for one that does not say so."""
    try:
        return msgspec.json.decode(body, type=_Used).usage
    except msgspec.DecodeError:
        return Tokens()


def add_usage(usage: Usage, tokens: Tokens) -> None:
    cached = tokens.prompt_tokens_details.cached_tokens + tokens.input_tokens_details.cached_tokens
    usage.input_tokens += tokens.prompt_tokens + tokens.input_tokens
    usage.output_tokens += tokens.completion_tokens + tokens.output_tokens
    usage.input_tokens_details["cached_tokens"] += cached
    usage.total_tokens = usage.input_tokens + usage.output_tokens
