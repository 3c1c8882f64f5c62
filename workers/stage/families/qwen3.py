"""Qwen3: Llama's names, and a norm over each head of q and k before rotation."""

from __future__ import annotations

from dataclasses import replace

from workers.stage.families.llama import LLAMA

QWEN3 = replace(LLAMA, q_norm="self_attn.q_norm", k_norm="self_attn.k_norm")
