"""Logit bias, banned ids and penalties: what a slot's logits are changed by before a draw.

A slot that has any holds its memory alone, and kernels find it by its address: a captured graph reads whatever the
slots hold when it runs, however long the lists are.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from toka.messages import Plan, SlotExtras
from workers.stage.cuda.inputs import upload

BLOCK = 4096
"""Ids of a program that goes over logits, or over counts."""
ENTRIES = 256
"""Entries of a list that are worked on at once."""
ROWS_AT_ONCE = 16
"""Rows of counts that are allocated together."""

Int64s = NDArray[np.int64]


class Edits:
    """lists, counts: [slots] int64, the addresses of a slot's memory, 0 where it has none.

    A list is int32: how many ids are biased, how many are banned, two numbers without meaning, then the biased ids,
    their biases (float32) and the banned ids. Counts are [vocabulary] int32: twice how often an id was sampled, plus
    one where it is in the prompt.
    """

    def __init__(self, slots: int, vocabulary: int, device: torch.device) -> None:
        self._vocabulary, self._device = vocabulary, device
        self.lists = torch.zeros(slots, dtype=torch.int64, device=device)
        self.counts = torch.zeros(slots, dtype=torch.int64, device=device)
        self._lists: dict[int, Tensor] = {}
        self._counts: dict[int, Tensor] = {}
        self._free: list[Tensor] = []
        # Compiled now, not at the first request.
        self._count([], np.empty(0, np.int64))

    @property
    def most_bytes(self) -> int:
        """What the counts take where every slot is penalised."""
        return len(self.counts) * self._vocabulary * torch.int32.itemsize

    def set_up(self, plan: Plan) -> None:
        """Drop what slots with a new sequence had, and take in their extras."""
        held = self._lists.keys() | self._counts.keys()
        changed = held.intersection(plan.setup_slots.tolist()) if held else set()
        for slot in changed:
            self._lists.pop(slot, None)
            if (counts := self._counts.pop(slot, None)) is not None:
                self._free.append(counts)
        for extras in plan.extras:
            if extras.logit_bias or extras.banned_ids:
                (self._lists[extras.slot],) = upload([_packed(extras)], self._device)
            if extras.penalised:
                self._counts[extras.slot] = self._take_row()
        changed |= {extras.slot for extras in plan.extras}
        if changed:
            slots = np.array(sorted(changed), np.int64)
            addresses = [_addresses(held_by, slots) for held_by in (self._lists, self._counts)]
            where, lists, counts = upload([slots, *addresses], self._device)
            self.lists.index_copy_(0, where, lists)
            self.counts.index_copy_(0, where, counts)
        penalised = [extras for extras in plan.extras if extras.penalised]
        if penalised:
            self._count(penalised, np.array([extras.slot for extras in penalised], np.int64))

    def _take_row(self) -> Tensor:
        if not self._free:
            rows = torch.empty(ROWS_AT_ONCE, self._vocabulary, dtype=torch.int32, device=self._device)
            self._free = list(rows)
        return self._free.pop()

    def _count(self, penalised: list[SlotExtras], slots: Int64s) -> None:
        """Begin the counts of `slots`."""
        ids = [np.frombuffer(extras.prompt, np.int32) for extras in penalised]
        prompts = sum(map(len, ids))
        ids += [np.frombuffer(extras.outputs, np.int32) for extras in penalised]
        owners = np.repeat(np.tile(slots, 2), np.array([len(each) for each in ids], np.int64))
        where, owner, number = upload([slots, owners, np.concatenate([*ids, np.empty(0, np.int32)])], self._device)
        grid = (max(1, len(slots)), triton.cdiv(self._vocabulary, BLOCK))
        _clear[grid](self.counts, where, len(slots), VOCABULARY=self._vocabulary, BLOCK=BLOCK)
        _add[(triton.cdiv(len(owners), ENTRIES) or 1,)](
            self.counts, owner, number, prompts, len(owners), BLOCK=ENTRIES, num_warps=4
        )

    def edited(self, raw: Tensor, slots: Tensor, outputs: Tensor, floats: Tensor, ints: Tensor) -> Tensor:
        """Logits with the slots' edits: [rows, vocabulary] float32.

        raw: [rows, vocabulary]; slots, outputs: [rows] int32, outputs being the numbers of those to be drawn; floats,
        ints: by slot, with the columns of Plan's `setup_*`.
        """
        rows, vocabulary = raw.shape
        x = torch.empty(rows, vocabulary, dtype=torch.float32, device=raw.device)
        _penalise[(rows, triton.cdiv(vocabulary, BLOCK))](
            raw, x, slots, floats, self.counts, VOCABULARY=vocabulary, BLOCK=BLOCK, num_warps=8
        )
        _apply_lists[(rows,)](
            raw, x, slots, outputs, floats, ints, self.lists, self.counts, VOCABULARY=vocabulary, BLOCK=ENTRIES
        )
        return x


def _packed(extras: SlotExtras) -> NDArray[np.int32]:
    bias = extras.logit_bias
    biases = np.fromiter(bias.values(), np.float32, len(bias)).view(np.int32)
    banned = np.array(extras.banned_ids, np.int32)
    header = np.array([len(bias), len(banned), 0, 0], np.int32)
    return np.concatenate([header, np.fromiter(bias, np.int32, len(bias)), biases, banned])


def _addresses(held: dict[int, Tensor], slots: Int64s) -> Int64s:
    return np.array([held[slot].data_ptr() if slot in held else 0 for slot in slots.tolist()], np.int64)


@triton.jit(do_not_specialize=["count"])
def _clear(
    counts: tl.tensor, slots: tl.tensor, count: tl.tensor, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    if tl.program_id(0) < count:
        row = tl.load(counts + tl.load(slots + tl.program_id(0))).to(tl.pointer_type(tl.int32))
        ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        tl.store(row + ids, tl.zeros((BLOCK,), tl.int32), mask=ids < VOCABULARY)


@triton.jit(do_not_specialize=["prompts", "total"])
def _add(
    counts: tl.tensor,
    owners: tl.tensor,
    ids: tl.tensor,
    prompts: tl.tensor,
    total: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Count ids[i] for slot owners[i]: the first `prompts` as ids of prompts, the others as outputs."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = entry < total
    rows = tl.load(counts + tl.load(owners + entry, mask=real, other=0), mask=real, other=0)
    at = rows.to(tl.pointer_type(tl.int32)) + tl.load(ids + entry, mask=real, other=0)
    ones = tl.full((BLOCK,), 1, tl.int32)
    tl.atomic_or(at, ones, mask=entry < prompts)
    tl.atomic_add(at, ones * 2, mask=real & (entry >= prompts))


@triton.jit
def _penalised(
    values: tl.tensor, count: tl.tensor, presence: tl.tensor, frequency: tl.tensor, repetition: tl.tensor
) -> tl.tensor:
    """`Sampler._penalise`."""
    repeated = tl.where(values > 0, tl.div_rn(values, tl.zeros_like(values) + repetition), values * repetition)
    values = tl.where(count > 0, repeated, values)
    return values - frequency * (count >> 1).to(tl.float32) - tl.where(count > 1, presence, 0.0)


@triton.jit
def _penalise(
    raw: tl.tensor,
    x: tl.tensor,
    slots: tl.tensor,
    floats: tl.tensor,
    counts: tl.tensor,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Some logits of a row as float32, with the penalties of its slot."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < VOCABULARY
    values = tl.load(raw + row * VOCABULARY + ids, mask=inside, other=0.0).to(tl.float32)
    address = tl.load(counts + slot)
    if address != 0:
        count = tl.load(address.to(tl.pointer_type(tl.int32)) + ids, mask=inside, other=0)
        own = floats + slot * 6
        values = _penalised(values, count, tl.load(own + 3), tl.load(own + 4), tl.load(own + 5))
    tl.store(x + row * VOCABULARY + ids, values, mask=inside)


@triton.jit
def _apply_lists(
    raw: tl.tensor,
    x: tl.tensor,
    slots: tl.tensor,
    outputs: tl.tensor,
    floats: tl.tensor,
    ints: tl.tensor,
    lists: tl.tensor,
    counts: tl.tensor,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Edit a row where its slot's list says so. Penalties come after a bias: they are taken of the biased logit."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    address = tl.load(lists + slot)
    if address != 0:
        biased_ids = address.to(tl.pointer_type(tl.int32)) + 4
        biased, banned = tl.load(biased_ids - 4), tl.load(biased_ids - 3)
        penalties = tl.load(counts + slot)
        own, raw_row, row_of_x = floats + slot * 6, raw + row * VOCABULARY, x + row * VOCABULARY
        for start in range(0, biased, BLOCK):
            entry = start + tl.arange(0, BLOCK)
            real = entry < biased
            ids = tl.load(biased_ids + entry, mask=real, other=0)
            bias = tl.load(biased_ids + biased + entry, mask=real, other=0).to(tl.float32, bitcast=True)
            values = tl.load(raw_row + ids, mask=real, other=0.0).to(tl.float32) + bias
            if penalties != 0:
                count = tl.load(penalties.to(tl.pointer_type(tl.int32)) + ids, mask=real, other=0)
                values = _penalised(values, count, tl.load(own + 3), tl.load(own + 4), tl.load(own + 5))
            tl.store(row_of_x + ids, values, mask=real)
        # An id may be biased and banned.
        tl.debug_barrier()
        if tl.load(outputs + row) < tl.load(ints + slot * 4 + 1):
            for start in range(0, banned, BLOCK):
                entry = start + tl.arange(0, BLOCK)
                real = entry < banned
                ids = tl.load(biased_ids + 2 * biased + entry, mask=real, other=0)
                tl.store(row_of_x + ids, tl.full((BLOCK,), float("-inf"), tl.float32), mask=real)
