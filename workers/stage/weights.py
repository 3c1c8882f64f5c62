"""A decoder's weights: every tensor of a checkpoint checked; those of a part read, converted and fused.

Ranks share a layer as Megatron's do (arXiv:1909.08053): of q, k, v, gate and up each has rows, of output and down
the columns that meet them, so that a rank's heads and MLP rows need nothing of the others' until all are summed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from toka.model import ModelConfig, ModelSource
from workers.stage.checkpoints import Checkpoint, GgufCheckpoint, Index, RandomCheckpoint, SafetensorsCheckpoint, Shape
from workers.stage.families import FAMILIES
from workers.stage.kv_cache import free_memory
from workers.stage.layers import Linear, RmsNorm, make_linear
from workers.stage.partition import Partition, local, whole

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_IGNORED = "rotary_emb.inv_freq"
"""Some old checkpoints hold it; it follows from the config."""
_COPIES_SHARE = 1 / 16
"""Of the free memory, what float32 copies of the layers' products may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer, of which heads and intermediate are a rank's own.

    q and k, and their norms, have the two numbers of a rotary pair side by side.
    """

    attention_norm: RmsNorm
    qkv: Linear
    """[(heads + 2 * kv_heads) * head_dim, hidden]."""
    qk_norm: RmsNorm | None
    """Weight [heads + kv_heads, head_dim]."""
    output: Linear
    """[hidden, heads * head_dim]; a rank's summand, with the bias on rank 0."""
    mlp_norm: RmsNorm
    gate_up: Linear
    """[2 * intermediate, hidden]."""
    down: Linear
    """[hidden, intermediate]; a rank's summand, with the bias on rank 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    dtype: torch.dtype
    """Run dtype: of the weights and of the KV cache."""
    device: torch.device
    embedding: Tensor | None
    """[vocab, hidden]; None where the part is not the first."""
    layers: list[LayerWeights]
    norm: RmsNorm | None
    """None, as `head`, where the part is not the last."""
    head: Linear | None
    """[vocab / ranks, hidden]: the logits of a rank's own ids."""


def load_weights(
    source: ModelSource,
    *,
    part: Partition | None = None,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    random: bool = False,
    progress: Callable[[float], None] = lambda fraction: None,
) -> Weights:
    """Read the weights of `source`, one tensor at a time, or make them up where `random`.

    `part`: what of the model to load, None: all of it. `dtype`: auto (the config's), float32, bfloat16 or float16.
    `progress` hears the fraction done. ValueError, in one sentence that names the tensor, where one is missing,
    unknown or of another shape than the config says.
    """
    config, device = source.config, torch.device(device)
    shapes = expected_shapes(config)
    checkpoint = RandomCheckpoint(shapes, device) if random else open_checkpoint(source)
    check_shapes(checkpoint, shapes, config)
    run_dtype = DTYPES[config.dtype if dtype == "auto" else dtype]
    return _Loader(config, part or whole(config), checkpoint, run_dtype, device, progress).load()


