"""The decoder against transformers on the same weights."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.support.dense_attention import DenseAttention
from tests.support.tiny import tiny_model
from tests.support.tiny_gguf import PARTS, tiny_gguf
from toka.model import ModelSource, open_model
from workers.stage import decoder as decoder_module
from workers.stage.decoder import Decoder
from workers.stage.layers import HalfLinear, PackedLinear, PlainLinear
from workers.stage.weights import load_weights

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "head-dim": ("llama", {"head_dim": 32}),
    "attention-bias": ("llama", {"attention_bias": True}),
    "mlp-bias": ("llama", {"mlp_bias": True}),
    "mha": ("llama", {"num_key_value_heads": 4}),
    "sharded": ("llama", {"shard_size": "100KB"}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3-head-dim-bias": ("qwen3", {"head_dim": 24, "attention_bias": True}),
}
LENGTH = 300


@pytest.fixture(scope="module", params=CASES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, options = CASES[request.param]
    return tiny_model(tmp_path_factory.mktemp("model"), family, **options)


def decoder(source: ModelSource, dtype: str = "auto") -> Decoder:
    return Decoder(source.config, load_weights(source, dtype=dtype))


def logits(model: Decoder, ids: torch.Tensor) -> torch.Tensor:
    return model.logits(model.hidden(ids, torch.arange(len(ids)), DenseAttention(model.config)))


def prompt(length: int = LENGTH, vocabulary: int = 512) -> torch.Tensor:
    return torch.randint(0, vocabulary, (length,), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def test_logits_equal_transformers(folder: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = prompt()
    torch.testing.assert_close(
        logits(decoder(open_model(str(folder))), ids), reference(ids[None]).logits[0], atol=1e-4, rtol=0
    )


@torch.inference_mode()
def test_greedy_tokens_equal_transformers(folder: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids, steps = prompt(20), 12
    expected = reference.generate(ids[None], max_new_tokens=steps, do_sample=False, eos_token_id=None)[0]
    model = decoder(open_model(str(folder)))
    for _ in range(steps):
        ids = torch.cat([ids, logits(model, ids)[-1:].argmax(-1)])
    assert ids.tolist() == expected.tolist()


@torch.inference_mode()
def test_bfloat16_stays_close_to_float32(folder: Path) -> None:
    """Within the error that rounding the weights makes, and with much the same distributions."""
    source, ids = open_model(str(folder)), prompt(100)
    exact, rounded = logits(decoder(source), ids), logits(decoder(source, "bfloat16"), ids)
    assert rounded.dtype == torch.float32
    error = (exact - rounded).pow(2).mean().sqrt() / exact.std()
    assert 0 < error < 0.05


@pytest.mark.parametrize("form", [HalfLinear, PackedLinear, PlainLinear])
@torch.inference_mode()
def test_bfloat16_is_no_worse_than_that_of_transformers(
    form: type, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever the CPU computes its products with."""
    monkeypatch.setattr("workers.stage.layers.bfloat16_product", lambda: form)
    folder = tiny_model(tmp_path, "qwen3")
    ids = prompt(100)
    model = decoder(open_model(str(folder)), "bfloat16")
    assert isinstance(model.weights.head, form)
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids[None]).logits[0]
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)(ids[None]).logits[0].float()
    own_error, reference_error = ((each - exact).pow(2).mean().sqrt() for each in (logits(model, ids), reference))
    assert own_error < reference_error


@torch.inference_mode()
def test_positions_are_free(tmp_path: Path) -> None:
    """Rows of several sequences in one step: each token is rotated by its own position."""
    model = decoder(open_model(str(tiny_model(tmp_path))))
    ids = prompt(40)
    positions = torch.arange(40)
    shifted = model.hidden(ids, positions + 1000, DenseAttention(model.config))
    torch.testing.assert_close(model.hidden(ids, positions, DenseAttention(model.config)), shifted, atol=1e-3, rtol=0)
    apart = model.hidden(ids, positions * 3, DenseAttention(model.config))
    assert (apart - shifted).abs().max() > 0.01


@torch.inference_mode()
def test_logits_in_chunks_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder(open_model(str(tiny_model(tmp_path))))
    hidden = torch.randn(23, 64, generator=torch.Generator().manual_seed(0))
    whole = model.logits(hidden)
    monkeypatch.setattr(decoder_module, "LOGITS_BYTES", 5 * 4 * 512)
    torch.testing.assert_close(model.logits(hidden), whole, atol=1e-5, rtol=0)
    assert model.logits(hidden[:0]).shape == (0, 512)


@pytest.mark.parametrize(
    ("family", "options"), [("llama", {}), ("llama", {"rope_parameters": LLAMA3}), ("qwen2", {}), ("qwen3", {})]
)
@torch.inference_mode()
def test_gguf_equals_its_origin(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    folder = tiny_model(tmp_path / "folder", family, **options)
    file = tiny_gguf(folder, tmp_path / "model.gguf")
    ids = prompt()
    own, origin = (logits(decoder(open_model(str(path))), ids) for path in (file, folder))
    torch.testing.assert_close(own, origin, atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def demo() -> ModelSource:
    """SmolLM2-135M-Instruct, out of its GGUF file."""
    return open_model("")


def demo_in_transformers(demo: ModelSource) -> LlamaForCausalLM:
    """The tensors as `gguf` dequantises them, q and k put in transformers' order here."""
    config, state = demo.config, {}
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    parts = {own: theirs for theirs, own in PARTS.items()}
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    for tensor in gguf.GGUFReader(demo.path).tensors:
        values = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        name = names.get(tensor.name)
        if name is None:
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{parts[part]}.weight"
            if part in heads:
                values = torch.cat([torch.cat([head[0::2], head[1::2]]) for head in values.chunk(heads[part])])
        state[name] = values
    reference = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            vocab_size=49152,
            max_position_embeddings=8192,
            rope_parameters={"rope_type": "default", "rope_theta": 1e5},
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
        )
    )
    assert reference.load_state_dict(state, strict=False).unexpected_keys == []
    return reference.eval()


@torch.inference_mode()
def test_demo_logits_equal_transformers(demo: ModelSource) -> None:
    ids = torch.tensor(demo.tokenizer().encode("In 2024 the old man rowed out beyond the harbour.").ids)
    expected = demo_in_transformers(demo)(ids[None]).logits[0]
    torch.testing.assert_close(logits(decoder(demo, "float32"), ids), expected, atol=1e-3, rtol=0)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_demo_knows_the_capital_of_france(demo: ModelSource, dtype: str) -> None:
    tokenizer, model = demo.tokenizer(), decoder(demo, dtype)
    ids = tokenizer.encode("The capital of France is").ids
    for _ in range(3):
        ids.append(int(logits(model, torch.tensor(ids))[-1].argmax()))
    assert "Paris" in tokenizer.decode(ids)
