"""Every form of dense attention gives what its definition says, whichever is the fastest on this machine."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from workers.stage import dense_attention
from workers.stage.dense_attention import Attended


def expected(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1).double() for each in (k, v))
    scores = q.double() @ k.transpose(2, 3)
    if mask is not None:
        scores = scores + mask
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[2:]).triu(1).bool(), float("-inf"))
    return (scores.softmax(-1) @ v).float(), scores.logsumexp(-1).float()


@pytest.mark.parametrize("products", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("rows", "queries", "keys"), [(1, 300, 300), (3, 40, 40), (5, 1, 90), (2, 1, 3)])
def test_equals_the_definition(
    monkeypatch: pytest.MonkeyPatch, products: bool, causal: bool, rows: int, queries: int, keys: int
) -> None:
    monkeypatch.setattr(dense_attention, "SCORES", 40_000)
    generator = torch.Generator().manual_seed(keys)
    # As the cache gives them: heads first.
    k, v = torch.randn(2, 2, rows, queries if causal else keys, 16, generator=generator).transpose(1, 2)
    q = torch.randn(rows, queries, 6, 16, generator=generator).transpose(1, 2)
    mask = None
    if not causal:
        mask = torch.zeros(rows, 1, 1, keys)
        mask[0, ..., keys // 2 :] = float("-inf")
    run = dense_attention._products if products else dense_attention._fused
    out, lse = run(q, k, v, mask, causal=causal, **({"lse": True} if products else {}))
    assert lse is not None
    for given, wanted in zip((out, lse), expected(q, k, v, mask, causal)):
        torch.testing.assert_close(given, wanted, atol=1e-5, rtol=1e-5)


def test_bfloat16_within_its_rounding() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 4, 200, 64, generator=generator).bfloat16() for _ in range(3))
    q = q / 8
    results: list[Attended] = [
        dense_attention._products(q, k, v, None, causal=True, lse=True),
        dense_attention._fused(q, k, v, None, causal=True),
    ]
    for (out, lse), wanted in ((each, expected(q, k, v, None, True)) for each in results):
        assert lse is not None
        torch.testing.assert_close(out.float(), wanted[0], atol=0.03, rtol=0.03)
        torch.testing.assert_close(lse, wanted[1], atol=0.02, rtol=0.02)
