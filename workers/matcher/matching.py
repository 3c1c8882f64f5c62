"""Masks for steps on their way: which ids each constrained sample may be given, once what it follows is known.

The manager tells of a step before it is sampled, and of the next ones before this one is; the last stage tells what
was sampled. Neither waits for the other, so a step is kept until all its sequences have come to where it samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from toka.messages import Constrain, GrammarFailed, Masks, Sampled
from workers.matcher.constraint import Constraint, Phase
from workers.matcher.grammars import Grammars, Words


@dataclass(slots=True, eq=False)
class _Step:
    number: int
    rows: list[Constraint]
    """Its sequences: who comes into their slots later is another."""
    positions: list[int]
    masks: Words | None = None
    unanswered: set[int] = field(default_factory=set)
    """Slots of which the manager was told that they failed, and has not ended them yet."""
    given: bool = False

    @property
    def due(self) -> bool:
        return all(row.have == position for row, position in zip(self.rows, self.positions))


class Matching:
    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._slots: dict[int, Constraint] = {}
        self._steps: dict[int, _Step] = {}
        """By number, from their Constrain until what they sampled has come."""

    @property
    def pending(self) -> bool:
        """Whether masks are owed."""
        return any(not step.given for step in self._steps.values())

    def constrain(self, message: Constrain) -> None:
        matchers = [self._grammars.of(text) for text in message.grammars]
        for setup in message.setups:
            matcher = matchers[setup.grammar].result().deep_copy()
            self._slots[setup.slot] = Constraint(setup, matcher, self._grammars.vocabulary)
        if len(message.slots):
            rows = [self._slots[slot] for slot in message.slots.tolist()]
            self._steps[message.step] = _Step(message.step, rows, message.positions.tolist())

    def sampled(self, message: Sampled) -> None:
        # It follows its masks, which follow their Constrain.
        step = self._steps.pop(message.step)
        for row, token in zip(step.rows, message.tokens.tolist()):
            row.take([token])

    def answered(self, message: GrammarFailed) -> None:
        for step in self._steps.values():
            step.unanswered.discard(message.slot)

    def advance(self) -> list[GrammarFailed | Masks]:
        """What has to be told now: failures, and the masks of steps that are due, unless a failure is unanswered."""
        told: list[GrammarFailed | Masks] = []
        for step in self._steps.values():
            if step.given or not step.due:
                continue
            if step.masks is None:
                step.masks = self._masks(step.rows)
                failed = [row for row in step.rows if row.error and not row.told]
                for row in failed:
                    row.told = True
                    told.append(GrammarFailed(slot=row.slot, reason=row.error))
                step.unanswered = {row.slot for row in failed}
            if not step.unanswered:
                told.append(Masks(step=step.number, bits=step.masks.reshape(-1).view(np.uint8)))
                step.given, step.masks = True, None
        return told

    def _masks(self, rows: list[Constraint]) -> Words:
        within = [(row.matcher, place) for place, row in enumerate(rows) if row.phase == Phase.WITHIN]
        found = self._grammars.vocabulary.masks(within, len(rows))
        return np.stack([row.mask(mask) for row, mask in zip(rows, found)])
