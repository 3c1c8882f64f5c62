"""A model in a Hugging Face folder, or in a repository of the hub that becomes one."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from toka.model_config import ModelConfig, parse_config, token_ids

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class FolderModel:
    """config.json, tokenizer.json and safetensors in one folder. See `toka.model.ModelSource`."""

    def __init__(self, path: Path, name: str = "", fetch_weights: Callable[[], object] = lambda: None) -> None:
        """`fetch_weights` is called before the first look at the weights, to bring them to `path`."""
        self.path = path
        self.name = name or path.resolve().name
        self._fetch_weights = fetch_weights
        if not (path / "config.json").is_file():
            raise ValueError(f"{path}: has no config.json, so it is not a model's folder")

    @cached_property
    def config(self) -> ModelConfig:
        raw = _read_json(self.path / "config.json")
        where = self.path / "generation_config.json"
        eos = token_ids(_read_json(where).get("eos_token_id"), str(where)) if where.is_file() else ()
        eos = eos or token_ids(raw.get("eos_token_id"), str(self.path / "config.json")) or self._tokenizer_eos()
        return parse_config(raw, str(self.path / "config.json"), eos)

    def _tokenizer_eos(self) -> tuple[int, ...]:
        text = self.special_tokens().get("eos_token")
        token = self.tokenizer().token_to_id(text) if text else None
        return () if token is None else (token,)

    def tokenizer(self) -> Tokenizer:
        path = self.path / "tokenizer.json"
        if path.is_file():
            try:
                tokenizer = Tokenizer.from_file(str(path))
            except Exception as error:  # the bindings raise Exception itself
                raise ValueError(f"{path}: is not a tokenizer: {error}") from None
            tokenizer.no_truncation()
            tokenizer.no_padding()
            return tokenizer
        if any(self.path.glob("*.safetensors")) or any(self.path.glob("tokenizer*")):
            raise ValueError(f"{path}: is missing; other kinds of tokenizer are not supported")
        return byte_tokenizer()

    def chat_template(self) -> str | None:
        path = self.path / "chat_template.jinja"
        if path.is_file():
            return path.read_text()
        template = self._tokenizer_config.get("chat_template")
        if isinstance(template, list):
            named = {each["name"]: each["template"] for each in template}
            template = named.get("default") or next(iter(named.values()), None)
        return template

    def special_tokens(self) -> dict[str, str]:
        path = self.path / "special_tokens_map.json"
        raw = (_read_json(path) if path.is_file() else {}) | self._tokenizer_config
        texts = {k: v["content"] if isinstance(v, dict) else v for k, v in raw.items() if k in SPECIAL_TOKENS}
        return {k: v for k, v in texts.items() if v is not None}

    @cached_property
    def _tokenizer_config(self) -> dict[str, Any]:
        path = self.path / "tokenizer_config.json"
        return _read_json(path) if path.is_file() else {}

    def weight_files(self) -> list[Path]:
        self._fetch_weights()
        index = self.path / "model.safetensors.index.json"
        if index.is_file():
            files = sorted({self.path / name for name in _read_json(index).get("weight_map", {}).values()})
        else:
            files = [self.path / "model.safetensors"]
        for file in files:
            if not file.is_file():
                raise ValueError(f"{file}: is missing; weights=random would make weights up")
        return files


def byte_tokenizer() -> Tokenizer:
    """One token a byte, id = byte: stands in where a folder has a config and nothing else."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    # GPT-2's alphabet: printable bytes stand for themselves, the others, in order, for 256, 257, ...
    moved = iter(sorted(c for c in letters if ord(c) >= 256))
    vocab = {chr(byte) if chr(byte) in letters else next(moved): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: is not a JSON object")
    return value
