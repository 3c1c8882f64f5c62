"""A batch on the whole server, which is killed in between, and what came of it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import openai

from tests.e2e.conftest import SIZES
from tests.support.batches import jsonl, line, over, results, start, wait
from tests.support.server import Server, serve

LINES = 300
CHAT = "/v1/chat/completions"


@contextlib.contextmanager
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=60, _strict_response_validation=True
    ) as sdk:
        yield sdk


def prompt(number: int) -> str:
    return f"{'One' if number % 2 else 'Another'} tale, of number {number}"


def test_no_line_is_lost_or_done_twice(folder: Path, tmp_path: Path) -> None:
    rng = random.Random(11)
    bad = set(rng.sample(range(LINES), 9))
    lines: list[dict[str, object] | str] = [
        line(f"r{number}", prompt=prompt(number), max_tokens=-1 if number in bad else 8, temperature=0)
        for number in range(LINES)
    ]
    settings = {"model": folder, "data_dir": tmp_path, "batch_items": 24, "frontends": 2, **SIZES}
    batch = None
    for done in sorted(rng.sample(range(20, 240), 3)):
        with serve(**settings) as server, client(server) as sdk:
            batch = batch or start(sdk, jsonl(lines))
            wait(sdk, batch, lambda now, done=done: now.request_counts.completed >= done)  # type: ignore[misc]
            server.kill()
    assert batch is not None
    with serve(**settings) as server, client(server) as sdk:
        batch = wait(sdk, batch, over)
        assert batch.status == "completed" and batch.request_counts is not None
        assert batch.request_counts.model_dump() == {"total": LINES, "completed": LINES - 9, "failed": 9}
        refused = results(sdk, batch.error_file_id)
        assert sorted(int(each["custom_id"][1:]) for each in refused) == sorted(bad)
        texts = {
            int(each["custom_id"][1:]): each["response"]["body"]["choices"][0]["text"]
            for each in results(sdk, batch.output_file_id)
        }
        assert sorted(texts) == sorted(set(range(LINES)) - bad)
        for number in list(texts)[::30]:
            fields = {"prompt": prompt(number), "max_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True}}
            assert sdk.completions.create(model="default", **fields).choices[0].text == texts[number]  # type: ignore[call-overload]


def test_chats(folder: Path, tmp_path: Path) -> None:
    with serve(model=folder, data_dir=tmp_path, **SIZES) as server, client(server) as sdk:
        bodies = [{"messages": [{"role": "user", "content": f"Say {number}."}], "max_tokens": 6} for number in range(9)]
        lines = [{"custom_id": f"{n}", "method": "POST", "url": CHAT, "body": body} for n, body in enumerate(bodies)]
        batch = wait(sdk, start(sdk, jsonl(lines), endpoint=CHAT), over)
        found = results(sdk, batch.output_file_id)
        assert batch.status == "completed" and {each["custom_id"] for each in found} == {str(n) for n in range(9)}
        for each in found:
            answer = openai.types.chat.ChatCompletion.model_validate(each["response"]["body"])
            assert answer.usage is not None and answer.usage.completion_tokens <= 6
