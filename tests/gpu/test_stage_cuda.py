"""Attention and sampling on a GPU give what they give on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.plans import Setup, plan
from workers.stage import noise
from workers.stage.attention import Attention
from workers.stage.batch import Batch, Group
from workers.stage.kv_cache import CacheShape, KVCache
from workers.stage.sampler import Sampler
from workers.stage.slots import Slots

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.04)])
def test_attention(dtype: torch.dtype, tolerance: float) -> None:
    """Decode rows, chunks with and without a past, and a group with both, over one page table."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randperm(80, generator=generator).int().view(8, 10)
    table[1:3, :2] = table[0, :2].clone()
    group = Group(table[0, :2].numpy().astype(np.int64), np.array([0, 1, 2]))
    starts, counts = np.array([40, 33, 32, 0, 21, 159, 5]), np.array([1, 1, 9, 12, 7, 1, 1])
    batch = Batch(np.arange(7), starts, counts, (group,))
    content = torch.randn(81, 4, 16, 64, generator=generator).to(dtype)
    qkv = torch.randn(32, 10, 64, generator=generator).to(dtype)
    results = []
    for device in (CPU, CUDA):
        cache = KVCache(CacheShape(1, 80, 16, 2, 64), dtype, device)
        cache.layers[0].copy_(content)
        attention = Attention(cache, 6, table.to(device))
        attention.begin(batch)
        results.append(attention.run(0, qkv.to(device)).float().cpu())
    torch.testing.assert_close(results[1], results[0], atol=tolerance, rtol=tolerance)


def test_noise_has_the_same_bits() -> None:
    seeds, samples, positions = (torch.arange(50) * factor for factor in (1 << 50, 7, 1))
    cpu, cuda = (
        noise.noise_bits(
            noise.row_keys(seeds.to(device), samples.to(device), positions.to(device)),
            noise.vocabulary(10_000, device),
        )
        for device in (CPU, CUDA)
    )
    assert torch.equal(cpu, cuda.cpu())


def test_sampler_draws_the_same_tokens() -> None:
    setups = [
        Setup(slot=0, seed=1),
        Setup(slot=1, temperature=0.0, logprobs=3),
        Setup(slot=2, seed=2, top_p=0.8, logprobs=0),
        Setup(slot=3, seed=3, top_k=9, min_p=0.01),
        Setup(slot=4, seed=4, presence=0.4, repetition=1.3, prompt=[1, 2], outputs=[3, 3]),
        Setup(slot=5, seed=5, bias={8: 3.0}, banned=[9], min_tokens=9),
    ]
    logits = torch.randn(6, 20_000, generator=torch.Generator().manual_seed(1)) * 2
    rows = np.arange(6)
    drawn = []
    for device in (CPU, CUDA):
        slots = Slots(8, 20_000, device)
        slots.set_up(plan(setups=setups))
        tokens = []
        for position in range(20):
            result = Sampler(slots).sample(logits.to(device), rows, rows, np.full(6, position))
            slots.record(rows, result.tokens)
            tokens.append(result.tokens.cpu())
        drawn.append(torch.stack(tokens))
        assert len(result.chosen) == 2 and len(result.top_ids) == 3
    assert torch.equal(drawn[0], drawn[1])
