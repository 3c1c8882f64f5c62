"""Several GPUs through the whole server: log-probabilities near those of transformers in float32, step after step."""

from __future__ import annotations

import random
from pathlib import Path

import httpx
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from frontend.logprobs import token_text
from tests.support.server import serve
from tests.support.tiny import VOCAB_SIZE, tiny_model
from toka.text.vocabulary import Vocabulary

if not torch.cuda.is_available() or torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)

TOKENS = 24
NEAR = 0.15
"""Of log-probabilities; bfloat16 rounds logits of some tens to eighths."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "num_hidden_layers": 4}
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny", **sizes)


@pytest.mark.parametrize("sizes", [{"pp_size": 2}, {"tp_size": 2}, {"dp_size": 2}], ids=str)
def test_tokens_are_likely_ones(folder: Path, sizes: dict[str, int]) -> None:
    """Greedy tokens of 32 prompts at once, each given the ones before it."""
    draw = random.Random(0)
    prompts = [draw.choices(range(3, VOCAB_SIZE), k=draw.randint(1, 400)) for _ in range(32)]
    body = {"prompt": prompts, "max_tokens": TOKENS, "temperature": 0, "logprobs": 1, "ignore_eos": True}
    with serve(model=folder, device="cuda", dtype="bfloat16", max_seqs=64, kv_cache_tokens=65536, **sizes) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()
        seeded = body | {"temperature": 1.0, "top_p": 0.9, "seed": 5, "presence_penalty": 0.5}
        drawn = httpx.post(f"{server.url}/v1/completions", json=seeded, timeout=120).json()
    assert all(len(choice["logprobs"]["tokens"]) == TOKENS for choice in drawn["choices"])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda()
    vocabulary = Vocabulary(Tokenizer.from_file(str(folder / "tokenizer.json")))
    id_of = {token_text(vocabulary[number]): number for number in range(VOCAB_SIZE)}
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        ids = [id_of[text] for text in choice["logprobs"]["tokens"]]
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *ids]], device="cuda")).logits[0, len(prompt) - 1 : -1]
        exact = logits.log_softmax(-1)
        chosen = exact.gather(1, torch.tensor(ids, device="cuda")[:, None])[:, 0]
        assert (exact.amax(1) - chosen).max() < NEAR, "a token that is not the likeliest, nor near it"
        found = torch.tensor(choice["logprobs"]["token_logprobs"], device="cuda")
        assert (found - chosen).abs().max() < NEAR
