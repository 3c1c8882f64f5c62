"""The matcher without its process: masks at a call."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from toka.messages import Compile, Compiled, Constrain, GrammarFailed, Int32, Masks, Sampled
from workers.matcher.grammars import Grammars
from workers.matcher.matching import Matching
from workers.stage.masks import Allowed


class LocalMatcher:
    """What the stage and the manager of an `Engine` see of a matcher."""

    def __init__(self, model: str) -> None:
        self._grammars = Grammars(model)
        self.matching = Matching(self._grammars)
        self._masks: dict[int, NDArray[np.uint8]] = {}

    def compile(self, message: Compile) -> Compiled:
        error = self._grammars.of(message.grammar).exception()
        return Compiled(number=message.number, error=str(error or ""))

    def advance(self, constrain: Constrain) -> list[GrammarFailed]:
        """Take in a step; the failures that came to light, which are taken as answered."""
        self.matching.constrain(constrain)
        told = self.matching.advance()
        failed = [each for each in told if isinstance(each, GrammarFailed)]
        for each in failed:
            self.matching.answered(each)
        for each in [*told, *self.matching.advance()]:
            if isinstance(each, Masks):
                self._masks[each.step] = each.bits
        return failed

    def masks(self, step: int) -> NDArray[np.uint8]:
        return self._masks.pop(step)

    def sampled(self, step: int, slots: Int32, tokens: Int32) -> None:
        self.matching.sampled(Sampled(step=step, slots=slots, tokens=tokens))


def some_allowed(samples: int, vocabulary: int, seed: int = 0) -> Allowed:
    """Masks of any ids for about half of the samples: few for some, nearly all for others, one for the first."""
    rng = np.random.default_rng(seed)
    constrained = rng.random(samples) < 0.5
    count = int(constrained.sum())
    bits = rng.random((count, vocabulary)) < rng.choice([0.01, 0.5, 0.99], count)[:, None]
    bits[np.arange(count), rng.integers(0, vocabulary, count)] = True
    bits[0] = np.arange(vocabulary) == vocabulary // 3
    padded = np.pad(bits, ((0, 0), (0, -vocabulary % 32)))
    return Allowed(
        np.where(constrained, np.cumsum(constrained) - 1, -1), np.packbits(padded, axis=1, bitorder="little")
    )


def regex(pattern: str) -> str:
    """The grammar of what matches it."""
    return str(LLMatcher.grammar_from_regex(pattern))


def schema(value: dict[str, Any]) -> str:
    """The grammar of JSON without white space that this JSON schema takes."""
    return str(LLMatcher.grammar_from_json_schema(json.dumps(value), overrides={"whitespace_flexible": False}))


def lark(text: str) -> str:
    return str(LLMatcher.grammar_from_lark(text))
