"""What a grammar costs a step: `python -m tools.bench.structured [rows=64] [tokens=128] [rounds=3] ...`.

Starts a server and runs batches of `rows` samples on it, in turn without a grammar and with that of a JSON schema.
Prints milliseconds a step, medians of the rounds, their ratio, and the matcher's CPU time in a step. Every other
`key=value` is a setting of Toka.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from typing import Any

import psutil

from tests.support.grammar_client import GrammarClient, grammar_client
from tests.support.matching import schema
from tests.support.server import serve

OWN = {"rows": 64, "tokens": 128, "rounds": 3}
PROMPT = "A list of people and where they live, as JSON:"
DELIVERIES = 4
"""A sample's tokens come in so many parts; time runs from the first of them, when all have begun."""
ADDRESS = {
    "type": "object",
    "properties": {"street": {"type": "string", "maxLength": 30}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
    "required": ["street", "zip"],
    "additionalProperties": False,
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "languages": {"type": "array", "items": {"enum": ["de", "en", "fr", "it"]}, "maxItems": 4},
        "home": ADDRESS,
        "work": {"anyOf": [ADDRESS, {"type": "null"}]},
    },
    "required": ["name", "age", "languages", "home", "work"],
    "additionalProperties": False,
}
PEOPLE = {"type": "array", "items": PERSON, "minItems": 99}
"""Longer than any output here: no row ends before the others."""


async def step_ms(client: GrammarClient, rows: int, tokens: int, seed: int, grammar: str) -> float:
    """Milliseconds of a step in which every row decodes."""
    call = client.call(
        client.tokenizer.encode(PROMPT).ids,
        n=rows,
        delivery=tokens // DELIVERIES,
        max_tokens=tokens,
        ignore_eos=True,
        seed=seed,
        grammar=grammar,
    )
    samples, began, had = call.generations[0].samples, 0.0, 0
    try:
        await client.engine.submit(call)
        while not call.done:
            await call.wait()
            if not had and all(sample.ids for sample in samples):
                began, had = time.perf_counter(), len(samples[-1].ids)
        return 1e3 * (time.perf_counter() - began) / (tokens - had)
    finally:
        client.engine.close(call)


async def measure(own: dict[str, int], settings: dict[str, str]) -> None:
    grammars = {"without": "", "with a grammar": schema(PEOPLE)}
    found: dict[str, list[float]] = {name: [] for name in grammars}
    with tempfile.TemporaryDirectory() as folder:
        broker = f"ipc://{folder}/broker"
        given: dict[str, Any] = {"broker": broker, "max_seqs": own["rows"], **settings}
        with serve(**given) as server:
            matcher = server.part("toka: matcher r0")
            async with grammar_client(broker, settings.get("model", "")) as client:
                for number in range(own["rounds"] + 1):
                    for name, grammar in grammars.items():
                        before = _cpu(matcher)
                        taken = await step_ms(client, own["rows"], own["tokens"], number, grammar)
                        mine = 1e3 * (_cpu(matcher) - before) / own["tokens"]
                        warm = "" if number else "  (warm-up)"
                        print(f"{name}: {taken:.1f} ms a step, matcher's CPU {mine:.2f} ms{warm}", flush=True)
                        found[name] += [taken] if number else []
    middle = {name: statistics.median(each) for name, each in found.items()}
    without, constrained = middle.values()
    print(f"{own['rows']} rows: {without:.1f} ms, with a grammar {constrained:.1f}: {constrained / without:.3f} times")


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> None:
    given = dict(arg.partition("=")[::2] for arg in sys.argv[1:])
    own = OWN | {key: int(value) for key, value in given.items() if key in OWN}
    asyncio.run(measure(own, {key: value for key, value in given.items() if key not in OWN}))


if __name__ == "__main__":
    main()
