"""What a step draws, and how: ordinary samples in one graph, those with options in portions of their own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from toka.messages import Plan, StepResult
from workers.stage.cuda.arrange import Arranged, Int32s, Int64s
from workers.stage.cuda.draw import Draw
from workers.stage.cuda.graphs import Steps
from workers.stage.cuda.ranks import Ranks
from workers.stage.cuda.special import Special, found
from workers.stage.layers import Linear
from workers.stage.masks import Matcher, allowed
from workers.stage.scoring import Scored


@dataclass(frozen=True, slots=True)
class Split:
    """Which of a step's samples are drawn how; `wanted`: log-probabilities of the special ones."""

    plain: Int64s
    special: Int64s
    wanted: Int32s
    width: int
    """Of the special ones' results."""
    constrained: NDArray[np.bool_]
    """[samples]: which wait for masks, all of them special."""


class Sampling:
    def __init__(self, head: Linear, vocabulary: int, last: Tensor, samples: int, itemsize: int, ranks: Ranks) -> None:
        """head: of the ids of this rank; samples: most of a step; itemsize: of the logits."""
        share = vocabulary // ranks.ranks
        self.draw = whole = Draw(head, range(ranks.rank * share, (ranks.rank + 1) * share), last, ranks)
        if ranks.ranks > 1:

            def gathered(x: Tensor) -> Tensor:
                return ranks.gather(head(x)).transpose(0, 1).flatten(1)

            whole = Draw(gathered, range(vocabulary), last)
        self._draws = {id(each): each for each in (self.draw, whole)}.values()
        self.special = Special(whole, itemsize, samples)

    def set_up(self, plan: Plan) -> None:
        if len(plan.setup_slots):
            for draw in self._draws:
                draw.set_up(plan)
            self.special.set_up(plan)

    def split(self, plan: Plan) -> Split:
        among = self.special.among(plan.sample_slots, plan.sample_positions)
        special = np.flatnonzero(among)
        wanted = self.special.wanted(plan.sample_slots[special])
        constrained = self.special.constrained[plan.sample_slots]
        return Split(np.flatnonzero(~among), special, wanted, self.special.width(wanted), constrained)

    def run(self, plan: Plan, arranged: Arranged, split: Split, steps: Steps, matcher: Matcher | None) -> list[Tensor]:
        """The plain samples' ids, where there are any, and results of special ones, portion after portion.

        Waits for the matcher where samples are constrained, behind the launch of all that does not need it.
        """
        results = []
        if len(split.plain):
            steps.draw(steps.sample_size(len(split.plain)))
            # A copy: the next step writes over them, and the next portion over a portion's results.
            results.append(steps.tokens[: len(split.plain)].clone())
        masks = allowed(matcher, plan.step, split.constrained)
        for start in range(0, len(split.special), self.special.rows):
            part = split.special[start : start + self.special.rows]
            named = arranged.sample_tokens[part], plan.sample_slots[part], plan.sample_positions[part]
            self.special.fill(*named, masks and masks.of(part))
            steps.special(self.special.size(len(part)), split.width)
            results.append(self.special.results(len(part), split.width).clone())
        return results


def result(step: int, busy_us: int, split: Split | None, results: list[Int32s], scored: Scored) -> StepResult:
    """What the host makes of a step's results. split: None where nothing was drawn."""
    none = np.empty(0, np.int64)
    split = split or Split(none, none, np.empty(0, np.int32), 0, np.empty(0, np.bool_))
    plain = results[:1] if len(split.plain) else []
    special = found(results[len(plain) :], split.wanted, split.width)
    tokens = np.empty(len(split.plain) + len(split.special), np.int32)
    tokens[split.special] = special.tokens
    if plain:
        tokens[split.plain] = plain[0]
    return StepResult(
        step=step,
        busy_us=busy_us,
        tokens=tokens,
        chosen=special.chosen,
        top_ids=special.top_ids,
        top_values=special.top_values,
        **scored.fields(),
    )
