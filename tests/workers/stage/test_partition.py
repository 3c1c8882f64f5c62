"""How a model is cut into stages."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.support.tiny import tiny_config
from toka.config import Config
from toka.model import ModelConfig, open_model
from workers.stage.partition import partition, split


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return open_model(str(tiny_config(tmp_path_factory.mktemp("model"), num_hidden_layers=8))).config


def test_stages_take_all_layers_in_order(model: ModelConfig) -> None:
    parts = [partition(Config(pp_size=3, tp_size=2), model, stage) for stage in range(6)]
    assert [number for part in parts[::2] for number in part.layers] == list(range(8))
    assert all(a.layers == b.layers and (a.rank, b.rank) == (0, 1) for a, b in zip(parts[::2], parts[1::2]))
    assert [part.first for part in parts] == [True, True, False, False, False, False]
    assert [part.last for part in parts] == [False, False, False, False, True, True]
    assert [part.answers for part in parts] == [False, False, False, False, True, False]


@pytest.mark.parametrize(
    ("vocabulary", "stages", "counts"),
    [(512, 1, [8]), (512, 2, [4, 4]), (8, 3, [3, 3, 2]), (4 * 528, 2, [6, 2]), (1 << 20, 4, [3, 2, 2, 1])],
)
def test_the_head_counts_as_layers(model: ModelConfig, vocabulary: int, stages: int, counts: list[int]) -> None:
    """A layer of this model has as many numbers as the head of a vocabulary of 528."""
    assert split(dataclasses.replace(model, vocab_size=vocabulary), stages) == counts


def test_given_layers_are_taken(model: ModelConfig) -> None:
    config = Config(pp_size=3, pp_layers="1, 5,2")
    assert [len(partition(config, model, stage).layers) for stage in range(3)] == [1, 5, 2]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"pp_size": 9}, "pp_size: 9 stages, but the model has 8 layers"),
        ({"pp_size": 2, "pp_layers": "8"}, "pp_layers: '8' should be pp_size=2 numbers"),
        ({"pp_size": 2, "pp_layers": "8,0"}, "none 0"),
        ({"pp_size": 2, "pp_layers": "a,b"}, "none 0"),
        ({"pp_size": 2, "pp_layers": "4,5"}, "add up to the model's 8 layers"),
        ({"tp_size": 3}, "tp_size: 3 does not divide the model's 4 attention heads"),
        ({"tp_size": 8}, "tp_size: 8 does not divide the model's 4 attention heads"),
    ],
)
def test_what_does_not_fit_is_named(model: ModelConfig, settings: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        partition(Config(**settings), model, 0)  # type: ignore[arg-type]


def test_vocabularies_and_kv_heads_have_to_divide(model: ModelConfig, tmp_path: Path) -> None:
    odd = dataclasses.replace(model, vocab_size=511)
    with pytest.raises(ValueError, match="511 ids in the vocabulary"):
        partition(Config(tp_size=2), odd, 0)
    with pytest.raises(ValueError, match="4 neither divides the model's 6 KV heads nor the reverse"):
        partition(Config(tp_size=4), dataclasses.replace(model, num_heads=12, num_kv_heads=6), 0)
