"""A stage without a model: it keeps the KV cache as token ids and checks every plan against it.

A token is a function of (seed, sample, position). The cache remembers which id each page position holds, so
that a row which would attend to a wrong, missing or foreign token is noticed.
"""

from __future__ import annotations

import numpy as np

from toka.messages import Plan, StepResult

NO_INTS = np.empty(0, np.int32)
NO_FLOATS = np.empty(0, np.float32)


def draw(seed: int, sample: int, position: int, vocab: int) -> int:
    """The token of output `position`; ids below 4 never come unless the seed asks for early stops."""
    mixed = (seed * 1_000_003 + sample * 10_007 + position * 101 + 12345) * 2_654_435_761 % (1 << 32)
    return int(mixed >> 8) % vocab


def score(place: int, following: int, rank: int = 0) -> float:
    """What is found of the prompt's id `following`, number `place` but one, and of the `rank`-th likely one there."""
    return -following - place / 128 - rank / 4


class NullStage:
    def __init__(self, pages: int, page_size: int, max_seqs: int, max_pages: int, vocab: int) -> None:
        self.page_size, self.vocab = page_size, vocab
        self.cache = np.full((pages, page_size), -1, np.int64)
        self.table = np.full((max_seqs, max_pages), -1, np.int64)
        self.seeds = np.zeros(max_seqs, np.int64)
        self.samples = np.zeros(max_seqs, np.int64)
        self.last = np.full(max_seqs, -1, np.int64)
        self.sampled_in = np.zeros(max_seqs, np.int64)
        """The step that `last` is of."""
        self.logprobs = np.full(max_seqs, -1, np.int64)
        self.computed = 0
        """Tokens run through the model, ..."""
        self.scored = 0
        """... and ids of prompts that got their log-probability."""
        self.history: dict[int, list[int]] = {}
        """Ids in the context of each slot, as the rows gave them."""
        self.expect: dict[tuple[int, int], np.ndarray] = {}
        """Prompts by (seed, sample): what a row's context must be."""

    def run(self, plan: Plan) -> StepResult:
        self.seeds[plan.setup_slots] = plan.setup_seeds
        ints = np.asarray(plan.setup_ints).reshape(-1, 4)
        self.logprobs[plan.setup_slots], self.samples[plan.setup_slots] = ints[:, 2], ints[:, 3]
        self.last[plan.setup_slots] = -1
        pairs = list(zip(plan.table_slots.tolist(), plan.table_indices.tolist()))
        assert len(set(pairs)) == len(pairs), "a page table entry is set twice in a plan"
        self.table[plan.table_slots, plan.table_indices] = plan.table_pages
        copies = np.asarray(plan.copies).reshape(-1, 2)
        assert len(set(copies[:, 1].tolist())) == len(copies), "a page is copied to twice"
        self.cache[copies[:, 1]] = self.cache[copies[:, 0]].copy()
        self._write(plan)
        self._check_contexts(plan)
        self._check_groups(plan)
        self.sampled_in[plan.sample_slots] = plan.step
        tokens = [self._sample(s, p) for s, p in zip(plan.sample_slots.tolist(), plan.sample_positions.tolist())]
        return StepResult(
            step=plan.step,
            busy_us=1,
            tokens=np.array(tokens, np.int32),
            chosen=-plan.sample_positions[self.logprobs[plan.sample_slots] >= 0].astype(np.float32),
            top_ids=NO_INTS,
            top_values=NO_FLOATS,
            **self._scores(plan),
        )

    def _scores(self, plan: Plan) -> dict[str, np.ndarray]:
        chosen: list[float] = []
        top_ids: list[int] = []
        top_values: list[float] = []
        ends = np.cumsum(plan.row_counts)
        for each in plan.scores:
            start, end = ends[each.row] - plan.row_counts[each.row], ends[each.row]
            ids = plan.tokens[start + 1 : end].tolist() + [each.following] * (each.following >= 0)
            self.scored += len(ids)
            for place, following in enumerate(ids, start=int(plan.row_starts[each.row])):
                chosen.append(score(place, following))
                top_ids += [following + rank for rank in range(each.likely)]
                top_values += [score(place, following, rank) for rank in range(each.likely)]
        return {
            "scored": np.array(chosen, np.float32),
            "scored_top_ids": np.array(top_ids, np.int32),
            "scored_top_values": np.array(top_values, np.float32),
        }

    def _sample(self, slot: int, position: int) -> int:
        token = draw(int(self.seeds[slot]), int(self.samples[slot]), position, self.vocab)
        self.last[slot] = token
        return token

    def _write(self, plan: Plan) -> None:
        assert len(set(plan.row_slots.tolist())) == len(plan.row_slots), "a slot has two rows in one step"
        written: set[tuple[int, int]] = set()
        at = 0
        for slot, start, count in zip(plan.row_slots.tolist(), plan.row_starts.tolist(), plan.row_counts.tolist()):
            for position, token in zip(range(start, start + count), plan.tokens[at : at + count].tolist()):
                value = self.last[slot] if token == -1 else token
                assert token != -1 or self.sampled_in[slot] <= plan.after, "a step comes before one that it needs"
                assert value >= 0, "a decode row reads a token that was never sampled"
                page, offset = int(self.table[slot, position // self.page_size]), position % self.page_size
                assert (page, offset) not in written, "two rows write one place"
                written.add((page, offset))
                self.cache[page, offset] = value
            at += count
        self.computed += at

    def context(self, slot: int, length: int) -> list[int]:
        pages = self.table[slot, : -(-length // self.page_size)]
        return self.cache[pages].reshape(-1)[:length].tolist()

    def _check_contexts(self, plan: Plan) -> None:
        for slot, start, count in zip(plan.row_slots.tolist(), plan.row_starts.tolist(), plan.row_counts.tolist()):
            prompt = self.expect[int(self.seeds[slot]), int(self.samples[slot])]
            length = start + count
            have = self.context(slot, length)
            drawn = [
                draw(int(self.seeds[slot]), int(self.samples[slot]), p, self.vocab)
                for p in range(max(0, length - len(prompt)))
            ]
            assert have == [*prompt.tolist(), *drawn][:length], f"slot {slot} attends to a wrong context"

    def _check_groups(self, plan: Plan) -> None:
        page_at = row_at = 0
        seen: set[int] = set()
        for pages, rows in zip(plan.group_page_counts.tolist(), plan.group_row_counts.tolist()):
            prefix = plan.group_pages[page_at : page_at + pages].tolist()
            members = plan.group_rows[row_at : row_at + rows].tolist()
            page_at, row_at = page_at + pages, row_at + rows
            assert len(members) > 1 and not seen & set(members)
            seen |= set(members)
            for row in members:
                assert self.table[plan.row_slots[row], :pages].tolist() == prefix
                assert plan.row_starts[row] >= pages * self.page_size
