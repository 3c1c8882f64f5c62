"""The kernels of the CUDA stage against plain float32 formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.plans import Row, Setup, plan
from workers.stage import noise

if not torch.cuda.is_available():
    pytest.skip("needs CUDA", allow_module_level=True)

from workers.stage.cuda.arrange import Arranger
from workers.stage.cuda.cache import PagedCache
from workers.stage.cuda.chunks import ChunkAttention
from workers.stage.cuda.decode import DecodeAttention
from workers.stage.cuda.draw import Draw
from workers.stage.cuda.inputs import InputBuffer
from workers.stage.cuda.prefix import PrefixAttention
from workers.stage.kv_cache import CacheShape

CUDA = torch.device("cuda")
PAGE, PAGES, WIDTH = 16, 1100, 200


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 2, 64), (7, 1, 128), (4, 4, 128), (32, 8, 64)])
@pytest.mark.parametrize("processors", [1, 132])
@pytest.mark.parametrize(("grouped", "few"), [(False, False), (False, True), (True, False), (True, True)])
def test_attention(heads: int, kv_heads: int, dim: int, processors: int, grouped: bool, few: bool) -> None:
    """Rows of one token, split and not, and chunks, with and without a shared prefix among them."""
    generator = torch.Generator(CUDA).manual_seed(0)
    cache = PagedCache(CacheShape(1, PAGES, PAGE, kv_heads, dim), torch.bfloat16, CUDA)
    cache.data.copy_(torch.randn(cache.data.shape, generator=generator, device=CUDA))
    table = torch.randperm(PAGES, generator=torch.Generator().manual_seed(0)).int()[:1000].view(5, WIDTH)
    table[1:4, :120] = table[0, :120]
    rows = [
        Row(slot=0, start=2000, tokens=[-1]),
        Row(slot=1, start=1920, tokens=[0] * 37),
        Row(slot=2, start=3199, tokens=[-1]),
        Row(slot=4, start=0, tokens=[0] * 700),
        Row(slot=3, start=1933, tokens=[-1]),
    ]
    made = plan(rows=rows, groups=[(table[0, :120].tolist(), [0, 1, 2, 4])] if grouped else [])
    arranged = Arranger(PAGE, heads, kv_heads, processors, 2048).arrange(made)
    on_gpu = table.to(CUDA)
    count, none = len(arranged.tokens), np.empty(0, np.int32)
    buffer = InputBuffer(2048, 1, 4, CUDA)
    buffer.fill(count, arranged, 1, none, none)
    inputs = buffer.inputs(count)
    q = torch.randn(count, heads, dim, generator=generator, device=CUDA).bfloat16()
    out = torch.full_like(q, float("nan"))
    partials = PrefixAttention(cache, heads, on_gpu, processors, 2048).run(0, q, inputs) if grouped else None
    DecodeAttention(cache, heads, on_gpu, processors).run(0, q, arranged.rows + 2, few, inputs, partials, out)
    slots, positions = arranged.slots, arranged.positions
    pages, within = table[slots, positions // PAGE].long(), torch.from_numpy(positions % PAGE)
    k, v = (each[pages.to(CUDA), :, within.to(CUDA)] for each in cache.layer(0))
    ChunkAttention(cache, heads, on_gpu, processors).run(0, q, k, v, inputs, partials, out)
    for first in range(0, len(q), 100):
        part = slice(first, first + 100)
        want = torch.stack([_attend(cache, on_gpu[s], t, p) for s, p, t in zip(slots[part], positions[part], q[part])])
        torch.testing.assert_close(out[part].float(), want, atol=0.02, rtol=0.02)


def _attend(cache: PagedCache, pages: torch.Tensor, q: torch.Tensor, position: int) -> torch.Tensor:
    """One token's attention over everything up to `position`: [heads, dim], float32."""
    held = pages[: position // PAGE + 1].long()
    k, v = (each[held].transpose(1, 2).flatten(0, 1)[: position + 1].float() for each in cache.layer(0))
    k, v = (each.repeat_interleave(q.shape[0] // k.shape[1], 1) for each in (k, v))
    weights = (torch.einsum("hd,nhd->hn", q.float(), k) * q.shape[1] ** -0.5).softmax(1)
    return torch.einsum("hn,nhd->hd", weights, v)


@pytest.mark.parametrize("vocabulary", [5000, 128_256])
def test_draw_is_that_of_the_noise(vocabulary: int) -> None:
    count = 90
    setups = [
        Setup(slot=i, seed=i * 7919 << 40 | i, temperature=(1.0, 0.0, 0.3)[i % 3], sample=i % 7) for i in range(count)
    ]
    made = plan(setups=setups)
    logits = (torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(0)) * 2).bfloat16().to(CUDA)
    last = torch.zeros(count, dtype=torch.int64, device=CUDA)
    draw = Draw(lambda hidden: hidden, range(vocabulary), last)
    draw.set_up(made)
    slots = torch.arange(count, dtype=torch.int32, device=CUDA)
    words = noise.vocabulary(vocabulary, CUDA)
    seeds, samples = torch.from_numpy(made.setup_seeds).to(CUDA), torch.arange(count, device=CUDA) % 7
    temperatures = draw.temperatures
    for output in range(20):
        tokens = torch.empty(count, dtype=torch.int32, device=CUDA)
        outputs = torch.full_like(slots, output)
        draw.draw(logits, slots, outputs, tokens)
        keys = noise.row_keys(seeds, samples, outputs.long())
        drawn, _ = noise.draw(logits, temperatures.where(temperatures > 0, 1.0), keys, words)
        want = torch.where(temperatures > 0, drawn, logits.float().argmax(1))
        assert torch.equal(tokens.long(), want)
        assert torch.equal(last, want)
