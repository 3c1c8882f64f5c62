from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.dense_attention import DenseAttention
from tests.support.tiny import tiny_config, tiny_model
from tests.support.tiny_gguf import tiny_gguf
from toka.model import open_model
from workers.stage import layers
from workers.stage.checkpoints import Checkpoint, RandomCheckpoint
from workers.stage.decoder import Decoder
from workers.stage.layers import HalfLinear, PackedLinear, PlainLinear
from workers.stage.partition import Partition
from workers.stage.weights import Weights, expected_shapes, load_weights, open_checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"), "qwen2", num_hidden_layers=2)


def altered(tiny: Path, path: Path, **changes: Tensor | None) -> Path:
    """A copy of `tiny` with tensors replaced, added, or, where None, left out; `__` stands for a dot."""
    tensors = load_file(tiny / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    for file in tiny.iterdir():
        if file.suffix == ".json":
            (path / file.name).write_bytes(file.read_bytes())
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.norm.weight", None, "tensor model.norm.weight of shape [64] is missing"),
        ("model.layers.1.self_attn.k_proj.bias", None, "self_attn.k_proj.bias of shape [32] is missing"),
        ("lm_head.weight", None, "tensor lm_head.weight of shape [512, 64] is missing"),
        (
            "model.layers.0.mlp.up_proj.weight",
            torch.zeros(111, 64),
            "tensor model.layers.0.mlp.up_proj.weight has shape [111, 64], the config says [112, 64]",
        ),
        (
            "model.layers.1.self_attn.o_proj.bias",
            torch.zeros(64),
            "model.layers.1.self_attn.o_proj.bias of shape [64] is not one that the config of this qwen2 model",
        ),
        ("model.layers.2.mlp.up_proj.weight", torch.zeros(112, 64), "model.layers.2.mlp.up_proj.weight of shape"),
    ],
)
def test_tensor_that_does_not_fit(tiny: Path, tmp_path: Path, name: str, tensor: Tensor | None, message: str) -> None:
    path = altered(tiny, tmp_path, **{name.replace(".", "__"): tensor})
    with pytest.raises(ValueError) as error:
        load_weights(open_model(str(path)))
    assert message in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).startswith(f"{path / 'model.safetensors'}: ")


