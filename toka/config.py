"""Every setting of Toka, declared once: name, type, default, bounds, help, and the parts that take it.

A setting comes, strongest first, from the command line (`key=value` or `--key value`), from `TOKA_KEY`
in the environment, or from the YAML file that `config=` names.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ALL = ("frontend", "broker", "worker")
MIB = 1 << 20


def setting(
    default: Any,
    help: str,
    parts: Sequence[str] = ALL,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: Sequence[str] = (),
) -> Any:
    """A dataclass field that is a setting; `low` and `high` are inclusive bounds."""
    metadata = {"help": help, "parts": tuple(parts), "low": low, "high": high, "choices": tuple(choices)}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of one start. See `toka --help` for their meaning."""

    config: str = setting("", "YAML file whose keys are settings")

    # The model
    model: str = setting("", "folder, hub id or .gguf file; empty: the demo model", ("frontend", "worker"))
    served_model_name: str = setting("", "name in the API; empty: the model's own", ("frontend", "worker"))
    weights: str = setting("auto", "random: make them up from a config", ("worker",), choices=("auto", "random"))
    dtype: str = setting(
        "auto", "of weights and KV cache", ("frontend", "worker"), choices=("auto", "float32", "bfloat16", "float16")
    )
    device: str = setting("auto", "where the stages run", ("worker",), choices=("auto", "cpu", "cuda"))
    max_context: int = setting(0, "most tokens of prompt and output together; 0: the model's", ("worker",), low=0)

    # HTTP
    host: str = setting("127.0.0.1", "address the server listens on; `unix:`: files in run_dir", ("frontend",))
    port: int = setting(10210, "port the server listens on; 0: any free one", ("frontend",), low=0, high=65535)
    frontends: int = setting(1, "processes that serve HTTP, all on the one port", (), low=1, high=64)
    max_body_bytes: int = setting(64 * MIB, "largest request body", ("frontend",), low=1024)
    max_n: int = setting(1024, "most samples of one prompt", ("frontend",), low=1)
    max_samples: int = setting(16_384, "most samples of one request, all its prompts together", ("frontend",), low=1)
    body_bytes: int = setting(2048 * MIB, "most bytes of bodies that a frontend holds", ("frontend",), low=1024)
    client_chat_template: bool = setting(False, "let requests bring a chat template of their own", ("frontend",))
    ping_seconds: float = setting(15.0, "silence on a stream before a comment line is sent", ("frontend",), low=0.01)

    # Files and batches
    data_dir: str = setting("", "folder for files and batches; empty: there are none", ("frontend",))
    max_file_size: int = setting(10 << 30, "largest file that is taken, in bytes", ("frontend",), low=1)
    batch_items: int = setting(
        4096, "requests of batches that are in the engine at once; offline: for each replica", ("frontend",), low=1
    )

    # Processes
    broker: str = setting("", "the broker's address, ipc://PATH or tcp://HOST:PORT; `toka` chooses one")
    keys: str = setting("", "folder of toka-keygen; needed over tcp unless the broker's address is loopback")
    replica: str = setting("", "name of this replica at the broker; empty: drawn", ("worker",))
    run_dir: str = setting("", "folder for socket files; empty: a new private one")
    shutdown_timeout: float = setting(30.0, "seconds that running requests have to finish on SIGTERM", low=0)
    start_timeout: float = setting(600.0, "seconds a part may take to become ready", low=1)
    restart_limit: int = setting(3, "failed restarts of a part in a row before the server gives up", low=0)
    log_level: str = setting("info", "least severe log lines shown", choices=("debug", "info", "warning", "error"))

    # Queueing
    queue_requests: int = setting(200_000, "most requests that wait; one more gets 429", ("broker",), low=1)
    queue_bytes: int = setting(2048 * MIB, "most bytes that waiting requests may take", ("broker",), low=1)

    # Many GPUs
    dp_size: int = setting(1, "replicas of the model", (), low=1, high=1024)
    pp_size: int = setting(1, "pipeline stages of a replica", ("worker",), low=1, high=256)
    tp_size: int = setting(1, "ranks that share each layer's tensors", ("worker",), low=1, high=64)
    pp_layers: str = setting("", "layers of each pipeline stage, as 17,15; empty: by their cost", ("worker",))

    nodes: int = setting(1, "workers, each on a host, that have one replica's stages between them", ("worker",), low=1)
    node_rank: int = setting(0, "which of them this is; 0 has the manager, too", ("worker",), low=0)
    rendezvous: str = setting(
        "", "where the stages of several nodes find their manager: tcp://HOST:PORT of node 0", ("worker",)
    )

    # The engine
    page_size: int = setting(16, "tokens of one KV page", ("worker",), low=1, high=1024)
    kv_cache_tokens: int = setting(0, "tokens the KV cache holds; 0: what memory allows", ("worker",), low=0)
    max_seqs: int = setting(0, "sequences run at once; 0: what memory allows", ("worker",), low=0)
    max_tokens_per_step: int = setting(0, "tokens of one forward pass; 0: chosen by device", ("worker",), low=0)
    prefill_chunk: int = setting(0, "most prompt tokens of a sequence in a step; 0: no limit", ("worker",), low=0)
    run_ahead: int = setting(2, "passes of a sequence planned ahead of its results", ("worker",), low=1, high=16)
    prefix_cache: bool = setting(True, "keep and share the KV pages of equal prefixes", ("worker",))
    shared_prefix: bool = setting(True, "compute attention over a shared prefix once for all its rows", ("worker",))
    max_logprobs: int = setting(20, "most top logprobs of a request", ("frontend", "worker"), low=0, high=1000)
    trace: str = setting("", "file for a timeline of manager and stages, for ui.perfetto.dev", ("worker",))
    trace_kernels: int = setting(
        0, "first steps whose kernels (on a CPU: operators) the trace shows", ("worker",), low=0, high=10_000
    )
    torch_compile: bool = setting(False, "have torch.compile make the norms and activations of a GPU", ("worker",))
    threads: int = setting(0, "CPU threads of a stage; 0: chosen by the cores there are", ("worker",), low=0)


