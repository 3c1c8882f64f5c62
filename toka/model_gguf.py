"""A model in a GGUF file: its config and tokenizer as Hugging Face would have written them."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from toka.gguf_file import FLOAT32, GgufFile
from toka.model_config import ModelConfig, parse_config

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_SPLITS = {
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""Pre-tokenizers that are one regex; smollm splits digits, then as GPT-2 does."""
_CONTROL, _USER_DEFINED = 3, 4
_END_OF_TURN = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>")


class GgufModel:
    """See `toka.model.ModelSource`."""

    def __init__(self, path: Path, name: str = "") -> None:
        self.path = path
        self.name = name or path.stem
        self._file = GgufFile(path)

    @cached_property
    def config(self) -> ModelConfig:
        file, architecture = self._file, self._get("general.architecture")
        if architecture not in ARCHITECTURES:
            expected = ", ".join(ARCHITECTURES)
            raise ValueError(
                f"{self.path}: general.architecture {architecture!r} is not supported; expected one of {expected}"
            )
        sizes = {
            "hidden_size": "embedding_length",
            "num_hidden_layers": "block_count",
            "num_attention_heads": "attention.head_count",
            "num_key_value_heads": "attention.head_count_kv",
            "head_dim": "attention.key_length",
            "intermediate_size": "feed_forward_length",
            "max_position_embeddings": "context_length",
            "rms_norm_eps": "attention.layer_norm_rms_epsilon",
            "rope_theta": "rope.freq_base",
        }
        raw = {key: file.metadata.get(f"{architecture}.{name}") for key, name in sizes.items()}
        raw |= {
            "architectures": [ARCHITECTURES[architecture]],
            "vocab_size": self._vocab_size(),
            "tie_word_embeddings": "output.weight" not in file.tensors,
            "attention_bias": "blk.0.attn_q.bias" in file.tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
            "rope_scaling": self._rope_scaling(architecture),
            "dtype": self._dtype(),
            "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        }
        config = parse_config(raw, str(self.path), self._eos_token_ids())
        rotary = f"{architecture}.rope.dimension_count"
        if file.metadata.get(rotary, config.head_dim) != config.head_dim:
            raise ValueError(f"{self.path}: {rotary} {file.metadata[rotary]} is not the head_dim {config.head_dim}")
        return config

    def tokenizer(self) -> Tokenizer:
        """ValueError for a model or pre-tokenizer that is not among those supported."""
        kind, pre = self._get("tokenizer.ggml.model"), self._file.metadata.get("tokenizer.ggml.pre", "")
        if kind != "gpt2":
            raise ValueError(f"{self.path}: tokenizer.ggml.model {kind!r} is not supported; expected 'gpt2'")
        tokens = self._get("tokenizer.ggml.tokens")
        merges = [tuple(each.split(" ")) for each in self._get("tokenizer.ggml.merges")]
        vocab = {token: i for i, token in enumerate(tokens)}
        try:
            tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
        except Exception as error:  # the bindings raise Exception itself
            raise ValueError(f"{self.path}: tokenizer.ggml.merges do not fit the tokens: {error}") from None
        tokenizer.pre_tokenizer = self._pre_tokenizer(pre)
        if pre == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.decoder = decoders.ByteLevel()
        types = self._file.metadata.get("tokenizer.ggml.token_type", [])
        tokenizer.add_special_tokens([_added(t, True) for t, kind in zip(tokens, types) if kind == _CONTROL])
        tokenizer.add_tokens([_added(t, False) for t, kind in zip(tokens, types) if kind == _USER_DEFINED])
        bos = self.special_tokens().get("bos_token")
        if bos and self._file.metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocab[bos])]
            )
        return tokenizer

    def _pre_tokenizer(self, pre: str) -> pre_tokenizers.PreTokenizer:
        if pre == "smollm":
            steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        elif pre in _SPLITS:
            split = pre_tokenizers.Split(Regex(_SPLITS[pre]), "isolated")
            steps = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        else:
            expected = ", ".join(["smollm", *_SPLITS])
            raise ValueError(f"{self.path}: tokenizer.ggml.pre {pre!r} is not supported; expected one of {expected}")
        return pre_tokenizers.Sequence(steps)

    def chat_template(self) -> str | None:
        return self._file.metadata.get("tokenizer.chat_template")

    def special_tokens(self) -> dict[str, str]:
        keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        ids = {key: self._file.metadata.get(f"tokenizer.ggml.{name}_token_id") for key, name in keys.items()}
        tokens = self._file.metadata.get("tokenizer.ggml.tokens", [])
        return {key: tokens[i] for key, i in ids.items() if i is not None and i < len(tokens)}

    def weight_files(self) -> list[Path]:
        return [self.path]

    def _get(self, key: str) -> Any:
        try:
            return self._file.metadata[key]
        except KeyError:
            raise ValueError(f"{self.path}: {key} is missing") from None

    def _vocab_size(self) -> int:
        """Rows of the embedding, which may be padded past the tokens."""
        if "token_embd.weight" not in self._file.tensors:
            raise ValueError(f"{self.path}: token_embd.weight is missing")
        return self._file.tensors["token_embd.weight"].shape[0]

    def _dtype(self) -> str:
        kinds = {tensor.kind for tensor in self._file.tensors.values()}
        return "float32" if kinds == {FLOAT32} else "bfloat16"

    def _rope_scaling(self, architecture: str) -> dict[str, Any]:
        if "rope_freqs.weight" in self._file.tensors:
            return {"rope_type": "factors", "factors": self._file.read("rope_freqs.weight").tolist()}
        kind = self._file.metadata.get(f"{architecture}.rope.scaling.type", "none")
        factor = self._file.metadata.get(f"{architecture}.rope.scaling.factor")
        return {"rope_type": "default" if kind == "none" else kind, "factor": factor}

    def _eos_token_ids(self) -> tuple[int, ...]:
        """The declared ones, and the tokens that end a turn by their known names."""
        meta, tokens = self._file.metadata, self._file.metadata.get("tokenizer.ggml.tokens", [])
        declared = [meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        named = [tokens.index(text) for text in _END_OF_TURN if text in tokens]
        return tuple(dict.fromkeys(i for i in declared + named if i is not None))


def _added(text: str, special: bool) -> AddedToken:
    return AddedToken(text, special=special, normalized=False)
