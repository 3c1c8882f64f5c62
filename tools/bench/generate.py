"""Static-batch `generate` of transformers, run by the Python of its own environment:

    python generate.py FOLDER INPUT_TOKENS OUTPUT_TOKENS

Reads a batch size from each line of its input, runs such a batch once, and prints its seconds. Greedy, bfloat16.
"""

import sys
import time

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    folder, (length, tokens) = sys.argv[1], map(int, sys.argv[2:])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    for line in sys.stdin:
        prompt = torch.randint(1_000, 40_000, (int(line), length), generator=generator)
        began = time.perf_counter()
        answer = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            do_sample=False,
        )
        print(time.perf_counter() - began, flush=True)
        assert answer.shape == (int(line), length + tokens)


main()
