from pathlib import Path

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.support.tiny import CHAT_TEMPLATE, TEXTS, tiny_model
from tests.support.tiny_gguf import tiny_gguf
from toka.gguf_file import GgufFile
from toka.model import open_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"), num_hidden_layers=1)


def test_config_and_tokenizer(tiny: Path, tmp_path: Path) -> None:
    model = open_model(str(tiny_gguf(tiny, tmp_path / "tiny-1B.gguf")))
    original = open_model(str(tiny))
    assert model.name == "tiny-1B"
    changed = {"eos_token_ids"}
    for name in original.config.__slots__:
        if name not in changed:
            assert getattr(model.config, name) == pytest.approx(getattr(original.config, name)), name
    assert model.config.eos_token_ids == (0, 2), "the declared one, and <|im_end|>"
    assert model.chat_template() == CHAT_TEMPLATE
    assert model.special_tokens() == {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    tokenizer = model.tokenizer()
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("<|im_start|>").ids == [1]


def splits(tokenizer: Tokenizer, text: str) -> list[str]:
    assert tokenizer.pre_tokenizer is not None
    return [text[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", " km", "\n", "\n", "ok"]),
        ("llama-bpe", ["It", "'s", " ", "123", "4", " km", "\n\n", "ok"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", " km", "\n\n", "ok"]),
    ],
)
def test_pre_tokenizers(tiny: Path, tmp_path: Path, pre: str, expected: list[str]) -> None:
    tokenizer = open_model(str(tiny_gguf(tiny, tmp_path / "m.gguf", pre=pre))).tokenizer()
    assert splits(tokenizer, "It's 1234 km\n\nok") == expected
    assert (tokenizer.encode("a").ids[0] == 0) == (pre == "llama-bpe"), "llama-bpe begins with bos"
    composed = tokenizer.encode("é", add_special_tokens=False).ids
    assert (tokenizer.encode("e\u0301", add_special_tokens=False).ids == composed) == (pre == "qwen2")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "gemma"}, "general.architecture 'gemma' is not supported; expected one of llama, qwen2"),
        ({"llama__rope__scaling__type": "yarn"}, "rope_scaling of type 'yarn' is not supported"),
    ],
)
def test_config_that_does_not_fit(tiny: Path, tmp_path: Path, options: dict[str, str], message: str) -> None:
    path = tiny_gguf(tiny, tmp_path / "m.gguf", **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message) as error:
        _ = open_model(str(path)).config
    assert str(error.value).startswith(str(path))


def test_unknown_pre_tokenizer_is_named(tiny: Path, tmp_path: Path) -> None:
    model = open_model(str(tiny_gguf(tiny, tmp_path / "m.gguf", pre="tekken")))
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.pre 'tekken' is not supported; expected one of smollm"):
        model.tokenizer()


def test_files_that_are_not_gguf(tiny: Path, tmp_path: Path) -> None:
    whole = tiny_gguf(tiny, tmp_path / "m.gguf").read_bytes()
    cases = {
        b"": "cannot be read",
        b"PK\x03\x04" + whole[4:]: "is not a GGUF file",
        whole[:4] + b"\x09" + whole[5:]: "GGUF version 9 is not supported",
        whole[:6000]: "is a broken GGUF file",
        whole[:24] + b"\xff" * 8 + whole[32:]: "is a broken GGUF file",
    }
    for content, message in cases.items():
        (tmp_path / "bad.gguf").write_bytes(content)
        with pytest.raises(ValueError, match=message):
            open_model(str(tmp_path / "bad.gguf"))
    (tmp_path / "cut.gguf").write_bytes(whole[:-4096])
    cut = GgufFile(tmp_path / "cut.gguf")
    with pytest.raises(ValueError, match="is cut off"):
        cut.read(list(cut.tensors)[-1])


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_dequantisation_is_the_packages(tmp_path: Path, kind: str) -> None:
    quantised = gguf.GGMLQuantizationType[kind]
    values = np.random.default_rng(0).normal(size=(24, 64)).astype(np.float32)
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    data = gguf.quants.quantize(values, quantised)
    writer.add_tensor("t.weight", data, raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = GgufFile(tmp_path / "t.gguf").read("t.weight")
    assert read.dtype == np.float32 and read.shape == (24, 64)
    np.testing.assert_array_equal(read, gguf.quants.dequantize(data, quantised))
    np.testing.assert_allclose(read, values, atol=0.5)


def test_demo_reads_as_the_gguf_package_does() -> None:
    model = open_model("")
    file, reader = GgufFile(model.path), gguf.GGUFReader(model.path)
    for key, count in (("tokenizer.ggml.tokens", 49152), ("tokenizer.ggml.merges", 48900)):
        assert len(file.metadata[key]) == count
        assert file.metadata[key][-500:] == reader.fields[key].contents(slice(-500, None))
    assert len(file.tensors) == len(reader.tensors) == 272
    for tensor in [*reader.tensors[:12], *reader.tensors[-3:]]:
        np.testing.assert_array_equal(file.read(tensor.name), gguf.quants.dequantize(tensor.data, tensor.tensor_type))


def test_demo_tokenizer_and_template() -> None:
    model = open_model("")
    assert model.name == "SmolLM2-135M-Instruct"
    assert model.config.eos_token_ids == (2,) and model.config.max_position_embeddings == 8192
    tokenizer = model.tokenizer()
    for text in (*TEXTS, "In 2024,  12 km\n\n\tx  ", "<|im_start|>user\nhi<|im_end|>"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.encode("In 2024").tokens == ["In", "Ġ", "2", "0", "2", "4"]
    assert tokenizer.encode("<|im_start|>").ids == [1]
    assert model.special_tokens()["eos_token"] == "<|im_end|>"
    template = model.chat_template()
    assert template is not None and "<|im_start|>" in template
