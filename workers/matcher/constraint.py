"""Where the output of one sequence is in its grammar."""

from __future__ import annotations

import enum

import llguidance
import numpy as np

from toka.messages import GrammarSetup
from workers.matcher.grammars import Vocabulary, Words, why


class Phase(enum.Enum):
    BEFORE = enum.auto()
    """Anything is allowed until the id after which the grammar begins."""
    WITHIN = enum.auto()
    OVER = enum.auto()
    """The output has ended, or the grammar failed: what is sampled now is thrown away, or more of the end."""


class Constraint:
    """`have`: outputs taken in. `error`: why the grammar cannot be followed any further; `told`: to the manager."""

    def __init__(self, setup: GrammarSetup, matcher: llguidance.LLMatcher, vocabulary: Vocabulary) -> None:
        """matcher: this sequence's own."""
        self.slot = setup.slot
        self.matcher = matcher
        self.have = 0
        self.error, self.told = "", False
        self.phase = Phase.WITHIN if setup.grammar_after < 0 else Phase.BEFORE
        self._after = setup.grammar_after
        self._eos, self._end = vocabulary.eos, vocabulary.end
        self._min_tokens = setup.min_tokens
        self._not_banned = ~vocabulary.mask_of(setup.banned_ids)
        self.take(np.frombuffer(setup.outputs, np.int32).tolist())

    def take(self, ids: list[int]) -> None:
        """Go on by what was sampled next."""
        self.have += len(ids)
        if self.phase == Phase.BEFORE and self._after in ids:
            self.phase = Phase.WITHIN
            ids = ids[ids.index(self._after) + 1 :]
        if self.phase != Phase.WITHIN:
            return
        end = next((place for place, number in enumerate(ids) if number in self._eos), len(ids))
        if not self.matcher.consume_tokens(ids[:end]):
            self.fail(why(self.matcher))
        elif end < len(ids):
            self.phase = Phase.OVER

    def fail(self, reason: str) -> None:
        self.error = f"the grammar cannot be followed: {reason}"
        self.phase = Phase.OVER

    def mask(self, found: Words) -> Words:
        """[words]: what the next output may be. found: what its matcher allows, asked if it is WITHIN the grammar."""
        if self.phase == Phase.WITHIN and self.matcher.is_error():
            self.fail(why(self.matcher))
        elif self.phase == Phase.WITHIN and not found.any():
            self.fail("no id of the model is allowed next")
        if self.phase == Phase.OVER:
            return self._end
        if self.phase == Phase.BEFORE:
            found = np.full_like(found, -1)
        return found if self.have >= self._min_tokens else self._without_bans(found)

    def _without_bans(self, found: Words) -> Words:
        """Unless nothing else is left: then the grammar has its way."""
        left = found & self._not_banned
        return left if left.any() else found
