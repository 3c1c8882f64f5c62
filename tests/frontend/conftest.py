"""One frontend process and one peer for all tests that do not end it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.support.engine_peer import EnginePeer
from tests.support.frontend_process import FrontendProcess
from tests.support.tool_model import tool_model

MAX_BODY = 4 << 20


@pytest.fixture(scope="session")
def running() -> Iterator[tuple[EnginePeer, FrontendProcess]]:
    with EnginePeer() as peer:
        settings = ["ping_seconds=0.2", f"max_body_bytes={MAX_BODY}", "max_n=128", "max_samples=256"]
        with FrontendProcess(peer.endpoint, *settings) as frontend:
            frontend.wait_until_serving()
            yield peer, frontend


@pytest.fixture
def peer(running: tuple[EnginePeer, FrontendProcess]) -> Iterator[EnginePeer]:
    """Behaves as told by the test, and as by default again after it."""
    peer, _ = running
    peer.seen.clear()
    yield peer
    peer.reset()


@pytest.fixture
def frontend(running: tuple[EnginePeer, FrontendProcess], peer: EnginePeer) -> FrontendProcess:
    return running[1]


@pytest.fixture
def open_server(peer: EnginePeer) -> Iterator[FrontendProcess]:
    """One that takes chat templates of clients."""
    with FrontendProcess(peer.endpoint, "client_chat_template=true") as frontend:
        frontend.wait_until_serving()
        yield frontend


@pytest.fixture
def http(frontend: FrontendProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=frontend.url, timeout=30) as client:
        yield client


@pytest.fixture
def sdk(frontend: FrontendProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{frontend.url}/v1", api_key="any", max_retries=0, timeout=30, _strict_response_validation=True
    ) as client:
        yield client


@pytest.fixture(scope="session")
def tool_running(
    running: tuple[EnginePeer, FrontendProcess], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FrontendProcess]:
    model = tool_model(tmp_path_factory.mktemp("model") / "thinker")
    with FrontendProcess(running[0].endpoint, f"model={model}", "client_chat_template=true") as frontend:
        frontend.wait_until_serving()
        yield frontend


@pytest.fixture
def tool_sdk(tool_running: FrontendProcess, peer: EnginePeer) -> Iterator[openai.OpenAI]:
    """The client of a server whose model thinks and knows tools, and which takes chat templates of clients."""
    with openai.OpenAI(
        base_url=f"{tool_running.url}/v1", api_key="any", max_retries=0, timeout=30, _strict_response_validation=True
    ) as client:
        yield client
