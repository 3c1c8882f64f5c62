"""Turns a tiny Hugging Face folder into a GGUF file, as llama.cpp's converter does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def tiny_gguf(folder: Path, path: Path, *, pre: str = "smollm", architecture: str = "", **metadata: Any) -> Path:
    """Write the model in `folder` to `path` in float32; `metadata` adds string keys, `__` for a dot."""
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    family = config["model_type"]
    writer = gguf.GGUFWriter(path, architecture or family)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    _add_tokenizer(writer, folder, pre)
    for key, value in metadata.items():
        writer.add_string(key.replace("__", "."), value)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in load_file(folder / "model.safetensors").items():
        count = heads.get(name.split(".")[-2], 0) if family == "llama" else 0
        writer.add_tensor(_name(name), _interleave(tensor, count) if count else tensor)
    if config["rope_parameters"]["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: Any, folder: Path, pre: str) -> None:
    raw = json.loads((folder / "tokenizer.json").read_text())
    tokens = sorted(raw["model"]["vocab"], key=raw["model"]["vocab"].__getitem__)
    specials = {each["content"] for each in raw["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in specials else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in raw["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template((folder / "chat_template.jinja").read_text())


def _name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    layer, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{PARTS[part]}.{kind}"


def _interleave(tensor: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(tensor.shape))


def _llama3_factors(config: dict[str, Any]) -> npt.NDArray[np.float32]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**config), "cpu")
    exponents = np.arange(0, config["head_dim"], 2) / config["head_dim"]
    plain = config["rope_parameters"]["rope_theta"] ** -exponents
    return np.asarray(plain / scaled.numpy(), np.float32)
