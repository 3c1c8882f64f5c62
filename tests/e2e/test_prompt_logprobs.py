"""`echo` with `logprobs` on the whole server: the log-softmax of transformers, also of stages that share the model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from tests.e2e.conftest import SIZES
from tests.support.server import serve
from tests.support.tiny import VOCAB_SIZE

TEXT = "Zwölf Boxkämpfer jagen Viktor quer über den Deich"
Exact = Callable[[list[int]], torch.Tensor]
"""Of ids: [ids but the first, vocabulary] log-probabilities."""


@pytest.fixture(scope="session")
def exact(folder: Path) -> Exact:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def logprobs(ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)

    return logprobs


def random_prompts(count: int, least: int, most: int) -> list[list[int]]:
    rng = np.random.default_rng(count)
    return [rng.integers(3, VOCAB_SIZE, int(length)).tolist() for length in rng.integers(least, most, count)]


def check(logprobs: dict[str, Any], ids: list[int], likely: int, exact: Exact) -> None:
    """logprobs: of all `ids`, prompt and completion."""
    want = exact(ids)
    chosen = want.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert logprobs["token_logprobs"][0] is None
    np.testing.assert_allclose(logprobs["token_logprobs"][1:], chosen, atol=1e-4)
    assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == len(ids)
    if likely:
        tops = logprobs["top_logprobs"]
        assert tops[0] is None and len(tops) == len(ids)
        best = [max(top.values()) for top in tops[1:]]
        np.testing.assert_allclose(best, want.amax(1), atol=1e-4)
        greedy = (want.argmax(1) == torch.tensor(ids[1:])).tolist()
        assert [value == top for value, top in zip(logprobs["token_logprobs"][1:], best)] == greedy
        assert all(likely - 2 <= len(top) <= likely + 1 for top in tops[1:]), "two ids may have one text"


@pytest.mark.parametrize(("most", "likely", "n"), [(0, 5, 1), (1, 1, 1), (6, 0, 3), (6, 5, 3)])
@pytest.mark.parametrize("stream", [False, True])
def test_prompts_and_completions(lenient, folder, exact, most: int, likely: int, n: int, stream: bool) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = random_prompts(1, 300, 301)[0]
    more = {"return_token_ids": True, "ignore_eos": True}
    ask: dict[str, Any] = {"model": "default", "max_tokens": most, "logprobs": likely, "n": n, "echo": True, "seed": 3}
    for prompt, sent in ((TEXT, tokenizer.encode(TEXT)), (ids, ids)):
        answer = lenient.completions.create(**ask, prompt=prompt, stream=stream, extra_body=more)
        answers = list(answer) if stream else [answer]
        for index in range(n):
            parts = [each.model_dump() for chunk in answers for each in chunk.choices if each.index == index]
            names = ["tokens", "token_logprobs", "text_offset", *(["top_logprobs"] if likely else [])]
            columns = [part["logprobs"] for part in parts if part["logprobs"]]
            logprobs = {name: [value for column in columns for value in column[name]] for name in names}
            told = [number for part in parts for number in part["token_ids"] or []]
            assert parts[0]["prompt_token_ids"] == sent and len(told) == most
            check(logprobs, [*sent, *told], likely, exact)
            text = "".join(part["text"] for part in parts)
            assert text.startswith(TEXT if prompt is TEXT else tokenizer.decode(ids))
            if prompt is TEXT:
                for token, at in list(zip(logprobs["tokens"], logprobs["text_offset"]))[: len(sent)]:
                    assert token.startswith("bytes:") or text.startswith(token, at)


async def test_of_several_stages_one_of_which_is_killed(folder: Path, exact: Exact) -> None:
    """In steps far shorter than a prompt, with a cache for few of them: what was not told is computed again."""
    sizes = {"pp_size": 2, "tp_size": 2, "kv_cache_tokens": 1024, "max_seqs": 6, "max_tokens_per_step": 64}
    wanted = random_prompts(10, 200, 500)
    with serve(model=folder, **SIZES | sizes) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:

            async def ask(prompt: list[int]) -> Any:
                body = {"prompt": prompt, "max_tokens": 40, "logprobs": 2, "echo": True, "ignore_eos": True}
                answer = await client.post("/v1/completions", json=body | {"return_token_ids": True})
                assert answer.status_code == 200, answer.text
                return answer.json()["choices"][0]

            asked = [asyncio.create_task(ask(prompt)) for prompt in wanted]
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            server.part("toka: stage r0.3").kill()
            assert not all(each.done() for each in asked)
            for prompt, choice in zip(wanted, await asyncio.gather(*asked)):
                check(choice["logprobs"], [*prompt, *choice["token_ids"]], 2, exact)