def open_checkpoint(source: ModelSource) -> Checkpoint:
    files = source.weight_files()
    if files[0].suffix == ".gguf":
        return GgufCheckpoint(files[0], source.config)
    return SafetensorsCheckpoint(files)


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor a checkpoint of `config` has, by name."""
    names, hidden, inner = FAMILIES[config.family], config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    table = (config.vocab_size, hidden)
    shapes: dict[str, Shape] = {f"{names.embedding}.weight": table, f"{names.norm}.weight": (hidden,)}
    if not config.tie_word_embeddings:
        shapes[f"{names.head}.weight"] = table
    products = [
        (names.q, queries, hidden, config.attention_bias),
        (names.k, keys, hidden, config.attention_bias),
        (names.v, keys, hidden, config.attention_bias),
        (names.output, hidden, queries, config.attention_output_bias),
        (names.gate, inner, hidden, config.mlp_bias),
        (names.up, inner, hidden, config.mlp_bias),
        (names.down, hidden, inner, config.mlp_bias),
    ]
    norms = [(names.attention_norm, hidden), (names.mlp_norm, hidden)]
    if config.qk_norm:
        norms += [(names.q_norm, config.head_dim), (names.k_norm, config.head_dim)]
    for i in range(config.num_layers):
        shapes |= {f"{names.in_layer(i, part)}.weight": (size,) for part, size in norms}
        for part, rows, columns, bias in products:
            shapes[f"{names.in_layer(i, part)}.weight"] = (rows, columns)
            if bias:
                shapes[f"{names.in_layer(i, part)}.bias"] = (rows,)
    return shapes


def check_shapes(checkpoint: Checkpoint, expected: dict[str, Shape], config: ModelConfig) -> None:
    for name, shape in expected.items():
        found = checkpoint.shapes.get(name)
        if found is None:
            raise ValueError(f"{checkpoint.where(name)}: tensor {name} of shape {list(shape)} is missing")
        if found != shape:
            raise ValueError(
                f"{checkpoint.where(name)}: tensor {name} has shape {list(found)}, the config says {list(shape)}"
            )
    # Some checkpoints of tied models repeat the embedding as the head.
    repeated = f"{FAMILIES[config.family].head}.weight" if config.tie_word_embeddings else ""
    for name, found in checkpoint.shapes.items():
        if name not in expected and name != repeated and not name.endswith(_IGNORED):
            raise ValueError(
                f"{checkpoint.where(name)}: tensor {name} of shape {list(found)} "
                f"is not one that the config of this {config.family} model calls for"
            )


class _Loader:
    """Builds Weights; a tensor's source is let go as soon as it has its final form."""

    def __init__(
        self,
        config: ModelConfig,
        part: Partition,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[float], None],
    ) -> None:
        self.config = local(config, part)
        self.part = part
        self.heads, self.kv_heads = part.share(config.num_heads), part.share(config.num_kv_heads)
        self.inner = part.share(config.intermediate_size)
        self.names = FAMILIES[config.family]
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.device = device
        self.progress = progress
        numbers = sum(math.prod(shape) for shape in expected_shapes(self.config).values())
        self.copies = 4 * numbers < _COPIES_SHARE * free_memory(device)

    def load(self) -> Weights:
        part = self.part
        layers = self._layers()
        embedding = self._tensor(f"{self.names.embedding}.weight") if part.first else None
        norm, head = (self._norm(self.names.norm), self._head(embedding)) if part.last else (None, None)
        self.progress(1.0)
        return Weights(dtype=self.dtype, device=self.device, embedding=embedding, layers=layers, norm=norm, head=head)

    def _head(self, embedding: Tensor | None) -> Linear:
        tied, ids = self.config.tie_word_embeddings, self.part.share(self.config.vocab_size)
        if tied and embedding is not None:
            return make_linear(embedding[ids])
        return make_linear(self._tensor(f"{self.names.embedding if tied else self.names.head}.weight", (ids,)))

    def _layers(self) -> list[LayerWeights]:
        """Several at once, each in one thread: dequantising and packing use one core only."""
        layers: list[LayerWeights] = []
        threads = torch.get_num_threads()
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for layer in pool.map(self._layer, self.part.layers):
                layers.append(layer)
                self.progress(len(layers) / (self.config.num_layers + 1))
        # MKL's own number of threads is one for the whole process.
        torch.set_num_threads(threads)
        return layers

    def _layer(self, i: int) -> LayerWeights:
        names, size = self.names, self.config.head_dim
        queries, keys = (slice(size * heads.start, size * heads.stop) for heads in (self.heads, self.kv_heads))

        def at(*parts: str) -> list[str]:
            return [names.in_layer(i, part) for part in parts]

        return LayerWeights(
            attention_norm=self._norm(*at(names.attention_norm)),
            qkv=self._rows(at(names.q, names.k, names.v), [queries, keys, keys], rotary=2),
            qk_norm=self._qk_norm(*at(names.q_norm, names.k_norm)) if self.config.qk_norm else None,
            output=self._columns(names.in_layer(i, names.output), queries),
            mlp_norm=self._norm(*at(names.mlp_norm)),
            gate_up=self._rows(at(names.gate, names.up), [self.inner, self.inner]),
            down=self._columns(names.in_layer(i, names.down), self.inner),
        )

    def _tensor(self, name: str, index: Index = ()) -> Tensor:
        # A copy also where nothing changes: the file's pages must not be the weights, for a file on a slow
        # disk, or cut short under us, would stall or end the process in the middle of a step.
        return self.checkpoint.read(name, index).to(self.device, self.dtype, copy=True)

    def _rows(self, parts: list[str], rows: list[slice], rotary: int = 0) -> Linear:
        """The product with rows of the parts' weights, one below the other; the first `rotary` have rotary pairs."""

        def joined(kind: str) -> Tensor:
            tensors = [self._tensor(f"{part}.{kind}", (some,)) for part, some in zip(parts, rows)]
            return torch.cat([*map(self._pairs_together, tensors[:rotary]), *tensors[rotary:]])

        biased = f"{parts[0]}.bias" in self.checkpoint.shapes
        return make_linear(joined("weight"), joined("bias") if biased else None, copy=self.copies)

    def _columns(self, part: str, columns: slice) -> Linear:
        """This rank's summand of a product: its columns of the weight, and on rank 0 the bias."""
        biased = f"{part}.bias" in self.checkpoint.shapes and self.part.rank == 0
        weight = self._tensor(f"{part}.weight", (slice(None), columns))
        return make_linear(weight, self._tensor(f"{part}.bias") if biased else None, copy=self.copies)

    def _norm(self, name: str) -> RmsNorm:
        return RmsNorm(self._tensor(f"{name}.weight"), self.config.rms_norm_eps)

    def _qk_norm(self, q_name: str, k_name: str) -> RmsNorm:
        q, k = (self._pairs_together(self._tensor(f"{name}.weight")) for name in (q_name, k_name))
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        return RmsNorm(torch.cat([q.expand(heads, -1), k.expand(kv_heads, -1)]), self.config.rms_norm_eps)

    def _pairs_together(self, tensor: Tensor) -> Tensor:
        """From halves (0, d/2, 1, d/2 + 1, ... apart) to pairs side by side, in every head of dimension 0."""
        halves = tensor.view(-1, 2, self.config.head_dim // 2, *tensor.shape[1:])
        return halves.transpose(1, 2).reshape(tensor.shape)
