"""Where tensors come from: safetensors files, a GGUF file, or chance. Names are Hugging Face's."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from toka.gguf_file import GgufFile
from toka.model import ModelConfig

Shape = tuple[int, ...]
Index = tuple[slice, ...]
"""A slice of each of a tensor's first dimensions; of the others everything."""
INITIAL_STD = 0.02
_GGUF_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")


class Checkpoint(Protocol):
    """Tensors by name. `read` gives one, or a slice, on the CPU or on the device it was made on, in any dtype."""

    @property
    def shapes(self) -> Mapping[str, Shape]: ...

    def where(self, name: str) -> str:
        """The file that holds, or would hold, the tensor: for errors."""
        ...

    def read(self, name: str, index: Index = ()) -> Tensor: ...


class SafetensorsCheckpoint:
    """Memory-mapped: `read` copies nothing. ValueError for a file that is not safetensors."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._files = list(files)
        self._holders: dict[str, tuple[Path, Any]] = {}
        self.shapes: dict[str, Shape] = {}
        for path in self._files:
            try:
                file: Any = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{path}: cannot be read: {error}") from None
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                self._holders[name] = path, file
                self.shapes[name] = tuple(file.get_slice(name).get_shape())

    def where(self, name: str) -> str:
        holder = self._holders.get(name)
        return str(holder[0] if holder else self._files[0] if len(self._files) == 1 else self._files[0].parent)

    def read(self, name: str, index: Index = ()) -> Tensor:
        tensor: Tensor = self._holders[name][1].get_slice(name)[index]
        return tensor


class GgufCheckpoint:
    """Dequantised to float32 tensor by tensor; q and k in Hugging Face's order of rotary pairs."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        self._file = GgufFile(path)
        self._config = config
        names = {name: _from_gguf(name) for name in self._file.tensors if name != "rope_freqs.weight"}
        self._names = {name: own for own, name in names.items()}
        self.shapes = {name: self._file.tensors[own].shape for name, own in self._names.items()}

    def where(self, name: str) -> str:
        return str(self._file.path)

    def read(self, name: str, index: Index = ()) -> Tensor:
        tensor = torch.from_numpy(self._file.read(self._names[name]))
        heads = self._interleaved_heads(name)
        if heads:
            # Llama's converter puts the two numbers of a rotary pair side by side; Hugging Face has all
            # first halves before all second halves.
            pairs = tensor.view(heads, -1, 2, *tensor.shape[1:])
            tensor = pairs.transpose(1, 2).reshape(tensor.shape)
        return tensor[index]

    def _interleaved_heads(self, name: str) -> int:
        if self._config.family != "llama":
            return 0
        return {"q_proj": self._config.num_heads, "k_proj": self._config.num_kv_heads}.get(name.split(".")[-2], 0)


def _from_gguf(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; itself where it has none."""
    match = _GGUF_NAME.fullmatch(name)
    layer = match["layer"] if match else None
    part = (_GGUF_TOP if layer is None else _GGUF_LAYER).get(match["part"]) if match else None
    if match is None or part is None:
        return name
    return f"{part}.{match['kind']}" if layer is None else f"model.layers.{layer}.{part}.{match['kind']}"


class RandomCheckpoint:
    """Normal weights of standard deviation 0.02, norms of one; a tensor depends on its name alone."""

    def __init__(self, shapes: Mapping[str, Shape], device: torch.device) -> None:
        self.shapes = shapes
        self._device = device

    def where(self, name: str) -> str:
        return "weights=random"

    def read(self, name: str, index: Index = ()) -> Tensor:
        shape = self.shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=self._device)[index]
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        return torch.randn(shape, generator=generator, device=self._device)[index].mul_(INITIAL_STD)
