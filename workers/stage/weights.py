"""A decoder's weights: every tensor of a checkpoint checked, converted and fused."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from toka.model import ModelConfig, ModelSource
from workers.stage.checkpoints import Checkpoint, GgufCheckpoint, RandomCheckpoint, SafetensorsCheckpoint, Shape
from workers.stage.families import FAMILIES
from workers.stage.kv_cache import free_memory
from workers.stage.layers import Linear, RmsNorm, make_linear

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_IGNORED = "rotary_emb.inv_freq"
"""Some old checkpoints hold it; it follows from the config."""
_COPIES_SHARE = 1 / 16
"""Of the free memory, what float32 copies of the layers' products may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer. q and k, and their norms, have the two numbers of a rotary pair side by side."""

    attention_norm: RmsNorm
    qkv: Linear
    """[(heads + 2 * kv_heads) * head_dim, hidden]."""
    qk_norm: RmsNorm | None
    """Weight [heads + kv_heads, head_dim]."""
    output: Linear
    mlp_norm: RmsNorm
    gate_up: Linear
    """[2 * intermediate, hidden]."""
    down: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    dtype: torch.dtype
    """Run dtype: of the weights and of the KV cache."""
    device: torch.device
    embedding: Tensor
    """[vocab, hidden]."""
    layers: list[LayerWeights]
    norm: RmsNorm
    head: Linear
    """[vocab, hidden]."""


def load_weights(
    source: ModelSource,
    *,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    random: bool = False,
    progress: Callable[[float], None] = lambda fraction: None,
) -> Weights:
    """Read the weights of `source`, one tensor at a time, or make them up where `random`.

    `dtype`: auto (the config's), float32, bfloat16 or float16. `progress` hears the fraction done. ValueError, in
    one sentence that names the tensor, where one is missing, unknown or of another shape than the config says.
    """
    config, device = source.config, torch.device(device)
    shapes = expected_shapes(config)
    checkpoint = RandomCheckpoint(shapes, device) if random else open_checkpoint(source)
    check_shapes(checkpoint, shapes, config)
    run_dtype = DTYPES[config.dtype if dtype == "auto" else dtype]
    return _Loader(config, checkpoint, run_dtype, device, progress).load()


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
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[float], None],
    ) -> None:
        self.config = config
        self.names = FAMILIES[config.family]
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.device = device
        self.progress = progress
        numbers = sum(math.prod(shape) for shape in expected_shapes(config).values())
        self.copies = 4 * numbers < _COPIES_SHARE * free_memory(device)

    def load(self) -> Weights:
        layers = self._layers()
        embedding = self._tensor(f"{self.names.embedding}.weight")
        tied = self.config.tie_word_embeddings
        head = make_linear(embedding if tied else self._tensor(f"{self.names.head}.weight"))
        norm = self._norm(self.names.norm)
        self.progress(1.0)
        return Weights(dtype=self.dtype, device=self.device, embedding=embedding, layers=layers, norm=norm, head=head)

    def _layers(self) -> list[LayerWeights]:
        """Several at once, each in one thread: dequantising and packing use one core only."""
        layers: list[LayerWeights] = []
        threads = torch.get_num_threads()
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for layer in pool.map(self._layer, range(self.config.num_layers)):
                layers.append(layer)
                self.progress(len(layers) / (self.config.num_layers + 1))
        # MKL's own number of threads is one for the whole process.
        torch.set_num_threads(threads)
        return layers

    def _layer(self, i: int) -> LayerWeights:
        names = self.names

        def at(*parts: str) -> list[str]:
            return [names.in_layer(i, part) for part in parts]

        return LayerWeights(
            attention_norm=self._norm(*at(names.attention_norm)),
            qkv=self._linear(*at(names.q, names.k, names.v), rotary=2),
            qk_norm=self._qk_norm(*at(names.q_norm, names.k_norm)) if self.config.qk_norm else None,
            output=self._linear(*at(names.output)),
            mlp_norm=self._norm(*at(names.mlp_norm)),
            gate_up=self._linear(*at(names.gate, names.up)),
            down=self._linear(*at(names.down)),
        )

    def _tensor(self, name: str) -> Tensor:
        # A copy also where nothing changes: the file's pages must not be the weights, for a file on a slow
        # disk, or cut short under us, would stall or end the process in the middle of a step.
        return self.checkpoint.read(name).to(self.device, self.dtype, copy=True)

    def _linear(self, *parts: str, rotary: int = 0) -> Linear:
        """The product with the parts' weights one below the other; the first `rotary` have rotary pairs."""
        return make_linear(
            self._joined([f"{part}.weight" for part in parts], rotary),
            self._joined([f"{part}.bias" for part in parts], rotary)
            if f"{parts[0]}.bias" in self.checkpoint.shapes
            else None,
            copy=self.copies,
        )

    def _joined(self, names: list[str], rotary: int) -> Tensor:
        tensors = [self._tensor(name) for name in names]
        tensors[:rotary] = [self._pairs_together(each) for each in tensors[:rotary]]
        return torch.cat(tensors) if len(tensors) > 1 else tensors[0]

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
