"""What a model is: its sizes and options, read from a Hugging Face config and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "bfloat16"}
"""Config dtype to run dtype: float16 weights run in bfloat16, which has their size and no overflow."""
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "qwen2": {"max_position_embeddings": 32768},
    "qwen3": {"max_position_embeddings": 32768, "head_dim": 128},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are slowed for long contexts.

    `linear` divides all by `factor`; `llama3` divides the low ones, with a smooth passage between the
    wavelengths `original_max_position / low_freq_factor` and `.../ high_freq_factor` (Llama 3.1);
    `factors` divides frequency i by `factors[i]` (how GGUF files state it).
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and options of a decoder-only transformer."""

    family: str
    """llama, qwen2 or qwen3."""
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    attention_bias: bool
    """Of the q, k and v projections."""
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: str
    """float32 or bfloat16: what `dtype=auto` runs in."""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None


def parse_config(raw: Mapping[str, Any], where: str, eos_token_ids: tuple[int, ...] | None = None) -> ModelConfig:
    """The ModelConfig in `raw`, a Hugging Face config; `where` names its file in errors.

    `eos_token_ids` overrides the config's own. Raises ValueError, in one sentence that names file and
    key, for what is missing, wrong or not supported.
    """
    reader = _Reader(raw, where)
    family = _family(reader)
    reader.raw = _DEFAULTS[family] | {k: v for k, v in raw.items() if v is not None}
    _refuse_unsupported(reader)
    hidden, heads = reader.size("hidden_size"), reader.size("num_attention_heads")
    theta, scaling = _rope(reader)
    if eos_token_ids is None:
        eos_token_ids = token_ids(reader.raw.get("eos_token_id"), where)
    config = ModelConfig(
        family=family,
        hidden_size=hidden,
        num_layers=reader.size("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=reader.size("num_key_value_heads", heads),
        head_dim=reader.size("head_dim", hidden // heads),
        intermediate_size=reader.size("intermediate_size"),
        vocab_size=reader.size("vocab_size"),
        max_position_embeddings=reader.size("max_position_embeddings"),
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=reader.flag("tie_word_embeddings"),
        attention_bias=family == "qwen2" or reader.flag("attention_bias"),
        attention_output_bias=family != "qwen2" and reader.flag("attention_bias"),
        mlp_bias=family == "llama" and reader.flag("mlp_bias"),
        qk_norm=family == "qwen3",
        dtype=_dtype(reader),
        eos_token_ids=eos_token_ids,
        bos_token_id=next(iter(token_ids(reader.raw.get("bos_token_id"), where, "bos_token_id")), None),
    )
    _check_sizes(config, reader)
    return config


def token_ids(value: Any, where: str, key: str = "eos_token_id") -> tuple[int, ...]:
    """A config's token id, list of ids or null as a tuple."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise ValueError(f"{where}: {key} must be a token id or a list of them, not {value!r}")
    return tuple(dict.fromkeys(ids))


class _Reader:
    """Typed look-ups in a config, whose errors name the file and the key."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where

    def error(self, key: str, problem: str) -> ValueError:
        return ValueError(f"{self.where}: {key} {problem}")

    def size(self, key: str, default: int | None = None) -> int:
        value = self.raw.get(key, default)
        if value is None:
            raise self.error(key, "is missing")
        if type(value) is not int or value <= 0:
            raise self.error(key, f"must be a positive whole number, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.raw.get(key, default)
        if value is None:
            raise self.error(key, "is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.error(key, f"must be a positive number, not {value!r}")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.raw.get(key, False)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, not {value!r}")
        return value


def _family(reader: _Reader) -> str:
    architectures = reader.raw.get("architectures") or []
    model_type = reader.raw.get("model_type")
    if architectures:
        named, family = ", ".join(map(str, architectures)), ARCHITECTURES.get(architectures[0])
    else:
        named, family = str(model_type), model_type if model_type in ARCHITECTURES.values() else None
    if family is None:
        supported = ", ".join(ARCHITECTURES)
        raise reader.error("architectures", f"{named} is not supported; expected one of {supported}")
    return family


def _refuse_unsupported(reader: _Reader) -> None:
    raw = reader.raw
    if raw.get("quantization_config"):
        raise reader.error("quantization_config", "is not supported; use a checkpoint that is not quantised")
    if raw.get("hidden_act", "silu") != "silu":
        raise reader.error("hidden_act", f"{raw['hidden_act']!r} is not supported; expected 'silu'")
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        raise reader.error("partial_rotary_factor", f"{raw['partial_rotary_factor']!r} is not supported; expected 1.0")
    odd = set(raw.get("layer_types") or []) - {"full_attention"}
    if odd:
        raise reader.error("layer_types", f"{', '.join(sorted(map(str, odd)))} is not supported")
    windowed = raw.get("use_sliding_window") and raw.get("max_window_layers", 0) < reader.size("num_hidden_layers")
    if "layer_types" not in raw and windowed:
        raise reader.error("use_sliding_window", "is not supported")


def _rope(reader: _Reader) -> tuple[float, RopeScaling | None]:
    """theta and scaling from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`."""
    key = "rope_parameters" if "rope_parameters" in reader.raw else "rope_scaling"
    raw = reader.raw.get(key, {})
    if not isinstance(raw, dict):
        raise reader.error(key, f"must be a mapping, not {raw!r}")
    inner = _Reader(raw, f"{reader.where}: {key}")
    theta = inner.number("rope_theta") if "rope_theta" in raw else reader.number("rope_theta", 10000.0)
    kind = raw.get("rope_type", raw.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling(kind=kind, factor=inner.number("factor"))
    if kind == "factors":
        return theta, RopeScaling(kind=kind, factors=tuple(raw["factors"]))
    if kind != "llama3":
        raise reader.error(key, f"of type {kind!r} is not supported; expected default, linear or llama3")
    scaling = RopeScaling(
        kind=kind,
        factor=inner.number("factor"),
        low_freq_factor=inner.number("low_freq_factor"),
        high_freq_factor=inner.number("high_freq_factor"),
        original_max_position=inner.size("original_max_position_embeddings"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise inner.error("high_freq_factor", "must be greater than low_freq_factor")
    return theta, scaling


def _dtype(reader: _Reader) -> str:
    key = "dtype" if "dtype" in reader.raw else "torch_dtype"
    named = str(reader.raw.get(key, "float32")).removeprefix("torch.")
    if named not in DTYPES:
        raise reader.error(key, f"{named!r} is not supported; expected one of {', '.join(DTYPES)}")
    return DTYPES[named]


def _check_sizes(config: ModelConfig, reader: _Reader) -> None:
    if config.num_heads % config.num_kv_heads:
        raise reader.error(
            "num_key_value_heads", f"{config.num_kv_heads} does not divide num_attention_heads {config.num_heads}"
        )
    if "head_dim" not in reader.raw and config.hidden_size % config.num_heads:
        raise reader.error(
            "num_attention_heads", f"{config.num_heads} does not divide hidden_size {config.hidden_size}"
        )
    if config.head_dim % 2:
        raise reader.error("head_dim", f"{config.head_dim} is odd; rotary embedding needs pairs")
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "factors" and len(scaling.factors) != config.head_dim // 2:
        raise reader.error("rope factors", f"are {len(scaling.factors)}; head_dim needs {config.head_dim // 2}")
    for token in config.eos_token_ids:
        if token >= config.vocab_size:
            raise reader.error("eos_token_id", f"{token} is outside the vocabulary of {config.vocab_size}")
