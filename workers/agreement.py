"""What all stages of a replica must have in common, where each host's worker is started by hand."""

from __future__ import annotations

import hashlib
from pathlib import Path

from toka.config import Config
from toka.model import ModelSource

SETTINGS = ("pp_size", "tp_size", "pp_layers", "nodes", "dtype", "page_size")
SAMPLE_BYTES = 1 << 16
"""Of each weight file's beginning and end: all of it would take minutes."""


def agreement(config: Config, source: ModelSource) -> dict[str, str]:
    """By name; what is no setting is a digest."""
    found = {name: str(getattr(config, name)) for name in SETTINGS}
    found["model"] = hashlib.sha256(repr(source.config).encode()).hexdigest()
    random = config.weights == "random"
    found["weights"] = "random" if random else _digest(source.weight_files())
    return found


def difference(ours: dict[str, str], theirs: dict[str, str]) -> str:
    """The first thing on which two do not agree, for a sentence; empty where they do."""
    for name, value in ours.items():
        other = theirs.get(name, "")
        if other != value:
            return f"{name}={other!r}, not {value!r}" if name in SETTINGS else f"another {name}"
    return ""


def _digest(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        with path.open("rb") as file:
            first = file.read(SAMPLE_BYTES)
            file.seek(max(0, size - SAMPLE_BYTES))
            digest.update(f"{path.name} {size}".encode() + first + file.read())
    return digest.hexdigest()