def test_file_that_is_not_safetensors(tiny: Path, tmp_path: Path) -> None:
    path = altered(tiny, tmp_path)
    (path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors: cannot be read"):
        load_weights(open_model(str(path)))


def test_leftovers_of_known_kinds_are_ignored(tmp_path: Path) -> None:
    """A tied model that repeats its embedding as the head, and old rotary tables."""
    (tmp_path / "tied").mkdir()
    tied = tiny_model(tmp_path / "origin", tie_word_embeddings=True, num_hidden_layers=1)
    inverse = {"model__layers__0__self_attn__rotary_emb__inv_freq": torch.zeros(8)}
    load_weights(open_model(str(altered(tied, tmp_path / "tied", lm_head__weight=torch.zeros(512, 64), **inverse))))


def tensors(weights: Weights) -> dict[str, Tensor]:
    """Of a whole model, or of a rank's share of it."""
    assert weights.embedding is not None and weights.norm is not None and weights.head is not None
    found = {"embedding": weights.embedding, "norm": weights.norm.weight}
    linears = {"head": weights.head}
    for i, layer in enumerate(weights.layers):
        linears |= {f"{i}.{name}": getattr(layer, name) for name in ("qkv", "output", "gate_up", "down")}
        found |= {f"{i}.{name}": getattr(layer, name).weight for name in ("attention_norm", "mlp_norm")}
    for name, linear in linears.items():
        if isinstance(linear, HalfLinear):
            unpacked = [torch.ops.quantized.linear_unpack_fp16(part) for part in linear.packed]
            found[f"{name}.weight"] = torch.cat([weight for weight, _ in unpacked]).to(weights.dtype)
            if unpacked[0][1] is not None:
                found[f"{name}.bias"] = torch.cat([bias for _, bias in unpacked])
        else:
            assert isinstance(linear, PackedLinear | PlainLinear)
            weight = linear.packed.to_dense() if isinstance(linear, PackedLinear) else linear.weight
            found |= {f"{name}.weight": weight} | ({} if linear.bias is None else {f"{name}.bias": linear.bias})
    return found


@pytest.mark.parametrize("form", [HalfLinear, PackedLinear, PlainLinear])
def test_bfloat16_reaches_every_tensor(tiny: Path, form: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a float32 checkpoint; packed as float16, the values are the bfloat16 ones."""
    exact = tensors(load_weights(open_model(str(tiny)), dtype="float32"))
    monkeypatch.setattr(layers, "bfloat16_product", lambda: form)
    rounded = tensors(load_weights(open_model(str(tiny)), dtype="bfloat16"))
    assert exact.keys() == rounded.keys() and any("bias" in name for name in exact)
    for name, tensor in rounded.items():
        assert exact[name].dtype == torch.float32
        if form is not HalfLinear:
            assert tensor.dtype == torch.bfloat16, name
        # float16 cannot hold what is nearer to zero than its smallest step.
        atol = 2**-25 if form is HalfLinear else 0
        torch.testing.assert_close(tensor.float(), exact[name].bfloat16().float(), atol=atol, rtol=0, msg=name)


def test_a_tall_product_is_made_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(70, 16, generator=generator), torch.randn(70, generator=generator)
    x = torch.randn(5, 16, generator=generator)
    monkeypatch.setattr(layers, "PART_ROWS", 32)
    tall = HalfLinear(weight.bfloat16(), bias.bfloat16())
    assert len(tall.packed) == 3
    expected = torch.nn.functional.linear(x, weight.bfloat16().float(), bias.bfloat16().float())
    torch.testing.assert_close(tall(x), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("biased", [True, False])
def test_many_rows_meet_the_float32_copy(biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(24, 16, generator=generator), torch.randn(24, generator=generator) if biased else None
    x = torch.randn(9, 16, generator=generator)
    packed = HalfLinear(weight, bias, copy=True)
    few = packed(x)
    monkeypatch.setattr(layers, "MANY_ROWS", 9)
    exact = torch.nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(packed(x), exact, atol=1e-6, rtol=1e-6)
    # The packed weights are rounded to float16.
    assert 1e-6 < (few - exact).abs().max() < 1e-2
    assert HalfLinear(weight, bias).copy is None


@pytest.mark.parametrize(("free", "copied"), [(1 << 40, True), (1 << 20, False)])
def test_copies_are_made_where_memory_allows(
    tiny: Path, free: int, copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "bfloat16_product", lambda: HalfLinear)
    monkeypatch.setattr("workers.stage.weights.free_memory", lambda device: free)
    loaded = load_weights(open_model(str(tiny)), dtype="bfloat16")
    products = [linear for layer in loaded.layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    assert all(isinstance(each, HalfLinear) and (each.copy is not None) == copied for each in products)
    assert isinstance(loaded.head, HalfLinear) and loaded.head.copy is None


def test_dtype_auto_is_the_configs(tiny: Path, tmp_path: Path) -> None:
    assert load_weights(open_model(str(tiny))).dtype == torch.float32
    half = tiny_config(tmp_path, dtype="float16")
    assert load_weights(open_model(str(half)), random=True).dtype == torch.bfloat16


def test_random_weights(tmp_path: Path) -> None:
    source = open_model(str(tiny_config(tmp_path, "qwen3", num_hidden_layers=2)))
    first, second = (tensors(load_weights(source, random=True)) for _ in range(2))
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
        if "norm" in name:
            assert (tensor == 1).all()
        else:
            assert tensor.std() == pytest.approx(0.02, rel=0.05)
    assert not torch.equal(first["0.down.weight"], first["1.down.weight"])
    model = Decoder(source.config, load_weights(source, random=True))
    assert (
        model.logits(model.hidden(torch.tensor([1, 2]), torch.arange(2), DenseAttention(model.config))).isfinite().all()
    )


def test_random_tensor_depends_on_its_name_alone() -> None:
    one = RandomCheckpoint({"a.weight": (4, 4), "b.weight": (4, 4)}, torch.device("cpu"))
    other = RandomCheckpoint({"b.weight": (4, 4)}, torch.device("cpu"))
    assert torch.equal(one.read("b.weight"), other.read("b.weight"))


def checkpoints(path: Path) -> list[Checkpoint]:
    folder = tiny_model(path / "folder")
    source = open_model(str(folder))
    gguf = open_model(str(tiny_gguf(folder, path / "model.gguf")))
    random = RandomCheckpoint(expected_shapes(source.config), torch.device("cpu"))
    return [open_checkpoint(source), open_checkpoint(gguf), random]


def test_a_slice_that_is_read_is_that_of_the_whole_tensor(tmp_path: Path) -> None:
    for checkpoint in checkpoints(tmp_path):
        for name in ("embed_tokens", "norm", "layers.1.self_attn.q_proj", "layers.2.mlp.down_proj"):
            tensor = checkpoint.read(f"model.{name}.weight")
            rows = slice(7, 40)
            assert torch.equal(checkpoint.read(f"model.{name}.weight", (rows,)), tensor[rows])
            if tensor.ndim == 2:
                columns = (slice(None), slice(11, 50))
                assert torch.equal(checkpoint.read(f"model.{name}.weight", columns), tensor[columns])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("random", [False, True])
def test_shares_of_the_ranks_make_up_the_whole(tmp_path: Path, tied: bool, random: bool) -> None:
    options = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": tied, "num_hidden_layers": 2}
    source = open_model(str(tiny_model(tmp_path, **options)))
    parts = [Partition(range(2), first=True, last=True, rank=rank, ranks=2) for rank in range(2)]
    all_of_it = tensors(load_weights(source, random=random))
    first, second = (tensors(load_weights(source, part=part, random=random)) for part in parts)
    for name, tensor in all_of_it.items():
        if name in ("0.output.bias", "0.down.bias", "1.output.bias", "1.down.bias"):
            assert torch.equal(first[name], tensor) and name not in second
        elif "norm" in name or name == "embedding":
            assert torch.equal(first[name], tensor) and torch.equal(second[name], tensor)
        elif "output" in name or "down" in name:
            assert torch.equal(torch.cat([first[name], second[name]], 1), tensor), name
        else:
            # Rows of several products, each rank's of all of them one below the other.
            sizes = {"qkv": [64, 32, 32], "gate_up": [112, 112], "head": [512]}[name.split(".")[-2]]
            halves = [each.split([size // 2 for size in sizes]) for each in (first[name], second[name])]
            assert torch.equal(torch.cat([half for pair in zip(*halves) for half in pair]), tensor), name


def test_the_last_part_of_a_tied_model_has_the_embedding_as_its_head(tmp_path: Path) -> None:
    source = open_model(str(tiny_model(tmp_path, tie_word_embeddings=True)))
    last = load_weights(source, part=Partition(range(2, 3), first=False, last=True, rank=1, ranks=2))
    assert last.embedding is None and len(last.layers) == 1
    assert isinstance(last.head, PlainLinear)
    assert torch.equal(last.head.weight, load_weights(source).embedding[256:])


def test_expected_shapes_are_what_transformers_saves(tiny: Path) -> None:
    saved = {name: tuple(tensor.shape) for name, tensor in load_file(tiny / "model.safetensors").items()}
    assert expected_shapes(open_model(str(tiny)).config) == saved


def test_weights_survive_their_file(tiny: Path, tmp_path: Path) -> None:
    """They are copies: a checkpoint replaced under a running server changes nothing."""
    path = altered(tiny, tmp_path)
    weights = load_weights(open_model(str(path)), dtype="float32")
    before = {name: tensor.clone() for name, tensor in tensors(weights).items()}
    with (path / "model.safetensors").open("r+b") as file:
        file.truncate(4096)
    for name, tensor in tensors(weights).items():
        assert torch.equal(tensor, before[name])


def test_progress_rises_to_one(tiny: Path) -> None:
    heard: list[float] = []
    load_weights(open_model(str(tiny)), progress=heard.append)
    assert heard == sorted(heard) and heard[-1] == 1.0 and len(heard) == 3
