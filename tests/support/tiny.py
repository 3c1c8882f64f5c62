"""Tiny random models in Hugging Face folders, made by transformers, with real tokenizers."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

VOCAB_SIZE = 512
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = (
    "The sea was calm in the morning, and the old man rowed out beyond the harbour before anyone else was awake.",
    "Once upon a time there lived a clockmaker who could mend everything except the clock in his own kitchen.",
    "def add(first, second):\n    return first + second\n\n\nprint(add(1, 2), [3, 4, 5], {'six': 7.89})\n",
    "user: What is the capital of France?\nassistant: The capital of France is Paris, a city on the river Seine.",
    "Zwölf Boxkämpfer jagen Viktor quer über den Sylter Deich; naïve café déjà vu; größer, schöner, älter.",
    "Привет, как дела? 今日は良い天気ですね。 😀🚀 1234567890 !@#$%^&*()_+-=[]{}|;':\",./<>?",
    "Questions are answered one by one; whoever waits longest is served first, and nobody is ever forgotten.",
)


def tiny_model(path: Path, family: str = "llama", *, shard_size: str = "5GB", seed: int = 0, **overrides: Any) -> Path:
    """Write a random model of `family` (llama, qwen2, qwen3) to the folder `path` and return it.

    `overrides` are keys of its transformers config. Weights are far from zero, norms from one and biases
    from zero, so that a weight left out shows, and greedy text does not end in a loop at once.
    """
    import torch

    model = _architecture(family)(_config(family, overrides))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            std = 0.5 if "embed" in name else 0.1 if parameter.ndim == 1 else 0.15
            noise = torch.randn(parameter.shape, generator=generator) * std
            parameter.copy_(1 + noise if name.endswith("norm.weight") else noise)
    model.save_pretrained(path, max_shard_size=shard_size)
    tiny_tokenizer(path, model.config.vocab_size)
    return path


def tiny_config(path: Path, family: str = "llama", **overrides: Any) -> Path:
    """As `tiny_model`, without the weights: for `weights=random`."""
    config = _config(family, overrides)
    config.architectures = [_architecture(family).__name__]
    config.save_pretrained(path)
    tiny_tokenizer(path, config.vocab_size)
    return path


def tiny_tokenizer(path: Path, vocab_size: int = VOCAB_SIZE) -> None:
    """Write a byte-level BPE tokenizer of `vocab_size` tokens, with specials and a chat template, to `path`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(itertools.chain(TEXTS), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=SPECIALS[0], eos_token=SPECIALS[2], pad_token=SPECIALS[0]
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(path)


def _architecture(family: str) -> Any:
    import transformers

    names = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    return getattr(transformers, names[family])


def _config(family: str, overrides: dict[str, Any]) -> Any:
    """hidden 64, 3 layers, 4 heads over 2 KV heads, context 4096, float32."""
    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "dtype": "float32",
    }
    return _architecture(family).config_class(**(values | overrides))
