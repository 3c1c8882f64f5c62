"""Qwen2 and Qwen2.5: Llama's names; q, k and v always have a bias, the output projection never."""

from __future__ import annotations

from workers.stage.families.llama import LLAMA

QWEN2 = LLAMA
