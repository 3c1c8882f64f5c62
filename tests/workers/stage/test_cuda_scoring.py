"""What the CUDA stage does about prompts' log-probabilities beside launching kernels: portions, their results."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.plans import Row, plan
from toka.messages import ScoredRow
from workers.stage.collective import ALONE
from workers.stage.cuda import scoring
from workers.stage.cuda.arrange import Arranger
from workers.stage.cuda.scoring import Scoring
from workers.stage.scoring import unpacked, wanted

VOCABULARY = 300
CPU = torch.device("cpu")


def test_rows_are_found_where_they_were_put() -> None:
    """Rows of one token stand before all others."""
    rows = [Row(slot=slot, start=0, tokens=[10 * slot + i for i in range(slot % 3 + 1)]) for slot in range(7)]
    scores = [ScoredRow(row=row, likely=row % 2, following=900 + row if row != 3 else -1) for row in (1, 2, 3, 5)]
    made = plan(rows=rows, scores=scores)
    arranged = Arranger(16, 8, 2, 4, 64).arrange(made)
    asked = wanted(made, arranged.row_begins)
    assert arranged.tokens[asked.tokens].tolist() == [10, 11, 20, 21, 22, 50, 51, 52]
    assert asked.ids.tolist() == [11, 901, 21, 22, 902, 51, 52, 905]
    assert asked.likely.tolist() == [1, 1, 0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("likely", [[0, 0], [3, 0], [32, 5], [33, 1]])
def test_portions(monkeypatch: pytest.MonkeyPatch, likely: list[int]) -> None:
    monkeypatch.setattr(scoring, "PORTION_BYTES", 20 * VOCABULARY * 12)
    logits = torch.randn(90, VOCABULARY, generator=torch.Generator().manual_seed(1))
    runs: list[int] = []

    def head(x: torch.Tensor) -> torch.Tensor:
        runs.append(len(x))
        return x

    made = Scoring(head, range(VOCABULARY), CPU, 4, ALONE)
    ids = np.random.default_rng(0).integers(0, VOCABULARY, 90).tolist()
    rows = [Row(slot=0, start=0, tokens=ids[:50]), Row(slot=1, start=0, tokens=ids[50:])]
    scores = [ScoredRow(row=0, likely=likely[0], following=7), ScoredRow(row=1, likely=likely[1], following=-1)]
    asked = wanted(plan(rows=rows, scores=scores), np.array([0, 50]))
    portions = made.score(asked, lambda width: made.run(logits, width))
    found = unpacked([each.numpy() for each in portions], asked.likely)
    assert made.rows == 16 and runs == [16] * 6
    exact = logits.log_softmax(1)
    following = torch.tensor([*ids[1:50], 7, *ids[51:]])
    want = exact[:89].gather(1, following[:, None])[:, 0]
    np.testing.assert_allclose(found.chosen, want, atol=1e-5)
    top = [exact[:50].topk(likely[0]), exact[50:89].topk(likely[1])]
    assert found.top_ids.tolist() == [number for each in top for number in each.indices.flatten().tolist()]
    np.testing.assert_allclose(found.top_values, torch.cat([each.values.flatten() for each in top]), atol=1e-5)
