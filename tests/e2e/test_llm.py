"""`toka.LLM` on real processes: what it gives, how it fails, and what is left when its program ends."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

import toka
from tests.e2e.conftest import SIZES
from tests.support.server import ROOT, Server, environment, gone, until

WINDOW = 8
GREEDY = toka.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = toka.SamplingParams(max_tokens=900, ignore_eos=True)
"""Seconds; a window of them fits the cache."""
MESSAGES = [{"role": "user", "content": "Tell me of the sea."}]


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[toka.LLM]:
    with toka.LLM(folder, batch_items=WINDOW, frontends=2, **SIZES) as llm:
        yield llm


def idle(llm: toka.LLM) -> bool:
    """Whether it answers at once, with all of its slots."""
    began = time.monotonic()
    outputs = llm.generate(["x"] * WINDOW, GREEDY)
    return len(outputs) == WINDOW and time.monotonic() - began < 5


# --- What it gives ------------------------------------------------------------------------------------


def test_outputs_are_those_of_transformers_in_the_order_of_the_prompts(
    llm: toka.LLM, greedy: Callable[[list[int], int], str]
):
    texts = [f"The sea, told {number} times" for number in range(3 * WINDOW)]
    prompts = [text if number % 2 else llm.tokenize(text) for number, text in enumerate(texts)]
    outputs = llm.generate(prompts, toka.SamplingParams(temperature=0, max_tokens=8))
    assert [each.index for each in outputs] == list(range(len(texts)))
    for text, prompt, output in zip(texts, prompts, outputs):
        ids = llm.tokenize(text)
        assert (output.prompt, output.prompt_token_ids, output.error) == (prompt, ids, None)
        assert output.text == greedy(ids, 8)
        (choice,) = output.outputs
        assert choice.logprobs is None and choice.finish_reason == ("stop" if choice.token_ids[-1] == 2 else "length")
        assert llm.detokenize(ids) == text
        usage = output.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(ids), len(choice.token_ids))


def test_one_prompt_may_stand_alone(llm: toka.LLM):
    ids = llm.tokenize("The sea was")
    (expected,) = llm.generate("The sea was", GREEDY)
    for prompt in (ids, tuple(ids), np.array(ids, np.int32), [ids], np.array([ids]), iter(["The sea was"])):
        (output,) = llm.generate(prompt, GREEDY)
        assert output.outputs == expected.outputs and output.prompt_token_ids == ids
    assert llm.generate([], GREEDY) == []


def test_it_answers_as_the_server_does(llm: toka.LLM, server: Server):
    fields = {"temperature": 1, "seed": 3, "n": 2, "max_tokens": 9, "top_p": 0.9, "stop": ["e"], "logit_bias": {7: -9}}
    params = toka.SamplingParams(**fields, logprobs=2)  # type: ignore[arg-type]
    extra = {"return_token_ids": True}
    completion = {"prompt": "The sea was", **fields, **extra, "logprobs": 2}
    there = httpx.post(f"{server.url}/v1/completions", json=completion, timeout=60).json()
    (here,) = llm.generate("The sea was", params)
    assert [each.text for each in here.outputs] == [each["text"] for each in there["choices"]]
    assert [each.token_ids for each in here.outputs] == [each["token_ids"] for each in there["choices"]]
    for choice, found in zip(here.outputs, there["choices"]):
        assert choice.logprobs is not None and choice.finish_reason == found["finish_reason"]
        assert [each.token_id for each in choice.logprobs] == choice.token_ids
        assert [each.logprob for each in choice.logprobs] == pytest.approx(found["logprobs"]["token_logprobs"])
        assert [set(each.top) for each in choice.logprobs] == [set(top) for top in found["logprobs"]["top_logprobs"]]
    chat = {"messages": MESSAGES, **fields, **extra, "logprobs": True, "top_logprobs": 2}
    there = httpx.post(f"{server.url}/v1/chat/completions", json=chat, timeout=60).json()
    one, two = llm.chat([MESSAGES, MESSAGES], params)
    assert one.prompt_token_ids == two.prompt_token_ids == there["prompt_token_ids"]
    assert [each.token_ids for each in one.outputs] == [each.token_ids for each in two.outputs]
    for choice, found in zip(one.outputs, there["choices"]):
        assert (choice.text, choice.token_ids) == (found["message"]["content"], found["token_ids"])
        assert choice.logprobs is not None and len(choice.logprobs) == len(choice.token_ids)
        assert [each.token for each in choice.logprobs] == [each["token"] for each in found["logprobs"]["content"]]
        assert all(each.logprob <= max(each.top.values()) for each in choice.logprobs)
    assert llm.chat(MESSAGES, params)[0].text == one.text


def test_with_echo_the_prompt_has_log_probabilities_too(llm: toka.LLM, server: Server):
    fields = {"temperature": 0, "max_tokens": 3, "logprobs": 1, "ignore_eos": True}
    params = toka.SamplingParams(**fields, n=2, extra_body={"echo": True})  # type: ignore[arg-type]
    body = {"prompt": "The sea was", **fields, "echo": True, "return_token_ids": True}
    there = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"][0]
    (output,) = llm.generate("The sea was", params)
    assert output.prompt_logprobs is not None and output.outputs[1].logprobs is not None
    first, *others = output.prompt_logprobs
    assert first is None and len(others) + 1 == len(output.prompt_token_ids) and output.text.startswith("The sea was")
    known = [each for each in (*others, *output.outputs[1].logprobs) if each is not None]
    assert [each.token_id for each in known] == [*output.prompt_token_ids[1:], *output.outputs[1].token_ids]
    assert [each.logprob for each in known] == pytest.approx(there["logprobs"]["token_logprobs"][1:], abs=1e-4)
    assert [set(each.top) for each in known] == [set(each) for each in there["logprobs"]["top_logprobs"][1:]]
    scored = llm.generate("The sea was", toka.SamplingParams(max_tokens=0, logprobs=0, extra_body={"echo": True}))[0]
    assert scored.outputs[0].token_ids == [] and scored.prompt_logprobs is not None
    assert [each and each.token_id for each in scored.prompt_logprobs] == [None, *scored.prompt_token_ids[1:]]


def test_each_prompt_may_have_parameters_of_its_own(llm: toka.LLM):
    params = [toka.SamplingParams(max_tokens=count, ignore_eos=True, n=2) for count in range(1, 20)]
    outputs = llm.generate(["x"] * 19, params)
    assert [len(each.outputs[1].token_ids) for each in outputs] == list(range(1, 20))
    for wrong in (params[:-1], [*params, GREEDY], ["x"] * 19):
        with pytest.raises(ValueError, match="params: expected SamplingParams, or as many of them"):
            llm.generate(["x"] * 19, wrong)  # type: ignore[arg-type]


def test_outputs_come_as_they_finish_and_prompts_are_drawn_as_there_is_room(llm: toka.LLM):
    drawn = 0

    def prompts() -> Iterator[str]:
        nonlocal drawn
        for drawn in itertools.count(1):
            yield f"tale {drawn}"

    params = itertools.cycle([toka.SamplingParams(max_tokens=200, ignore_eos=True), *[GREEDY] * 5])
    seen = []
    for output in llm.iter_generate(prompts(), params):
        seen.append(output.index)
        assert drawn <= len(seen) + WINDOW + 1
        if len(seen) == 5 * WINDOW:
            break
    assert seen != sorted(seen) and len(set(seen)) == len(seen)
    assert idle(llm)


async def test_async_iterators_run_within_a_loop_and_beside_each_other(llm: toka.LLM):
    async def texts(count: int) -> list[str]:
        found = {each.index: each.text async for each in llm.aiter_generate([f"{n}" for n in range(count)], GREEDY)}
        return [found[number] for number in range(count)]

    one, two = await asyncio.gather(texts(20), texts(30))
    assert one == two[:20]
    assert [each.text async for each in llm.aiter_chat(MESSAGES, GREEDY)] == [llm.chat(MESSAGES, GREEDY)[0].text]


async def test_a_loop_that_is_left_drops_what_was_under_way(llm: toka.LLM):
    stream = llm.aiter_generate(["x"] * 100, [GREEDY, *[LONG] * 99])
    async for _ in stream:
        break
    await stream.aclose()
    task = asyncio.create_task(anext(llm.aiter_generate("x", LONG)))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(idle, llm)


def test_threads_may_share_it(llm: toka.LLM):
    found: list[list[str]] = []
    threads = [
        threading.Thread(target=lambda: found.append([each.text for each in llm.generate(["a", "b", "c"] * 5, GREEDY)]))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6 and all(each == found[0] for each in found)


# --- What goes wrong ----------------------------------------------------------------------------------


def test_a_bad_prompt_is_named_and_the_others_are_answered(llm: toka.LLM):
    prompts = ["a", "", "b", None, "half of a pair: \ud800", [1, 9999], "c"]
    with pytest.raises(ValueError, match=r"prompt 1: prompt: must not be empty \(4 of 7 prompts failed") as raised:
        llm.generate(prompts, GREEDY)
    assert isinstance(raised.value, toka.GenerationError)
    for outputs in (raised.value.outputs, llm.generate(prompts, GREEDY, errors="return")):
        assert [each.index for each in outputs if each.error is None] == [0, 2, 6]
        assert all(each.text for each in outputs if each.error is None)
        said = [each.error for each in outputs if each.error is not None]
        assert all(each.startswith("prompt: ") for each in said), said
        with pytest.raises(ValueError, match="prompt 1: prompt: must not"):
            _ = outputs[1].text
    with pytest.raises(ValueError, match=r"^prompt 0: temperature: .*2\.0"):
        llm.generate("x", toka.SamplingParams(temperature=9))
    with pytest.raises(ValueError, match="prompt 0: chat_template_kwargs: "):
        llm.chat(MESSAGES, GREEDY, chat_template_kwargs=3)
    with pytest.raises(ValueError, match="errors: expected 'raise' or 'return'"):
        llm.generate("x", errors="ignore")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tokens: token ids are from"):
        llm.detokenize([99999])


def test_parameters_that_are_no_numbers():
    for name, value in (("n", 0), ("n", "2"), ("temperature", float("nan")), ("top_p", float("inf"))):
        with pytest.raises(ValueError, match=f"^{name}: "):
            toka.SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_an_interrupted_call_leaves_it_usable(llm: toka.LLM):
    interrupt = threading.Timer(0.3, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["x"] * 100, LONG)
    assert idle(llm)


def test_abort_ends_calls_with_what_they_have(llm: toka.LLM):
    threading.Timer(0.7, llm.abort).start()
    outputs = llm.generate(["x"] * 50, toka.SamplingParams(max_tokens=900, ignore_eos=True, n=2))
    assert len(outputs) == 50
    choices = [choice for each in outputs for choice in each.outputs]
    assert {each.finish_reason for each in choices} == {"abort"} and len(choices) == 100
    assert any(each.token_ids for each in choices[: 2 * WINDOW]) and not any(each.token_ids for each in choices[50:])
    assert idle(llm)


def test_wrong_settings_are_the_launchers_sentences(folder: Path):
    with pytest.raises(ValueError, match="unknown setting 'dp_sice'; did you mean 'dp_size'"):
        toka.LLM(dp_sice=2)
    with pytest.raises(ValueError, match=r"port: toka\.LLM has a server of its own"):
        toka.LLM(port=1)
    with pytest.raises(RuntimeError, match=r"^toka failed: .*/no/such/model"):
        toka.LLM("/no/such/model")
    with pytest.raises(RuntimeError, match=r"^toka failed: the folder /usr must be yours"):
        toka.LLM(folder, run_dir="/usr")
    assert not [each for each in threading.enumerate() if each.name == "toka" and not each.daemon]


def test_calls_go_on_when_a_frontend_dies_and_end_when_all_of_toka_does(folder: Path):
    before = set(psutil.Process().children())
    llm = toka.LLM(folder, **SIZES)
    (launcher,) = set(psutil.Process().children()) - before
    parts = {" ".join(each.cmdline()).strip(): each for each in launcher.children()}
    threading.Timer(0.2, parts["toka: frontend"].kill).start()
    outputs = llm.generate(["x"] * 40, toka.SamplingParams(max_tokens=100, ignore_eos=True))
    assert [len(each.outputs[0].token_ids) for each in outputs] == [100] * 40
    threading.Timer(0.2, launcher.kill).start()
    with pytest.raises(RuntimeError, match="toka was killed by SIGKILL"):
        llm.generate(["x"] * 40, LONG)
    with pytest.raises(RuntimeError, match="toka was killed by SIGKILL"):
        llm.generate("x", GREEDY)
    gone(parts.values())
    llm.close()
    llm.close()


def test_a_closed_one_says_so(folder: Path):
    with toka.LLM(folder, **SIZES) as llm:
        under_way = llm.iter_generate(["x"] * 40, [GREEDY, *[LONG] * 39])
        next(under_way)
        pid = os.fork()
        if not pid:
            try:
                llm.generate("x")
            except RuntimeError as error:
                os._exit(0 if "forked" in str(error) else 1)
            os._exit(2)
        assert os.waitpid(pid, 0)[1] == 0
    with pytest.raises(RuntimeError, match="the LLM is closed"):
        list(under_way)
    with pytest.raises(RuntimeError, match="the LLM is closed"):
        llm.generate("x")


# --- The program that uses it -------------------------------------------------------------------------

SCRIPT = """
import sys
import toka
assert not {{"aiohttp", "numpy", "torch", "frontend", "broker", "workers"}} & set(sys.modules), "import toka is light"
llm = toka.LLM({model!r}, max_seqs=4, kv_cache_tokens=4096, threads=1)
assert llm.generate("x", toka.SamplingParams(max_tokens=2))[0].text
assert not {{"torch", "frontend", "broker", "workers"}} & set(sys.modules), "parts are processes"
print("serves", flush=True)
if {endless}:
    llm.generate(["x"] * 100, toka.SamplingParams(max_tokens=4000, ignore_eos=True))
