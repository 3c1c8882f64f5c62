"""What the decoder needs of a checkpoint, by the names a family gives it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Tensor names without `.weight` and `.bias`; those of a layer start with `layer`, which holds its number."""

    embedding: str
    norm: str
    head: str
    layer: str
    attention_norm: str
    q: str
    k: str
    v: str
    output: str
    mlp_norm: str
    gate: str
    up: str
    down: str
    q_norm: str = ""
    k_norm: str = ""

    def in_layer(self, index: int, part: str) -> str:
        return f"{self.layer.format(index)}.{part}"
