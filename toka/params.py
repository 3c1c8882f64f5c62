"""How to sample, as users of `toka.LLM` say it. (What crosses the wire is `toka.messages.SamplingParams`.)"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The fields of a request, under the names that they have in the API; None: as the API has it by default.

    The server checks the values, against the model too. `extra_body` holds any further field of the API.
    """

    n: int = 1
    """Samples of the prompt."""
    max_tokens: int | None = None
    """16 for `generate`, up to the end of the context for `chat`."""
    min_tokens: int | None = None
    temperature: float | None = None
    """1; 0 is greedy."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool | None = None
    logprobs: int | None = None
    """0: of the sampled tokens; more: of so many of the likeliest as well."""
    priority: int | None = None
    """Lower is sooner."""
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.n, int) or self.n < 1:
            raise ValueError(f"n: expected a whole number of at least 1, got {self.n!r}")
        for name, value in self._given().items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name}: {value} is not a number that JSON has")

    def completion(self, prompt: Any) -> dict[str, Any]:
        """The body of a completion."""
        return {"prompt": prompt, "return_token_ids": True, **self._given(), **self.extra_body}

    def chat(self, messages: Any, more: Mapping[str, Any]) -> dict[str, Any]:
        """The body of a chat; `more` are fields that only a chat has."""
        given = self._given()
        if self.logprobs is not None:
            given |= {"logprobs": True, "top_logprobs": self.logprobs}
        return {"messages": messages, "return_token_ids": True, **given, **more, **self.extra_body}

    def _given(self) -> dict[str, Any]:
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "extra_body"}
        return {name: value for name, value in own.items() if value is not None}
