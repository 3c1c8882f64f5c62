"""From logits to tokens: masks, edits, penalties, temperature, filters, noise; log-probabilities.

What a grammar does not allow is out before all else. Then the order is vLLM's: logit bias and bans,
repetition, frequency and presence penalties, temperature, min-p, top-k, top-p, each filter over what the
one before it left. A filter keeps every id at least as likely as the least likely it has to keep, so that
ties are never cut by accident of order. Log-probabilities are those of the raw logits.

Ranks of tensor parallelism have the logits of a share of the vocabulary each, and never all of one row: what a row
needs of the other ranks' (its greatest values, the sum of its exponentials) is gathered. Their calls are the same,
for what decides about one is the same on all: slots, plans and what was gathered.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.stage import noise
from workers.stage.collective import ALONE, Collective
from workers.stage.masks import Allowed
from workers.stage.scoring import likely
from workers.stage.slots import (
    FREQUENCY,
    LOGPROBS,
    MIN_P,
    MIN_TOKENS,
    PRESENCE,
    REPETITION,
    SAMPLE,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    Slots,
)

CHUNK = 32
"""Samples worked on at once, times the ranks that share them: bounds the float32 copies of logits."""
FIRST_CANDIDATES = 128
"""Ids sorted for top-p at first; many times more where their mass does not suffice."""
MORE_CANDIDATES = 16

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Drawn:
    """tokens: [samples]. The others as in StepResult."""

    tokens: Tensor
    chosen: Tensor
    top_ids: Tensor
    top_values: Tensor


class Sampler:
    def __init__(self, slots: Slots, collective: Collective = ALONE) -> None:
        self.slots = slots
        self.device = slots.device
        self.collective = collective
        self.chunk = CHUNK * collective.ranks
        """Rows of logits that there are float32 copies of at once."""
        self._words = noise.vocabulary(slots.vocabulary, slots.device, slots.first)
        self._ids = range(slots.first, slots.first + slots.vocabulary)

    def sample(self, logits: Tensor, rows: Ints, slots: Ints, positions: Ints, allowed: Allowed | None = None) -> Drawn:
        """Draw output number positions[i] of slots[i] from logits[rows[i]]; rows, slots, positions: [samples].

        logits: [rows, vocabulary], of the slots' ids, not changed. Nothing of the slots is changed either. Every
        rank draws the same. allowed: where any sample is constrained.
        """
        plain = (self.slots.floats[slots, TEMPERATURE] == 0) & ~self._edited(slots)
        if allowed is not None:
            plain &= ~allowed.constrained
        columns = torch.empty(len(rows), dtype=torch.int64, device=self.device)
        scores = torch.empty(len(rows), dtype=torch.float32, device=self.device)
        if plain.any():
            at, of = self._index(np.flatnonzero(plain)), self._index(rows[plain])
            columns[at], scores[at] = (each[of] for each in _greedy(logits))
        others = np.flatnonzero(~plain)
        for part in np.split(others, range(self.chunk, len(others), self.chunk)):
            if len(part):
                at = self._index(part)
                some = allowed and allowed.of(part)
                columns[at], scores[at] = self._draw(logits, rows[part], slots[part], positions[part], some)
        tokens = self._elect(columns, scores)
        return Drawn(tokens, *self._logprobs(logits, rows, slots, tokens))

    def _index(self, values: NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(values.astype(np.int64, copy=False)).to(self.device)

    def _column(self, slots: Ints, column: int) -> Tensor:
        return torch.from_numpy(self.slots.floats[slots, column]).to(self.device)[:, None]

    def _elect(self, columns: Tensor, scores: Tensor) -> Tensor:
        """The ids with the greatest scores of those that the ranks propose, the first of equals: [samples].

        columns: of this rank's logits.
        """
        if self.collective.ranks == 1:
            return columns
        # float64 holds ids and float32 exactly, so that they travel as one.
        proposed = torch.stack([(columns + self.slots.first).double(), scores.double()])
        ids, scores = self.collective.gather(proposed).unbind(1)
        # Ranks are in the order of their ids.
        return ids.gather(0, scores.argmax(0, keepdim=True))[0].long()

    def _draw(
        self, logits: Tensor, rows: Ints, slots: Ints, positions: Ints, allowed: Allowed | None
    ) -> tuple[Tensor, Tensor]:
        """Columns of the logits and their scores: [samples] each."""
        whole = len(rows) == len(logits) and bool((rows == np.arange(len(rows))).all())
        x = logits if whole else logits.index_select(0, self._index(rows))
        if allowed is not None and allowed.constrained.any():
            x, whole = self._masked(x, allowed), False
        floats = self.slots.floats[slots]
        filtered = (floats[:, MIN_P] > 0) | (floats[:, TOP_P] < 1) | (self.slots.ints[slots, TOP_K] > 0)
        edited = self._edited(slots)
        if edited.any() or filtered.any():
            x = x.to(torch.float32, copy=whole)
            self._edit(x, slots, positions)
            self._penalise(x, slots)
        random = floats[:, TEMPERATURE] > 0
        if random.all():
            return self._draw_random(x, slots, positions, filtered)
        columns, scores = _greedy(x)
        if random.any():
            where = self._index(np.flatnonzero(random))
            drawn = self._draw_random(x[where], slots[random], positions[random], filtered[random])
            columns[where], scores[where] = drawn
        return columns, scores

    def _masked(self, x: Tensor, allowed: Allowed) -> Tensor:
        """A copy of x, [samples, vocabulary], without what the constrained samples may not be given."""
        banned = torch.from_numpy(allowed.banned(self._ids)).to(self.device)
        if allowed.constrained.all():
            return x.masked_fill(banned, float("-inf"))
        where = self._index(np.flatnonzero(allowed.constrained))
        return x.index_copy(0, where, x[where].masked_fill_(banned, float("-inf")))

    def _edited(self, slots: Ints) -> NDArray[np.bool_]:
        edited = np.array([slot in self.slots.edits for slot in slots.tolist()], np.bool_)
        edited[self.slots.penalised(slots)] = True
        return edited

    def _edit(self, x: Tensor, slots: Ints, positions: Ints) -> None:
        for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist())):
            edits = self.slots.edits.get(slot)
            if edits is None:
                continue
            x[row, edits.bias_ids] += edits.bias_values
            if position < self.slots.ints[slot, MIN_TOKENS]:
                x[row, edits.banned_ids] = float("-inf")

    def _penalise(self, x: Tensor, slots: Ints) -> None:
        which = self.slots.penalised(slots)
        if not len(which):
            return
        some, where = slots[which], self._index(which)
        in_prompt, outputs = self.slots.counts(some)
        repetition, frequency, presence = (self._column(some, c) for c in (REPETITION, FREQUENCY, PRESENCE))
        values, had = x[where], outputs > 0
        repeated = torch.where(values > 0, values / repetition, values * repetition)
        values = torch.where(in_prompt | had, repeated, values)
        x[where] = values - frequency * outputs - presence * had

    def _draw_random(
        self, x: Tensor, slots: Ints, positions: Ints, filtered: NDArray[np.bool_]
    ) -> tuple[Tensor, Tensor]:
        """x: [samples, vocabulary], float32 where any is filtered, which changes it."""
        temperatures = self._column(slots, TEMPERATURE)
        if filtered.any():
            x = x.div_(temperatures)
            temperatures = torch.ones_like(temperatures)
            where = self._index(np.flatnonzero(filtered))
            values = x[where]
            x[where] = values.masked_fill_(values < self._least(values, slots[filtered]), float("-inf"))
        samples = self.slots.ints[slots, SAMPLE].astype(np.int64)
        keys = noise.row_keys(self._index(self.slots.seeds[slots]), self._index(samples), self._index(positions))
        return noise.draw(x, temperatures[:, 0], keys, self._words)

    def _least(self, x: Tensor, slots: Ints) -> Tensor:
        """The lowest value that min-p, top-k and top-p keep: [samples, 1]. x: scaled logits."""
        floats, top_k = self.slots.floats[slots], self.slots.ints[slots, TOP_K].astype(np.int64)
        top_k[top_k >= x.shape[1] * self.collective.ranks] = 0
        least = x.new_full((len(x),), float("-inf"))
        if floats[:, MIN_P].any():
            with np.errstate(divide="ignore"):
                below = torch.from_numpy(np.log(floats[:, MIN_P])).to(x.device)
            least = self.collective.gather(x.amax(1)).amax(0) + below
        top_p = torch.from_numpy(floats[:, TOP_P]).to(x.device)
        return _least_kept(x, least, self._index(top_k), top_p, self.collective)[:, None]

    def _logprobs(self, logits: Tensor, rows: Ints, slots: Ints, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        wanted = self.slots.ints[slots, LOGPROBS]
        asked = np.flatnonzero(wanted >= 0)
        chosen = [tokens.new_empty(0, dtype=torch.float32)]
        ids, values = [tokens.new_empty(0)], [chosen[0]]
        for part in np.split(asked, range(self.chunk, len(asked), self.chunk)):
            if not len(part):
                continue
            most = int(wanted[part].max())
            picked = logits[self._index(rows[part])], tokens[self._index(part)]
            of_chosen, top_ids, top_values = likely(*picked, most, self.slots.first, self.collective)
            chosen.append(of_chosen)
            for row, count in enumerate(wanted[part].tolist()):
                if count:
                    ids.append(top_ids[row, :count])
                    values.append(top_values[row, :count])
        return torch.cat(chosen), torch.cat(ids), torch.cat(values)


def _greedy(x: Tensor) -> tuple[Tensor, Tensor]:
    """The column with the greatest value of each row, and the value in float32: [rows] each."""
    columns = noise.argmax(x)
    return columns, x.gather(1, columns[:, None])[:, 0].float()


def _greatest(x: Tensor, count: int, collective: Collective) -> Tensor:
    """The `count` greatest values of each row over all ranks, in falling order: [rows, count]."""
    values = x.topk(min(count, x.shape[1])).values
    if collective.ranks == 1:
        return values
    return collective.gather(values).transpose(0, 1).flatten(1).topk(count).values


def _least_kept(x: Tensor, least: Tensor, top_k: Tensor, top_p: Tensor, collective: Collective) -> Tensor:
    """The lowest value that top-k (0: all) and then top-p keep, of those that reach `least` already.

    x: [rows, vocabulary], this rank's; all others and the result, which are of all ranks': [rows].
    """
    limited = torch.nonzero(top_k)[:, 0]
    if len(limited):
        values = _greatest(x[limited], int(top_k.max()), collective)
        kth = values.gather(1, top_k[limited, None] - 1)[:, 0]
        least = least.index_copy(0, limited, torch.maximum(least[limited], kth))
    nucleus = torch.nonzero(top_p < 1)[:, 0]
    if len(nucleus):
        least = least.index_copy(0, nucleus, _nucleus(x[nucleus], least[nucleus], top_p[nucleus], collective))
    return least


def _nucleus(x: Tensor, least: Tensor, top_p: Tensor, collective: Collective) -> Tensor:
    """The lowest value in the smallest set of the most likely ids whose mass is at least top_p.

    Sorting a vocabulary is dear and the set is small as a rule: few ids are sorted first, more where their
    mass falls short.
    """
    mass = collective.gather(x.masked_fill(x < least[:, None], float("-inf")).logsumexp(1, keepdim=True)).logsumexp(0)
    result, pending, count = least.clone(), torch.arange(len(x), device=x.device), FIRST_CANDIDATES
    size = x.shape[1] * collective.ranks
    while len(pending):
        count = min(count, size)
        values, floor = _greatest(x[pending], count, collective), least[pending, None]
        shares = (values - mass[pending]).exp_().masked_fill_(values < floor, 0.0).cumsum_(1)
        place = (shares < top_p[pending, None]).sum(1, keepdim=True)
        found = ((place < count) | (values[:, -1:] < floor))[:, 0] | (count == size)
        lowest = torch.maximum(values.gather(1, place.clamp(max=count - 1)), floor)[:, 0]
        result[pending[found]] = lowest[found]
        pending, count = pending[~found], count * MORE_CANDIDATES
    return result