"""


@pytest.mark.parametrize("ending", ["by itself", "kill -9"])
def test_nothing_is_left_of_a_script(folder: Path, tmp_path: Path, ending: str):
    """It runs in a folder with a package named as one of Toka's, and does not close."""
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / "__init__.py").write_text("raise SystemExit('not mine')")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(model=str(folder), endless=ending == "kill -9"))
    with tempfile.TemporaryDirectory(prefix="t-") as private:
        env = environment({"TMPDIR": private, "XDG_RUNTIME_DIR": ""})
        process = subprocess.Popen([sys.executable, script], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None and process.stdout.readline() == "serves\n"
            children = psutil.Process(process.pid).children(recursive=True) if ending == "kill -9" else []
            if ending == "kill -9":
                assert len(children) == 6
                process.kill()
            assert process.wait(30) == (-signal.SIGKILL if ending == "kill -9" else 0)
            process.stdout.close()
            gone(children)
            until(lambda: not list(Path(private).iterdir()), 5, "the run folder is gone")
        finally:
            process.kill()
            process.wait()


def test_examples(folder: Path):
    examples = {
        name: subprocess.Popen(
            [sys.executable, ROOT / "examples" / name, folder],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in ("generate.py", "rollouts.py")
    }
    said = {name: process.communicate(timeout=60)[0] for name, process in examples.items()}
    assert [process.returncode for process in examples.values()] == [0, 0]
    assert "stage r0.0: warming up" in said["generate.py"], "the start is shown, as it was asked for"
    assert "'The sea was' -> " in said["generate.py"] and " tokens)\n" in said["generate.py"]
    assert said["rollouts.py"].count(" of 16 right\n") == 9 and " info " not in said["rollouts.py"]
