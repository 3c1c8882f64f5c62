"""Requests and model shapes for throughput figures: the same for every engine, and on every machine.

Weights may be random: requests run to the number of output tokens that they name, save those with stop ids,
which nobody knows the length of beforehand. Lengths are log-normal, with the means that public data sets have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

VOCABULARY = 128_256


class Request(NamedTuple):
    prompt: list[int]
    outputs: int
    """Output tokens; at most so many where there are stop ids."""
    stop_ids: tuple[int, ...] = ()


def _lengths(
    rng: np.random.Generator, count: int, mean: float, sigma: float, least: int, most: int
) -> NDArray[np.int64]:
    drawn = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return np.clip(drawn.round().astype(np.int64), least, most)


def _ids(rng: np.random.Generator, count: int, vocabulary: int) -> list[int]:
    ids: list[int] = rng.integers(10, vocabulary - 300, count).tolist()
    return ids


def sharegpt(count: int = 3000, vocabulary: int = VOCABULARY) -> list[Request]:
    """Chats that share nothing: about 220 tokens in, 200 out."""
    rng = np.random.default_rng(0)
    prompts = _lengths(rng, count, 220, 1.0, 4, 1024)
    outputs = _lengths(rng, count, 200, 0.9, 4, 1024)
    return [Request(_ids(rng, int(n), vocabulary), int(out)) for n, out in zip(prompts, outputs)]


def monkeys(count: int = 32, vocabulary: int = VOCABULARY) -> list[Request]:
    """128 samples each of `count` problems of some 100 tokens, all behind the same 700 tokens; 150 out."""
    rng = np.random.default_rng(0)
    examples = _ids(rng, 700, vocabulary)
    requests: list[Request] = []
    for length in _lengths(rng, count, 100, 0.4, 30, 300):
        prompt = examples + _ids(rng, int(length), vocabulary)
        requests += [Request(prompt, int(out)) for out in _lengths(rng, 128, 150, 0.5, 20, 512)]
    return requests


def longdoc(count: int = 4, vocabulary: int = VOCABULARY) -> list[Request]:
    """256 questions of 40 tokens on each of `count` documents of 8,192; 100 out."""
    rng = np.random.default_rng(0)
    requests: list[Request] = []
    for _ in range(count):
        document = _ids(rng, 8192, vocabulary)
        outputs = _lengths(rng, 256, 100, 0.5, 16, 256)
        requests += [Request(document + _ids(rng, 40, vocabulary), int(out)) for out in outputs]
    return requests


def summarize(count: int = 400, vocabulary: int = VOCABULARY) -> list[Request]:
    """Prompts of some 3,000 tokens that share nothing; 60 out."""
    rng = np.random.default_rng(0)
    prompts = _lengths(rng, count, 3000, 0.3, 1000, 6000)
    outputs = _lengths(rng, count, 60, 0.4, 16, 128)
    return [Request(_ids(rng, int(n), vocabulary), int(out)) for n, out in zip(prompts, outputs)]


def early_stop(count: int = 3000, vocabulary: int = VOCABULARY) -> list[Request]:
    """The prompts of `sharegpt`; any of 640 ids ends an output, so that random weights stop after some 200 tokens."""
    rng = np.random.default_rng(1)
    stop_ids: tuple[int, ...] = tuple(rng.choice(vocabulary - 256, 640, replace=False).tolist())
    return [Request(prompt, 1024, stop_ids) for prompt, _, _ in sharegpt(count, vocabulary)]


WORKLOADS: dict[str, Callable[..., list[Request]]] = {
    each.__name__: each for each in (sharegpt, monkeys, longdoc, summarize, early_stop)
}


def named(names: str, vocabulary: int) -> dict[str, list[Request]]:
    """The workloads that `names` lists with commas, each with `:count` where it is not to have its own number."""
    found = {}
    for name in filter(None, names.split(",")):
        kind, _, count = name.partition(":")
        found[name] = WORKLOADS[kind](**({"count": int(count)} if count else {}), vocabulary=vocabulary)
    return found


_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 131_072,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 128_000,
    "eos_token_id": 128_001,
}
_LLAMA_SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-1b": _LLAMA
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "intermediate_size": 8192,
        "tie_word_embeddings": True,
        "rope_scaling": _LLAMA_SCALING | {"factor": 32.0},
    },
    "llama-8b": _LLAMA
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "head_dim": 128,
        "intermediate_size": 14_336,
        "tie_word_embeddings": False,
        "rope_scaling": _LLAMA_SCALING | {"factor": 8.0},
    },
    "qwen2.5-7b": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18_944,
        "vocab_size": 152_064,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 32_768,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": 151_643,
        "eos_token_id": 151_645,
    },
}
"""Keys of the config.json of public models."""
