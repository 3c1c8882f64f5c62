"""What stages and matcher have to be told of slots that changed: new sequences, new pages, grammars."""

from __future__ import annotations

from typing import Any

import numpy as np

from toka.messages import Constrain, GrammarSetup, Plan, SlotExtras
from workers.manager.sequences import Sequence
from workers.manager.slots import Slots


def setups(slots: Slots) -> dict[str, Any]:
    """The Plan's fields for slots that have a new sequence."""
    fresh = np.flatnonzero(slots.fresh).astype(np.int32)
    slots.fresh[fresh] = False
    floats = np.empty((len(fresh), 6), np.float32)
    ints = np.empty((len(fresh), 4), np.int32)
    seeds = np.empty(len(fresh), np.uint64)
    extras: list[SlotExtras] = []
    for i, slot in enumerate(fresh.tolist()):
        sequence = slots.sequence[slot]
        assert sequence is not None
        p = sequence.shard.params
        floats[i] = p.temperature, p.top_p, p.min_p, p.presence_penalty, p.frequency_penalty, p.repetition_penalty
        ints[i] = p.top_k, p.min_tokens, p.logprobs, sequence.sample
        seeds[i] = p.seed
        extras += _extras(slot, sequence)
    return {
        "setup_slots": fresh,
        "setup_floats": floats,
        "setup_ints": ints,
        "setup_seeds": seeds.view(np.int64),
        "extras": extras,
    }


def table_changes(slots: Slots) -> dict[str, Any]:
    """The page table entries that the stages do not know yet."""
    changed = np.flatnonzero(slots.num_pages > slots.pages_sent)
    counts = slots.num_pages[changed] - slots.pages_sent[changed]
    at = np.repeat(changed, counts).astype(np.int32)
    within = np.arange(len(at)) - np.repeat(np.cumsum(counts) - counts, counts)
    indices = (slots.pages_sent[at] + within).astype(np.int32)
    slots.pages_sent[changed] = slots.num_pages[changed]
    return {"table_slots": at, "table_indices": indices, "table_pages": slots.table[at, indices]}


def constraint(slots: Slots, plan: Plan) -> Constrain | None:
    """What the matcher has to know of `plan`, which was made last; None where no grammar is concerned."""
    samples = np.flatnonzero(slots.constrained[plan.sample_slots])
    fresh = plan.setup_slots[slots.constrained[plan.setup_slots]]
    if not len(samples) and not len(fresh):
        return None
    numbers: dict[str, int] = {}
    setups = [_grammar_setup(slot, slots.sequence[slot], numbers) for slot in fresh.tolist()]
    return Constrain(
        step=plan.step,
        grammars=list(numbers),
        setups=setups,
        slots=plan.sample_slots[samples],
        positions=plan.sample_positions[samples],
    )


def _grammar_setup(slot: int, sequence: Sequence | None, numbers: dict[str, int]) -> GrammarSetup:
    """numbers: of the grammars of this message, which those of a request's samples share."""
    assert sequence is not None
    params = sequence.shard.params
    return GrammarSetup(
        slot=slot,
        grammar=numbers.setdefault(params.grammar, len(numbers)),
        grammar_after=params.grammar_after,
        banned_ids=sorted(sequence.shard.stop_ids) if params.min_tokens else [],
        min_tokens=params.min_tokens,
        outputs=sequence.outputs.tobytes(),
    )


def _extras(slot: int, sequence: Sequence) -> list[SlotExtras]:
    params, shard = sequence.shard.params, sequence.shard
    constrained = bool(params.grammar)
    # The masks of a grammar have its bans in them: the grammar may allow nothing else.
    banned = sorted(shard.stop_ids) if params.min_tokens and not constrained else []
    if not (params.logit_bias or banned or params.penalised or constrained):
        return []
    return [
        SlotExtras(
            slot=slot,
            logit_bias=params.logit_bias,
            banned_ids=banned,
            penalised=params.penalised,
            prompt=shard.prompt.tobytes() if params.penalised else b"",
            outputs=sequence.outputs.tobytes() if params.penalised else b"",
            constrained=constrained,
        )
    ]