def settings(part: str | None = None) -> dict[str, dataclasses.Field[Any]]:
    """The settings that `part` takes, by name; all of them for None."""
    fields = {f.name: f for f in dataclasses.fields(Config)}
    return {k: f for k, f in fields.items() if part is None or part in f.metadata["parts"]}


def load(args: Sequence[str], part: str | None = None, environ: Mapping[str, str] = os.environ) -> Config:
    """The Config that `args` (without the program's name), the environment and a YAML file give.

    Raises ValueError, in one sentence that names the setting, for an unknown key or a wrong value.
    """
    known = settings(part)
    values: dict[str, Any] = {}
    for name in known:
        raw = environ.get(f"TOKA_{name.upper()}")
        if raw is not None:
            values[name] = _value(known[name], raw, f"TOKA_{name.upper()}")
    for key, raw in pairs(args):
        values[key] = _value(_known(known, key), raw, key)
    if values.get("config"):
        values = _file(known, values["config"]) | values
    return Config(**values)


def arguments(config: Config, part: str | None = None) -> list[str]:
    """The `key=value` arguments that make `load(..., part)` give what `config` holds for that part."""
    given = {k: getattr(config, k) for k, f in settings(part).items() if getattr(config, k) != f.default}
    given.pop("config", None)
    return [f"{key}={value}" for key, value in given.items()]


def help_text(program: str, summary: str, part: str | None = None) -> str:
    """What `program --help` prints: every setting with its default."""
    lines = [f"{program}: {summary}", "", f"usage: {program} [key=value | --key value] ...", ""]
    for name, each in settings(part).items():
        choices = each.metadata["choices"]
        kind = "|".join(choices) if choices else _type(each).__name__
        default = each.default if each.default != "" else '""'
        lines.append(f"  {name + '=' + kind:<34} {each.metadata['help']} [{default}]")
    lines += ["", "The same names work as TOKA_NAME in the environment and as keys of the file config=."]
    return "\n".join(lines)


def pairs(args: Sequence[str]) -> list[tuple[str, str]]:
    """The names and values in `args`. ValueError, in one sentence, for what is neither."""
    found: list[tuple[str, str]] = []
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        key, equals, value = arg.removeprefix("--").partition("=")
        if not equals:
            if not arg.startswith("--") or not rest:
                raise ValueError(f"{arg!r}: expected key=value or --key value")
            value = rest.pop(0)
        found.append((key.replace("-", "_"), value))
    return found


def _known(known: Mapping[str, dataclasses.Field[Any]], key: str) -> dataclasses.Field[Any]:
    if key in known:
        return known[key]
    near = difflib.get_close_matches(key, known, n=1)
    raise ValueError(f"unknown setting {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""))


def _file(known: Mapping[str, dataclasses.Field[Any]], path: str) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"config: cannot read {path}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"config: {path} is not a mapping of settings")
    return {str(key): _value(_known(known, str(key)), raw, f"{path}: {key}") for key, raw in content.items()}


def _type(each: dataclasses.Field[Any]) -> type:
    hint = typing.get_type_hints(Config)[each.name]
    assert isinstance(hint, type) and not isinstance(hint, types.UnionType)
    return hint


_BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def _value(each: dataclasses.Field[Any], raw: Any, where: str) -> Any:
    """`raw` (text, or a YAML scalar) as the setting's type, within its bounds."""
    kind, meta, text = _type(each), each.metadata, str(raw).strip()
    try:
        value = _BOOLEANS[text.lower()] if kind is bool else text if kind is str else kind(text)
    except (KeyError, ValueError):
        expected = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
        raise ValueError(f"{where}: expected {expected}, got {text!r}") from None
    if meta["choices"] and value not in meta["choices"]:
        raise ValueError(f"{where}: expected one of {', '.join(meta['choices'])}, got {text!r}")
    low, high = meta["low"], meta["high"]
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        bounds = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{where}: expected {bounds}, got {text}")
    return value
