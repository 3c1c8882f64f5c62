"""What `toka.LLM` gives back, and how it is read from the server's answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Struct

from toka.client import Answer

_NO_IDS = msgspec.Raw(b"[]")


@dataclass(slots=True)
class TokenLogprob:
    token_id: int
    token: str
    logprob: float
    top: dict[str, float]
    """Log-probabilities of the likeliest tokens by their text, where they were asked for."""


@dataclass(slots=True)
class Choice:
    """One sample."""

    text: str
    token_ids: list[int]
    """As they were sampled, those of a stop string and the end-of-sequence id included."""
    finish_reason: str | None
    """`stop`, `length`, or `abort`."""
    logprobs: list[TokenLogprob] | None = None
    """One for each of `token_ids`."""
    reasoning: str | None = None
    """What a model that thinks thought before its answer."""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class Usage:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Tokens of the prompt that were in the prefix cache."""
    completion_tokens: int = 0


@dataclass(slots=True)
class Output:
    """What came of one prompt."""

    index: int
    """The prompt's place among those of the call."""
    prompt: Any
    """As it was given: text, ids, or the messages of a chat."""
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """One for each of `prompt_token_ids`, None for the first, where `logprobs` and `extra_body={"echo": True}` ask."""
    outputs: list[Choice] = field(default_factory=list)
    """The samples, in order."""
    usage: Usage = field(default_factory=Usage)
    error: str | None = None
    """What was wrong with the prompt or its parameters; there are no `outputs` then."""

    @property
    def text(self) -> str:
        """The text of the first sample. ValueError where there is none."""
        if self.error is not None:
            raise ValueError(f"prompt {self.index}: {self.error}")
        return self.outputs[0].text


class GenerationError(ValueError):
    """Some prompts could not be answered. All others were: `outputs` has both, in the order of the prompts."""

    def __init__(self, outputs: Sequence[Output]) -> None:
        self.outputs = list(outputs)
        failed = [each for each in outputs if each.error is not None]
        message = f"prompt {failed[0].index}: {failed[0].error}"
        if len(outputs) > 1:
            message += f" ({len(failed)} of {len(outputs)} prompts failed; .outputs of this error has them all)"
        super().__init__(message)


class _CachedTokens(Struct):
    cached_tokens: int = 0


class _Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _CachedTokens = msgspec.field(default_factory=_CachedTokens)


class _TopLogprob(Struct):
    token: str
    logprob: float


class _ChatToken(_TopLogprob):
    top_logprobs: list[_TopLogprob]


class _Logprobs(Struct):
    """Of a chat `content`, of a completion the rest."""

    content: list[_ChatToken] = []
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class _Message(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class _Choice(Struct):
    finish_reason: str | None
    token_ids: list[int]
    text: str = ""
    message: _Message | None = None
    logprobs: _Logprobs | None = None
    prompt_token_ids: msgspec.Raw = _NO_IDS
    """The same in each choice of a completion: only the first one's are decoded."""


class _Answer(Struct):
    choices: list[_Choice]
    usage: _Usage
    prompt_token_ids: list[int] = []
    """Of a chat."""


class _Said(Struct):
    message: str


class _Refusal(Struct):
    error: _Said


_answers = msgspec.json.Decoder(_Answer)
_refusals = msgspec.json.Decoder(_Refusal)


def fill(output: Output, answer: Answer | Exception) -> Output:
    """Put into `output` what the server said about its prompt, or why it could not be asked."""
    if isinstance(answer, Exception):
        output.error = str(answer)
        return output
    if answer.status != 200:
        output.error = error_of(answer)
        return output
    found = _answers.decode(answer.body)
    output.prompt_token_ids = found.prompt_token_ids or msgspec.json.decode(found.choices[0].prompt_token_ids)
    output.outputs = [_choice(each) for each in found.choices]
    output.prompt_logprobs = _prompt_logprobs(output.prompt_token_ids, found.choices[0])
    usage = found.usage
    output.usage = Usage(usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens, usage.completion_tokens)
    return output


def _choice(found: _Choice) -> Choice:
    message = found.message or _Message(content=found.text)
    return Choice(
        text=message.content or "",
        token_ids=found.token_ids,
        finish_reason=found.finish_reason,
        logprobs=None if found.logprobs is None else _logprobs(found.token_ids, found.logprobs),
        reasoning=message.reasoning_content,
        tool_calls=message.tool_calls or [],
    )


def _logprobs(ids: Sequence[int], found: _Logprobs) -> list[TokenLogprob]:
    if found.tokens:
        # With echo, those of the prompt come first.
        return [each for each in _columns(ids, found, len(found.tokens) - len(ids)) if each is not None]
    return [
        TokenLogprob(token_id, token.token, token.logprob, {top.token: top.logprob for top in token.top_logprobs})
        for token_id, token in zip(ids, found.content, strict=True)
    ]


def _prompt_logprobs(ids: Sequence[int], found: _Choice) -> list[TokenLogprob | None] | None:
    logprobs = found.logprobs
    if logprobs is None or len(logprobs.tokens) <= len(found.token_ids):
        return None
    return _columns(ids, logprobs, 0)


def _columns(ids: Sequence[int], found: _Logprobs, start: int) -> list[TokenLogprob | None]:
    """Those of a completion for `ids`, whose place is `start`; None where there is no log-probability."""
    part = slice(start, start + len(ids))
    tops = (found.top_logprobs or [None] * len(found.tokens))[part]
    columns = zip(ids, found.tokens[part], found.token_logprobs[part], tops, strict=True)
    return [
        None if logprob is None else TokenLogprob(token_id, token, logprob, top or {})
        for token_id, token, logprob, top in columns
    ]


def error_of(answer: Answer) -> str:
    """What an answer that is an error says."""
    try:
        return _refusals.decode(answer.body).error.message
    except msgspec.DecodeError:
        return f"status {answer.status}: {answer.body[:300].decode(errors='replace')}"
