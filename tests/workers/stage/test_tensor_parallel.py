"""Ranks over gloo, as processes of their own, against one rank that has everything."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.dense_attention import DenseAttention
from tests.support.matching import some_allowed
from tests.support.plans import Setup, plan
from tests.support.tiny import tiny_model
from toka.model import open_model
from workers.stage.collective import ALONE, Collective, Group, join
from workers.stage.decoder import Decoder
from workers.stage.partition import Partition, local, whole
from workers.stage.sampler import Drawn, Sampler
from workers.stage.slots import Slots
from workers.stage.weights import load_weights

RANKS = 4
"""Processes: the models have two KV heads, so that these are held twice."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "shard_size": "100KB"}),
    "qwen2": ("qwen2", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True, "head_dim": 24, "attention_bias": True}),
}
VOCABULARY = 40_000
STEPS = 5
KINDS = [
    Setup(slot=0, logprobs=3),
    Setup(slot=0, temperature=0.0, logprobs=0),
    Setup(slot=0, top_p=0.9),
    Setup(slot=0, top_k=7, top_p=0.8, logprobs=20),
    Setup(slot=0, min_p=0.05, temperature=1.7),
    Setup(slot=0, min_p=0.01, top_k=900, top_p=0.95, temperature=0.8),
    Setup(slot=0, presence=0.5, repetition=1.2, frequency=0.3, prompt=[1, 15_000, 39_999], outputs=[4, 30_000, 4]),
    Setup(slot=0, temperature=0.0, repetition=3.0, prompt=range(0, VOCABULARY, 3), outputs=range(999)),
    Setup(slot=0, bias={11: 9.0, 25_000: 9.5}, banned=[25_000, 12], min_tokens=3, logprobs=1),
    Setup(slot=0, temperature=0.0, bias={39_000: 99.0, 12_000: 99.0}, banned=[39_000, 12_000], min_tokens=2),
    Setup(slot=0, top_k=21_000, temperature=2.0),
]
SETUPS = [replace(KINDS[i % len(KINDS)], slot=i, seed=i, sample=i // 7) for i in range(77)]


def logits_of_step(step: int) -> torch.Tensor:
    """A row for each slot: some flat, so that top-p reaches far, and some with many equals."""
    x = torch.randn(len(SETUPS), VOCABULARY, generator=torch.Generator().manual_seed(step)) * 2
    x[::5] *= 0.02
    unasked = [setup.slot for setup in SETUPS if setup.logprobs < 0][::2]
    x[unasked] = x[unasked].round()
    return x


def draws(rank: int, collective: Collective) -> list[Drawn]:
    """What a rank draws in each step, the penalties' counts kept from step to step."""
    size = VOCABULARY // collective.ranks
    sampler = Sampler(Slots(80, size, torch.device("cpu"), rank * size), collective)
    sampler.slots.set_up(plan(setups=SETUPS))
    every, drawn = np.arange(len(SETUPS)), []
    for step in range(STEPS):
        logits = logits_of_step(step)[:, rank * size : (rank + 1) * size].contiguous()
        allowed = some_allowed(len(every), VOCABULARY, step) if step % 2 else None
        drawn.append(sampler.sample(logits, every, every, np.full(len(every), step), allowed))
        sampler.slots.record(every, drawn[-1].tokens)
    return drawn


def logits(folder: Path, part: Partition | None = None, collective: Collective = ALONE) -> torch.Tensor:
    """Of all positions of a prompt: [tokens, ids of the rank]."""
    source = open_model(str(folder))
    config = source.config if part is None else local(source.config, part)
    model = Decoder(config, load_weights(source, part=part), collective)
    ids = torch.randint(0, config.vocab_size, (60,), generator=torch.Generator().manual_seed(1))
    return model.logits(model.hidden(ids, torch.arange(60), DenseAttention(config)))


def as_rank(folder: Path, rank: int, ranks: int, collective: Collective) -> dict[str, Any]:
    part = Partition(range(3), first=True, last=True, rank=rank, ranks=ranks)
    found: dict[str, Any] = {name: logits(folder / name, part, collective) for name in MODELS}
    return found | {"drawn": [tensors_of(each) for each in draws(rank, collective)]}


def tensors_of(drawn: Drawn) -> tuple[torch.Tensor, ...]:
    return drawn.tokens, drawn.chosen, drawn.top_ids, drawn.top_values


def run_rank(rank: int, folder: Path) -> None:
    """All a process does; what it found is in `folder` afterwards."""
    torch.set_num_threads(1)
    part = Partition(range(3), first=True, last=True, rank=rank, ranks=RANKS)
    found: dict[str, Any] = {"hung": fails_with_a_rank_that_hangs(part, folder)}
    group = join(part, f"file://{folder}/again", "gloo", start=120, answer=60)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    with torch.inference_mode():
        found[4] = as_rank(folder, rank, RANKS, group)
        if rank < 2:
            found[2] = as_rank(folder, rank, 2, Group(pairs[0]))
    found["dead"] = rank == RANKS - 1 or fails(group)
    torch.save(found, folder / f"{rank}.pt")


def fails_with_a_rank_that_hangs(part: Partition, folder: Path) -> bool:
    group = join(part, f"file://{folder}/meet", "gloo", start=120, answer=3)
    failed = part.rank == RANKS - 1 or fails(group)
    (folder / f"failed {part.rank}").touch()
    while len(list(folder.glob("failed *"))) < RANKS:
        time.sleep(0.01)
    dist.destroy_process_group()
    return failed


def fails(group: Collective) -> bool:
    try:
        group.sum(torch.ones(3))
    except RuntimeError:
        return True
    return False


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, and what each rank found: one start of processes for all tests."""
    folder = tmp_path_factory.mktemp("ranks")
    for name, (family, options) in MODELS.items():
        tiny_model(folder / name, family, **options)
    torch.multiprocessing.spawn(run_rank, (folder,), RANKS)
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[Any, Any]]:
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_logits_of_the_ranks_make_up_the_models(
    folder: Path, found: list[dict[Any, Any]], name: str, ranks: int
) -> None:
    together = torch.cat([found[rank][ranks][name] for rank in range(ranks)], 1)
    torch.testing.assert_close(together, logits(folder / name), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_draws_what_one_rank_would(found: list[dict[Any, Any]], ranks: int) -> None:
    alone = [tensors_of(each) for each in draws(0, ALONE)]
    for rank in range(ranks):
        for step, (want, got) in enumerate(zip(alone, found[rank][ranks]["drawn"])):
            tokens, chosen, top_ids, top_values = got
            assert tokens.tolist() == want[0].tolist(), step
            assert all(torch.equal(*each) for each in zip(got, found[0][ranks]["drawn"][step])), "ranks differ"
            torch.testing.assert_close(chosen, want[1], atol=1e-5, rtol=0)
            torch.testing.assert_close(top_values, want[3], atol=1e-5, rtol=0)
            assert torch.equal(top_ids, want[2])


def test_a_rank_counts_its_own_ids_alone() -> None:
    slots = Slots(1, 10, torch.device("cpu"), first=20)
    slots.set_up(plan(setups=[Setup(slot=0, presence=1.0, prompt=[19, 20, 30], outputs=[5, 29, 29])]))
    for token in (0, 19, 21, 30, 39):
        slots.record(np.zeros(1, np.int64), torch.tensor([token]))
    in_prompt, outputs = slots.counts(np.zeros(1, np.int64))
    assert in_prompt[0].tolist() == [True] + [False] * 9
    assert outputs[0].tolist() == [0, 1, *[0] * 7, 2]


@pytest.mark.parametrize("what", ["hung", "dead"])
def test_ranks_fail_where_one_does(found: list[dict[Any, Any]], what: str) -> None:
    assert [each[what] for each in found] == [True] * RANKS


def test_a_rank_that_never_comes(tmp_path: Path) -> None:
    part = Partition(range(3), first=True, last=True, rank=0, ranks=2)
    with pytest.raises(RuntimeError):
        join(part, f"file://{tmp_path}/meet", "gloo", start=0.1)


def test_one_rank_meets_nobody() -> None:
    part = Partition(range(3), first=True, last=True)
    assert join(part, "", "gloo") is ALONE
    x = torch.ones(2, 3)
    assert ALONE.sum(x) is x and torch.equal(ALONE.gather(x), x[None])


@pytest.mark.parametrize("name", ["llama-biases", "llama-tied"])
@torch.inference_mode()
def test_layers_in_two_parts_are_those_of_the_whole(folder: Path, name: str) -> None:
    source = open_model(str(folder / name))
    parts = [Partition(range(2), first=True, last=False), Partition(range(2, 3), first=False, last=True)]
    assert whole(source.config) == Partition(range(3), first=True, last=True)
    configs = [local(source.config, part) for part in parts]
    first, last = (Decoder(c, load_weights(source, part=part)) for c, part in zip(configs, parts))
    assert (first.weights.norm, first.weights.head, last.weights.embedding) == (None, None, None)
    assert [len(each.weights.layers) for each in (first, last)] == [2, 1]
    ids = torch.randint(0, 512, (60,), generator=torch.Generator().manual_seed(1))
    positions, attention = torch.arange(60), DenseAttention(source.config)
    x = first.run(first.embed(ids), positions, attention)
    hidden = last.finish(last.run(x, positions, attention))
    assert torch.equal(last.logits(hidden), logits(folder / name))


def test_the_config_of_a_part(folder: Path) -> None:
    config = open_model(str(folder / "qwen2")).config
    parts = [Partition(range(1, 3), first=False, last=True, rank=rank, ranks=4) for rank in range(4)]
    assert {local(config, part) for part in parts} == {
        replace(config, num_layers=2, num_heads=1, num_kv_heads=1, intermediate_size=28)
    }
    assert [part.share(2) for part in parts] == [slice(0, 1), slice(0, 1), slice(1, 2), slice(1, 2)]
