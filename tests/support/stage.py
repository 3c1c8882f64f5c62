"""Drives a stage's executor as a manager would, without scheduling: rows in a given order, pages at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests.support.plans import Row, Setup, plan
from toka.config import Config
from toka.messages import Plan, StepResult
from workers.stage.build import build
from workers.stage.executor import Executor


@dataclass
class Running:
    """A running sequence: `known` ids of prompt and outputs, `cached` of them in the KV cache."""

    slot: int
    known: list[int]
    prompt: int
    cached: int = 0
    pages: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def outputs(self) -> list[int]:
        return self.known[self.prompt :]


class Driver:
    def __init__(self, executor: Executor, seed: int = 0) -> None:
        self.executor = executor
        self.rng = np.random.default_rng(seed)
        self.free = [int(page) for page in self.rng.permutation(executor.sizes.pages)]
        self.step = 0

    def start(self, prompt: Sequence[int], setup: Setup, outputs: Sequence[int] = ()) -> Running:
        self.run(setups=[setup])
        return Running(setup.slot, [*prompt, *outputs], len(prompt))

    def run(self, **parts: object) -> StepResult:
        self.step += 1
        made: Plan = plan(step=self.step, **parts)  # type: ignore[arg-type]
        result = self.executor.execute(made)
        assert result.step == self.step
        return result

    def advance(self, sequences: Sequence[Running], chunk: int, groups: Sequence[Sequence[int]] = ()) -> None:
        """One step: each sequence's next chunk, or its next token. `groups`: numbers of sequences that share
        the pages their page tables have in common, as far as those are in the cache."""
        rows, table = [], []
        for each in sequences:
            count = min(chunk, len(each.known) - each.cached)
            table += self.cover(each, each.cached + count)
            last = each.cached + count == len(each.known)
            sampled = last and len(each.known) > each.prompt and each.cached == len(each.known) - 1
            ids = [-1] if sampled and each.logprobs else each.known[each.cached : each.cached + count]
            position = len(each.known) - each.prompt
            rows.append(Row(slot=each.slot, start=each.cached, tokens=ids, samples=[(each.slot, position)] * last))
            each.cached += count
        drawn = [each for each, row in zip(sequences, rows) if row.samples]
        named = [(self.shared([sequences[i] for i in group], rows, group), list(group)) for group in groups]
        result = self.run(table=table, rows=rows, groups=[(pages, who) for pages, who in named if pages])
        assert len(result.tokens) == len(drawn)
        chosen = result.chosen if len(result.chosen) == len(drawn) else np.full(len(drawn), np.nan)
        for each, token, logprob in zip(drawn, result.tokens.tolist(), chosen.tolist()):
            each.known.append(token)
            each.logprobs.append(logprob)

    def cover(self, sequence: Running, tokens: int) -> list[tuple[int, int, int]]:
        """Page table entries that the sequence needs for so many tokens."""
        added = []
        while len(sequence.pages) * self.executor.sizes.page_size < tokens:
            sequence.pages.append(self.free.pop())
            added.append((sequence.slot, len(sequence.pages) - 1, sequence.pages[-1]))
        return added

    def adopt(self, sequence: Running, other: Running, pages: int) -> None:
        """Start `sequence` with the first `pages` pages of `other`."""
        sequence.pages = other.pages[:pages]
        sequence.cached = pages * self.executor.sizes.page_size
        self.run(table=[(sequence.slot, i, page) for i, page in enumerate(sequence.pages)])

    def shared(self, members: Sequence[Running], rows: Sequence[Row], numbers: Sequence[int]) -> list[int]:
        size = self.executor.sizes.page_size
        whole = min(rows[i].start // size for i in numbers)
        common = 0
        while common < whole and len({each.pages[common] for each in members}) == 1:
            common += 1
        return members[0].pages[:common]


def generate(
    executor: Executor,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    *,
    chunk: int = 1 << 20,
    stagger: int = 0,
    setups: Sequence[Setup] = (),
) -> list[list[int]]:
    """Outputs of each prompt, in one batch; sequence i joins after i * `stagger` steps."""
    driver = Driver(executor)
    setups = setups or [Setup(slot=i, temperature=0.0) for i in range(len(prompts))]
    waiting = list(zip(prompts, setups))
    running: list[Running] = []
    done: dict[int, list[int]] = {}
    steps = 0
    while waiting or running:
        while waiting and (not stagger or steps >= stagger * (len(prompts) - len(waiting))):
            running.append(driver.start(*waiting.pop(0)))
        if running:
            driver.advance(running, chunk)
        for each in [each for each in running if len(each.outputs) == tokens]:
            running.remove(each)
            driver.free += each.pages
            done[each.slot] = each.outputs
        steps += 1
    return [done[setup.slot] for setup in setups]


def executor_for(model: Path, **settings: object) -> Executor:
    given = {"model": str(model), "dtype": "float32", "kv_cache_tokens": 4096, "max_seqs": 40, "page_size": 8}
    return build(Config(**(given | settings)))  # type: ignore[arg-type]
