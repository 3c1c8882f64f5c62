"""Model families: how a checkpoint names its tensors. One family, one file; `FAMILIES` lists them."""

from __future__ import annotations

from workers.stage.families.llama import LLAMA
from workers.stage.families.names import Names
from workers.stage.families.qwen2 import QWEN2
from workers.stage.families.qwen3 import QWEN3

__all__ = ["FAMILIES", "Names"]

FAMILIES: dict[str, Names] = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3}
"""By `ModelConfig.family`."""
