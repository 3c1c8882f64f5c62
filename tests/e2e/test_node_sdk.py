"""OpenAI's client for Node: what it streams is what the Python client gets."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.server import Server

NODE = Path(__file__).parent / "node"
INSTALL_SECONDS = 60


def program(name: str) -> str:
    """Its path. Neither Node nor a registry is part of the machine: not even TOKA_TEST_ALL asks for them."""
    return shutil.which(name) or pytest.skip(f"{name} is missing")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script, beside the package that it needs; npm's own settings say from where that comes."""
    npm = program("npm")
    folder = tmp_path_factory.mktemp("node") / "sdk"
    shutil.copytree(NODE, folder)
    command = [npm, "install", "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    except subprocess.TimeoutExpired:
        pytest.skip("npm could not install openai in time")
    if done.returncode:
        pytest.skip(f"npm cannot install openai: {done.stderr.strip().splitlines()[-1:]}")
    return folder / "sdk.mjs"


def test_streams_and_tools(server: Server, sdk: openai.OpenAI, script: Path) -> None:
    command = [program("node"), str(script), f"{server.url}/v1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    chat = sdk.chat.completions.create(
        model="default", messages=[{"role": "user", "content": "Hello"}], max_tokens=16, temperature=0
    )
    text = chat.choices[0].message.content
    assert chat.usage is not None and found["chat"] == {"text": text, "tokens": chat.usage.completion_tokens}
    response = sdk.responses.create(model="default", input="Hello", max_output_tokens=16, temperature=0)
    kinds = found["responses"]["kinds"]
    assert found["responses"]["text"] == response.output_text == text
    assert (kinds[0], kinds[-1]) == ("response.created", f"response.{response.status}")
    (call,) = found["tools"]["calls"]
    assert call["name"] == "get_weather" and json.loads(call["arguments"])["city"] in ("Paris", "Rome")
    assert found["tools"]["deltas"] > 1 and found["tools"]["reason"] == "tool_calls"
    assert json.loads(found["responseTools"]["written"])["city"] in ("Paris", "Rome")
    assert found["responseTools"] == {
        "name": "get_weather",
        "arguments": found["responseTools"]["written"],
        "written": found["responseTools"]["written"],
    }
