"""Draws tokens from logits in one pass over them: temperature, noise and the maximum in one kernel.

The noise is that of `workers.stage.noise`, bit for bit. Its logarithms are taken only in blocks of the
vocabulary with an id that can still win: noise is at most the negative logarithm of its uniform number, and
that at most what the bits of the number's float say.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from toka.messages import Plan
from workers.stage import noise
from workers.stage.cuda.inputs import upload
from workers.stage.cuda.ranks import ALONE, Ranks
from workers.stage.layers import Linear
from workers.stage.slots import SAMPLE, TEMPERATURE

LOGITS_BYTES = 512 << 20
"""Logits that exist at one time."""
ROWS = 1
"""Rows of a program. Several would share the vocabulary's half of the noise, and were slower."""
BLOCK = 1024
PROGRAMS = 2048
"""Programs that keep a GPU busy: where there are fewer rows, they share a row's vocabulary."""
MOST_SPLITS = 64


@dataclass(frozen=True, slots=True)
class Best:
    """The best of each of a row's splits, both [rows, splits]."""

    scores: Tensor
    """float32: with noise, and divided by the temperature."""
    ids: Tensor
    """int32."""


class Draw:
    def __init__(self, head: Linear, ids: range, last: Tensor, ranks: Ranks = ALONE) -> None:
        """ids: what head has logits of, each of `ranks` another share; last: [slots] int64, where a slot's token is
        put down."""
        slots, device, vocabulary = len(last), last.device, len(ids)
        self.head, self.ids, self.vocabulary, self.last, self.ranks = head, ids, vocabulary, last, ranks
        self.temperatures = torch.zeros(slots, dtype=torch.float32, device=device)
        self.seeds = torch.zeros(slots, dtype=torch.int64, device=device)
        self.samples = torch.zeros(slots, dtype=torch.int64, device=device)
        self._words = noise.vocabulary(vocabulary, device, ids.start)

    def set_up(self, plan: Plan) -> None:
        """Take in the parameters of slots that have a new sequence."""
        floats, ints = plan.setup_floats.reshape(-1, 6), plan.setup_ints.reshape(-1, 4)
        arrays = (plan.setup_slots.astype(np.int64), floats[:, TEMPERATURE], plan.setup_seeds)
        where, temperatures, seeds, samples = upload([*arrays, ints[:, SAMPLE].astype(np.int64)], self.last.device)
        self.temperatures.index_copy_(0, where, temperatures)
        self.seeds.index_copy_(0, where, seeds)
        self.samples.index_copy_(0, where, samples)

    def draw(self, hidden: Tensor, slots: Tensor, outputs: Tensor, tokens: Tensor) -> None:
        """Draw output outputs[i] of slots[i] from hidden[i], into tokens[i] and `last`.

        hidden: [samples, hidden]; slots, outputs, tokens: [samples] int32.
        """
        # A multiple of 64: kernels are compiled for the alignment of what they are given.
        chunk = max(1, LOGITS_BYTES // (hidden.dtype.itemsize * self.vocabulary) // 64) * 64
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            self._draw(self.head(hidden[part]), slots[part], outputs[part], tokens[part])

    def _draw(self, logits: Tensor, slots: Tensor, outputs: Tensor, tokens: Tensor) -> None:
        groups = triton.cdiv(len(logits), ROWS)
        splits = min(MOST_SPLITS, 1 << max(0, (PROGRAMS // groups).bit_length() - 1))
        best = self.best(logits, slots, outputs, splits)
        if self.ranks.ranks > 1:
            best = self._of_ranks(best)
        splits = best.scores.shape[1]
        _pick[(len(logits),)](best.scores, best.ids, slots, tokens, self.last, SPLITS=splits, num_warps=1)

    def _of_ranks(self, best: Best) -> Best:
        """Those of all ranks side by side, in the order of their ids, filled up to a power of two."""
        ids = best.ids + self.ids.start
        both = self.ranks.gather(torch.stack([best.scores.view(torch.int32), ids])).permute(1, 2, 0, 3).flatten(2)
        width = both.shape[2]
        padding = triton.next_power_of_2(width) - width
        scores = functional.pad(both[0].view(torch.float32), (0, padding), value=float("-inf"))
        return Best(scores.contiguous(), functional.pad(both[1], (0, padding)).contiguous())

    def best(self, logits: Tensor, slots: Tensor, outputs: Tensor, splits: int, least: Tensor | None = None) -> Best:
        """The best ids to draw as output outputs[i] of slots[i] from logits[i]; not those below least[i]: [rows]."""
        rows = len(logits)
        best = torch.empty(rows, splits, dtype=torch.float32, device=logits.device)
        ids = torch.empty(rows, splits, dtype=torch.int32, device=logits.device)
        _draw[(triton.cdiv(rows, ROWS), splits)](
            logits,
            self.temperatures,
            self.seeds,
            self.samples,
            self._words,
            self._words[1],
            slots,
            outputs,
            logits if least is None else least,
            best,
            ids,
            rows,
            VOCABULARY=self.vocabulary,
            ROWS=ROWS,
            BLOCK=BLOCK,
            SPLITS=splits,
            FILTER=least is not None,
            num_warps=4,
        )
        return Best(best, ids)


@triton.jit
def _mix(x: tl.tensor) -> tl.tensor:
    """The finaliser of SplitMix64; `noise._mix`."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _gumbel(bits: tl.tensor) -> tl.tensor:
    """`noise.gumbel`, with the logarithm of 1 - u corrected for the rounding of 1 - u (Kahan)."""
    uniform = ((bits ^ -2147483648).to(tl.uint32, bitcast=True).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    uniform = tl.minimum(uniform, 0.99999994)
    rest = 1.0 - uniform
    exact = rest == 1.0
    rate = tl.where(exact, uniform, -tl.log(rest) * (uniform / tl.where(exact, 1.0, 1.0 - rest)))
    return -tl.log(rate)


@triton.jit
def _draw(
    logits: tl.tensor,
    temperatures: tl.tensor,
    seeds: tl.tensor,
    samples: tl.tensor,
    words: tl.tensor,
    second_words: tl.tensor,
    slots: tl.tensor,
    outputs: tl.tensor,
    least: tl.tensor,
    best_out: tl.tensor,
    ids_out: tl.tensor,
    count: tl.tensor,
    VOCABULARY: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    FILTER: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < count
    slot = tl.load(slots + row, mask=real, other=0)
    temperature = tl.load(temperatures + slot)
    random = temperature > 0
    inverse = 1.0 / tl.where(random, temperature, 1.0)
    slope = tl.where(random, -0.6931471805599453 / (1 << 23), 0.0)
    offset = tl.where(random, 0.6931471805599453 * (127 + 32) + 1e-3, 0.0)
    key = _mix(tl.load(seeds + slot) - 7046029254386353131)
    key = _mix(key + (tl.load(samples + slot) + 1) * -7046029254386353131)
    output = tl.load(outputs + row, mask=real, other=0).to(tl.int64)
    key = _mix(key + (output + 1) * -7046029254386353131)
    first_key, second_key = key.to(tl.int32), ((key >> 32) | 1).to(tl.int32)
    share: tl.constexpr = ((VOCABULARY + SPLITS - 1) // SPLITS + BLOCK - 1) // BLOCK * BLOCK
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    best_id = tl.zeros((ROWS,), tl.int32)
    base = logits + row.to(tl.int64)[:, None] * VOCABULARY
    low = tl.program_id(1) * share
    if FILTER:
        floor = tl.load(least + row, mask=real, other=0.0)
    for start in range(low, tl.minimum(low + share, VOCABULARY), BLOCK):
        ids = start + tl.arange(0, BLOCK)
        inside = ids < VOCABULARY
        x = tl.load(base + ids[None, :], mask=real[:, None] & inside[None, :], other=float("-inf"))
        if FILTER:
            x = tl.where(x >= floor[:, None], x, float("-inf"))
        scores = x.to(tl.float32) * inverse[:, None]
        word, second_word = tl.load(words + ids, mask=inside), tl.load(second_words + ids, mask=inside)
        bits = (word[None, :] ^ first_key[:, None]) * (second_word[None, :] ^ second_key[:, None])
        # A float's bits, read as a number, are a logarithm: too low by 0.09 at most, and exact at powers of two.
        logarithm = (bits ^ -2147483648).to(tl.uint32, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
        bound = tl.max(scores + logarithm.to(tl.float32) * slope[:, None], axis=1) + offset
        if tl.max(tl.where(real & (bound > best), 1, 0), axis=0) > 0:
            noised = scores + tl.where(random[:, None], _gumbel(bits), 0.0)
            most = tl.max(noised, axis=1)
            place = tl.argmax(noised, axis=1)
            better = most > best
            best = tl.where(better, most, best)
            best_id = tl.where(better, start + place, best_id)
    at = row * SPLITS + tl.program_id(1)
    tl.store(best_out + at, best, mask=real)
    tl.store(ids_out + at, best_id, mask=real)


@triton.jit
def _pick(
    best: tl.tensor, ids: tl.tensor, slots: tl.tensor, tokens: tl.tensor, last: tl.tensor, SPLITS: tl.constexpr
) -> None:
    """The best of a row's splits, the first of equals."""
    row, split = tl.program_id(0), tl.arange(0, SPLITS)
    place = tl.argmax(tl.load(best + row * SPLITS + split), axis=0)
    token = tl.load(ids + row * SPLITS + place)
    tl.store(tokens + row, token)
    tl.store(last + tl.load(slots + row), token.to(tl.int64))
