"""What workers on several hosts have to have in common."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny import tiny_model
from toka.config import Config
from toka.model import open_model
from workers.agreement import agreement, difference


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A model; other weights of the same shapes; another model."""
    made = tmp_path_factory.mktemp("models")
    return [
        tiny_model(made / "a"),
        tiny_model(made / "b", seed=1),
        tiny_model(made / "c", rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
    ]


def of(folder: Path, **settings: object) -> dict[str, str]:
    return agreement(Config(**settings), open_model(str(folder)))  # type: ignore[arg-type]


def test_equal_workers_agree(folders: list[Path]) -> None:
    ours = of(folders[0], pp_size=2, node_rank=0, run_dir="/a", port=1)
    assert difference(ours, of(folders[0], pp_size=2, node_rank=1, run_dir="/b", port=2)) == ""


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"page_size": 8}, "page_size='8', not '16'"),
        ({"dtype": "bfloat16"}, "dtype='bfloat16', not 'auto'"),
        ({"pp_size": 4}, "pp_size='4', not '2'"),
        ({"pp_layers": "1,2"}, "pp_layers='1,2', not ''"),
        ({"weights": "random"}, "another weights"),
    ],
)
def test_a_setting_that_differs_is_named(folders: list[Path], settings: dict[str, object], says: str) -> None:
    assert difference(of(folders[0], pp_size=2), of(folders[0], **{"pp_size": 2, **settings})) == says


def test_models_and_weights_that_differ_are_told_apart(folders: list[Path]) -> None:
    ours, weights, model = (of(folder) for folder in folders)
    assert difference(ours, weights) == "another weights"
    assert difference(ours, model) == "another model"
    assert difference(ours, {}) == "pp_size='', not '1'"
