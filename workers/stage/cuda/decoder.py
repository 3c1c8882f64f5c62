"""The decoder on a GPU: products from cuBLAS, everything between them in fused kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from toka.model import ModelConfig
from workers.stage.cuda.cache import PagedCache
from workers.stage.cuda.chunks import ChunkAttention
from workers.stage.cuda.decode import DecodeAttention
from workers.stage.cuda.fused import Fused
from workers.stage.cuda.inputs import Inputs
from workers.stage.cuda.prefix import PrefixAttention
from workers.stage.cuda.ranks import Ranks
from workers.stage.cuda.rope import Rope
from workers.stage.weights import Weights

FEW_ROWS = 128
"""Rows of one token that leave room for more on a GPU. Beside chunks there are seldom more."""


class CudaDecoder:
    """Hidden states of a step's tokens. Launches kernels and waits for none."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        fused: Fused,
        cache: PagedCache,
        table: Tensor,
        last: Tensor,
        parts: int,
        ranks: Ranks,
    ) -> None:
        """table: [slots, pages of a sequence] int32; last: [slots] int64, the id last sampled in each;
        parts: most parts of shared prefixes in one step."""
        processors = torch.cuda.get_device_properties(table.device).multi_processor_count
        heads = config.num_heads
        self.weights, self.hidden_size = weights, config.hidden_size
        self.fused, self.ranks = fused, ranks
        self.last = last
        self.rope = Rope(config, cache, table, table.shape[1] * cache.shape.page_size)
        self.decode = DecodeAttention(cache, heads, table, processors)
        self.prefix = PrefixAttention(cache, heads, table, processors, parts)
        self.chunks = ChunkAttention(cache, heads, table, processors)

    def embed(self, inputs: Inputs) -> Tensor:
        """[tokens, hidden]."""
        assert self.weights.embedding is not None
        ids = torch.where(inputs.tokens < 0, self.last.index_select(0, inputs.slots), inputs.tokens)
        return functional.embedding(ids, self.weights.embedding)

    def run(self, residual: Tensor, inputs: Inputs, rows: int, grouped: bool, chunked: bool) -> Tensor:
        """[tokens, hidden], normed where the model ends here. residual: the same, which is written over.

        rows: most rows of one token; grouped: whether any token has a shared prefix; chunked: whether any row has
        several tokens.
        """
        layers = self.weights.layers
        x = self.fused.norm(residual, layers[0].attention_norm)
        following = [*(layer.attention_norm for layer in layers[1:]), self.weights.norm]
        for number, (layer, norm) in enumerate(zip(layers, following)):
            qkv = self.rope.store(number, layer.qkv(x), layer.qk_norm, inputs.slots, inputs.positions)
            x = self.ranks.product(layer.output, self._attend(number, *qkv, inputs, rows, grouped, chunked).flatten(1))
            x, residual = self.fused.add_norm(x, residual, layer.mlp_norm)
            x = self.ranks.product(layer.down, self.fused.silu_and_mul(layer.gate_up(x)))
            if norm is None:
                return residual.add_(x)
            x, residual = self.fused.add_norm(x, residual, norm)
        return x

    def _attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, inputs: Inputs, rows: int, grouped: bool, chunked: bool
    ) -> Tensor:
        out = torch.empty_like(q)
        partials = self.prefix.run(layer, q, inputs) if grouped else None
        self.decode.run(layer, q, rows, chunked or rows <= FEW_ROWS, inputs, partials, out)
        if chunked:
            self.chunks.run(layer, q, k, v, inputs, partials, out)
        return out
