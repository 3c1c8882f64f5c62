"""What gets lost between frontend and engine: the stream goes on where it was, nothing twice, nothing missing."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx
import pytest

from tests.support.demo import peer_text
from tests.support.engine_peer import EnginePeer, some_token
from tests.support.frontend_process import FrontendProcess
from toka.messages import JoinFrontend, Lost, Resume, Submit, Work, decode

LENGTH = 60


class Client(threading.Thread):
    """Three samples of one prompt, whole or as a stream; `texts` when it has ended."""

    def __init__(self, frontend: FrontendProcess, stream: bool = False, n: int = 3, ignore_eos: bool = True) -> None:
        super().__init__()
        self.body: dict[str, Any] = {"prompt": "x", "max_tokens": LENGTH, "seed": 9, "n": n, "ignore_eos": ignore_eos}
        self.url, self.stream = f"{frontend.url}/v1/completions", stream
        self.answer: httpx.Response | None = None
        self.start()

    def run(self) -> None:
        self.answer = httpx.post(self.url, json=self.body | {"stream": self.stream}, timeout=40)

    def check(self) -> None:
        self.join(40)
        assert self.answer is not None and self.answer.status_code == 200, self.answer
        if not self.stream:
            texts = [choice["text"] for choice in self.answer.json()["choices"]]
        else:
            lines = [line for line in self.answer.text.split("\n\n") if line.startswith("data: {")]
            choices = [json.loads(line[6:])["choices"][0] for line in lines]
            texts = [
                "".join(each["text"] for each in choices if each["index"] == index) for index in range(self.body["n"])
            ]
        assert texts == [peer_text(9, sample, LENGTH) for sample in range(self.body["n"])]


def works(peer: EnginePeer) -> list[Work]:
    found = [decode(submit.payload) for submit in peer.of(Submit)]
    return [work for work in found if isinstance(work, Work)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_lost_replica(frontend: FrontendProcess, peer: EnginePeer, stream: bool) -> None:
    peer.step_seconds = 0.01
    client = Client(frontend, stream)
    peer.wait_for(Submit)
    time.sleep(0.2)
    peer.lose_all()
    peer.wait_for(Submit, 2)
    client.check()
    first, again = works(peer)
    assert again.params == first.params and again.prompt.tolist() == first.prompt.tolist()
    assert all(0 < count < LENGTH for count in again.output_counts)
    outputs = again.outputs.tolist()
    for sample, count in zip(again.samples, again.output_counts):
        assert outputs[:count] == [some_token(9, sample, position) for position in range(count)]
        del outputs[:count]


def test_only_unfinished_samples_are_submitted_again(frontend: FrontendProcess, peer: EnginePeer) -> None:
    def token_of(seed: int, sample: int, position: int) -> int:
        return 2 if sample == 1 and position == 3 else some_token(seed, sample, position)

    peer.token_of, peer.step_seconds = token_of, 0.01
    client = Client(frontend, ignore_eos=False)
    peer.wait_for(Submit)
    time.sleep(0.25)
    peer.lose_all()
    peer.wait_for(Submit, 2)
    client.join(20)
    assert works(peer)[1].samples == [0, 2]


@pytest.mark.parametrize("stream", [False, True])
def test_a_gap_is_asked_for_again(frontend: FrontendProcess, peer: EnginePeer, stream: bool) -> None:
    peer.step_seconds = 0.01
    client = Client(frontend, stream)
    peer.wait_for(Submit)
    time.sleep(0.1)
    peer.drop = 4
    client.check()
    resumes = peer.of(Resume)
    assert sorted(resume.sample for resume in resumes) == [0, 1, 2], "each gap once"


@pytest.mark.parametrize("stream", [False, True])
def test_rows_that_overlap_are_cut(frontend: FrontendProcess, peer: EnginePeer, stream: bool) -> None:
    peer.repeat, peer.step_seconds = 3, 0.002
    client = Client(frontend, stream)
    client.check()
    assert not peer.of(Resume)


def test_the_last_message_lost(frontend: FrontendProcess, peer: EnginePeer) -> None:
    """Nothing comes behind it to show the gap: silence does."""
    peer.paused = True
    client = Client(frontend, stream=True)
    peer.wait_for(Submit)
    peer.chunk, peer.drop, peer.paused = LENGTH, 1, False
    client.check()
    assert peer.of(Resume)


@pytest.mark.parametrize("stream", [False, True])
def test_a_restarted_broker(frontend: FrontendProcess, peer: EnginePeer, stream: bool) -> None:
    peer.step_seconds = 0.01
    client = Client(frontend, stream, n=70)
    (first, _) = peer.wait_for(Submit, 2)
    time.sleep(0.2)
    peer.restart()
    client.check()
    holding = [join for join in peer.of(JoinFrontend) if join.holds]
    assert holding[0].holds == [first.request] * 2 and holding[0].holds_first == [0, 64]


def test_a_refusal_after_acceptance_is_no_end(frontend: FrontendProcess, peer: EnginePeer) -> None:
    """The queue may be full when a lost shard comes back; its client has been told that it runs."""
    peer.step_seconds = 0.01
    client = Client(frontend)
    peer.wait_for(Submit)
    time.sleep(0.1)
    peer.refusal = (429, "the queue is full", 1)
    peer.lose_all()
    peer.wait_for(Submit, 2)
    peer.refusal = None
    client.check()


def test_what_concerns_nobody_is_ignored(frontend: FrontendProcess, peer: EnginePeer, http: httpx.Client) -> None:
    from toka.messages import encode

    unknown = Lost(requests=[bytes(16)], first_samples=[0])
    for frames in ([b"junk"], [], encode(unknown), encode(JoinFrontend(holds=[], holds_first=[]))):
        peer.send_raw([bytes(frame) for frame in frames])
    assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
