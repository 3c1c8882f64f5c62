"""Completions and a chat, without a server: `python examples/generate.py [model]` (without one, the demo model)."""

from __future__ import annotations

import sys

import toka


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else None
    with toka.LLM(model, progress=True) as llm:
        params = toka.SamplingParams(max_tokens=24, temperature=0)
        for output in llm.generate(["The sea was", "Once upon a time", "The capital of France is"], params):
            print(f"{output.prompt!r} -> {output.text!r}")

        question = [{"role": "user", "content": "Name three colours."}]
        (answer,) = llm.chat(question, toka.SamplingParams(max_tokens=40, temperature=0))
        print(f"{answer.text!r} ({answer.usage.completion_tokens} tokens)")


if __name__ == "__main__":
    main()
