"""The paged KV cache on a GPU: one block of memory for all layers."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.stage.kv_cache import CacheShape


class PagedCache:
    """`data`: [layers, 2 (keys, values), pages + 1, kv_heads, page_size, head_dim].

    A head's part of a page is one run of memory: attention reads it in long pieces. The page behind the last
    one is the scratch page: padding rows write there.
    """

    def __init__(self, shape: CacheShape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        page = (shape.kv_heads, shape.page_size, shape.head_dim)
        self.data = torch.zeros(shape.layers, 2, shape.pages + 1, *page, dtype=dtype, device=device)

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Keys and values: [pages + 1, kv_heads, page_size, head_dim] each."""
        return self.data[number, 0], self.data[number, 1]

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy pages sources: [n] to targets: [n] in every layer."""
        self.data[:, :, targets] = self.data[:, :, sources]
