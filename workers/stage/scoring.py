"""Log-probabilities of ids: `likely` of any, and of a prompt's own ids, a portion at a time.

A long prompt has too many logits to hold at once: they exist for as many of its tokens as make a portion, and what is
kept of them is the log-probability of the id that follows each, and the most likely ids with theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from toka.messages import Plan
from workers.stage.batch import Ints
from workers.stage.decoder import Decoder

Int32s = NDArray[np.int32]


class Gathering(Protocol):
    """Ranks that share the vocabulary."""

    @property
    def ranks(self) -> int: ...

    def gather(self, x: Tensor) -> Tensor: ...


def likely(logits: Tensor, ids: Tensor, most: int, first: int, ranks: Gathering) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of `ids`: [rows]; the `most` likely ids, and theirs: [rows, most] each; of raw logits.

    logits: [rows, vocabulary / ranks], this rank's, whose ids begin with `first`. Every rank has the same results.
    """
    if ranks.ranks > 1:
        return _likely_of_ranks(logits, ids, most, first, ranks)
    logprobs = torch.log_softmax(logits, -1, dtype=torch.float32)
    chosen = logprobs.gather(1, ids[:, None])[:, 0]
    if not most:
        return chosen, ids[:, None][:, :0], logprobs[:, :0]
    top = logprobs.topk(most)
    return chosen, top.indices, top.values


def _likely_of_ranks(
    logits: Tensor, ids: Tensor, most: int, first: int, ranks: Gathering
) -> tuple[Tensor, Tensor, Tensor]:
    columns = ids - first
    inside = columns.clamp(0, logits.shape[1] - 1)
    chosen = logits.gather(1, inside[:, None]).masked_fill_((inside != columns)[:, None], float("-inf"))
    top = logits.topk(min(most, logits.shape[1]))
    mine = [logits.float().logsumexp(1, keepdim=True), chosen, top.values, top.indices + first]
    # [rows, ranks, 2 + 2 * top]: float64 holds ids and float32 exactly, so that they travel as one.
    every = ranks.gather(torch.cat([each.double() for each in mine], 1)).transpose(0, 1)
    mass = every[:, :, 0].logsumexp(1)
    values, found = (each.flatten(1) for each in every[:, :, 2:].chunk(2, 2))
    # Stable: of equals the first rank's.
    values, order = values.sort(dim=1, descending=True, stable=True)
    return (
        (every[:, :, 1].amax(1) - mass).float(),
        found.gather(1, order[:, :most]).long(),
        (values[:, :most] - mass[:, None]).float(),
    )


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a plan has scored. All: [ids]."""

    tokens: Ints
    """Behind which of the step's tokens an id follows, ..."""
    ids: Ints
    """... which, ..."""
    likely: Ints
    """... and how many of the most likely ones are named with it."""

    def portions(self, size: int) -> Iterator[Wanted]:
        """Parts of at most `size` ids."""
        for start in range(0, len(self.ids), size):
            part = slice(start, start + size)
            yield Wanted(self.tokens[part], self.ids[part], self.likely[part])


def wanted(plan: Plan, begins: Ints) -> Wanted:
    """begins: [rows], the place of each row's first token among the hidden states."""
    starts = np.cumsum(plan.row_counts) - plan.row_counts
    none = np.empty(0, np.int64)
    tokens, counts = [none], []
    ids: list[NDArray[np.integer]] = [none]
    for each in plan.scores:
        start, count = int(starts[each.row]), int(plan.row_counts[each.row])
        ids.append(plan.tokens[start + 1 : start + count])
        if each.following >= 0:
            ids.append(np.array([each.following]))
        counts.append(count - (each.following < 0))
        tokens.append(begins[each.row] + np.arange(counts[-1]))
    most = np.repeat([each.likely for each in plan.scores], counts)
    return Wanted(np.concatenate(tokens), np.concatenate(ids).astype(np.int64), most.astype(np.int64))


def packed(chosen: Tensor, top_ids: Tensor, top_values: Tensor) -> Tensor:
    """What `likely` gives, in one tensor: [rows, 1 + 2 * most] int32, float32 where log-probabilities stand."""
    return torch.cat([chosen[:, None].view(torch.int32), top_ids.int(), top_values.view(torch.int32)], 1)


@dataclass(frozen=True, slots=True)
class Scored:
    """What a step's result holds of it."""

    chosen: NDArray[np.float32]
    top_ids: Int32s
    top_values: NDArray[np.float32]

    def fields(self) -> dict[str, Any]:
        """As StepResult names them."""
        return {"scored": self.chosen, "scored_top_ids": self.top_ids, "scored_top_values": self.top_values}


def unpacked(portions: list[Int32s], likely: Ints) -> Scored:
    """What the host makes of packed portions, given how many of the most likely each id wants: [ids]."""
    floats, ints = [np.empty(0, np.float32)], [np.empty(0, np.int32)]
    values, at = [np.empty(0, np.float32)], 0
    for portion in portions:
        width = portion.shape[1] // 2
        named = np.arange(width) < likely[at : at + len(portion), None]
        floats.append(portion[:, 0].view(np.float32))
        ints.append(portion[:, 1 : 1 + width][named])
        values.append(portion[:, 1 + width :][named].view(np.float32))
        at += len(portion)
    return Scored(np.concatenate(floats), np.concatenate(ints), np.concatenate(values))


class Scorer:
    """Scores at once, on any device; for the last part of a model."""

    def __init__(self, model: Decoder, first: int, rows: int) -> None:
        """first: of the ids whose logits this rank has; rows: most of a portion."""
        self._model, self._first, self._rows = model, first, rows

    def score(self, plan: Plan, begins: Ints, x: Tensor) -> Scored:
        """x: [tokens, hidden] of the step, not normed; begins: [rows], where each row's tokens begin there."""
        asked, found = wanted(plan, begins), []
        for part in asked.portions(self._rows):
            tokens, ids = (torch.from_numpy(each).to(x.device) for each in (part.tokens, part.ids))
            logits = self._model.logits(self._model.finish(x[tokens]))
            most = int(part.likely.max())
            found.append(packed(*likely(logits, ids, most, self._first, self._model.collective)).cpu().numpy())
        return unpacked(found, asked.likely)
