"""The demo model as a Hugging Face folder, for peers that read nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from toka.gguf_file import GgufFile
from toka.model import ModelSource, open_model

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def demo_folder(cache: Path, dtype: str = "bfloat16") -> Path:
    """The converted demo model in `cache`, in one dtype for all, written first where it is missing."""
    source = open_model("")
    folder = cache / source.name
    if not folder.exists():
        partial = cache / f"{source.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write(source, partial, dtype)
        partial.rename(folder)
    return folder


def _write(source: ModelSource, folder: Path, dtype: str) -> None:
    import torch
    from safetensors.torch import save_file

    file = GgufFile(source.path)
    arrays = {_name(name): _halves_apart(source, name, file.read(name)) for name in file.tensors}
    tensors = {name: torch.tensor(array).to(getattr(torch, dtype)) for name, array in arrays.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    source.tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(_config(source, dtype), indent=2))
    specials = source.special_tokens()
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": specials["bos_token"],
        "eos_token": specials["eos_token"],
        "pad_token": specials["eos_token"],
        "clean_up_tokenization_spaces": False,
        "chat_template": source.chat_template(),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=2))


def _config(source: ModelSource, dtype: str) -> dict[str, Any]:
    config = source.config
    assert config.family == "llama" and config.tie_word_embeddings and config.rope_scaling is None
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": True,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_ids[0],
        "pad_token_id": config.eos_token_ids[0],
        "dtype": dtype,
    }


def _name(name: str) -> str:
    """`blk.3.attn_q.weight` as `model.layers.3.self_attn.q_proj.weight`."""
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.weight"
    return f"{OTHER_NAMES[parts[0]]}.weight"


def _halves_apart(source: ModelSource, name: str, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Llama GGUF files interleave the rotary halves of q and k; Hugging Face has one after the other."""
    heads = {"attn_q": source.config.num_heads, "attn_k": source.config.num_kv_heads}.get(name.split(".")[-2])
    if heads is None:
        return values
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
