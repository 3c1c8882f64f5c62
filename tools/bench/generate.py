"""Static-batch `generate` of transformers, run by the Python of its own environment:

    python generate.py FOLDER INPUT_TOKENS OUTPUT_TOKENS ROUNDS BATCH ...

Prints `{"BATCH": [seconds of each round]}`. Greedy, bfloat16, one warm-up before the rounds that count.
"""

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    folder, (length, tokens, rounds, *batches) = sys.argv[1], map(int, sys.argv[2:])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    figures: dict[int, list[float]] = {batch: [] for batch in batches}
    for batch in batches:
        for _ in range(1 + rounds):
            prompt = torch.randint(1_000, 40_000, (batch, length), generator=generator)
            began = time.perf_counter()
            answer = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                do_sample=False,
            )
            figures[batch].append(time.perf_counter() - began)
            assert answer.shape == (batch, length + tokens)
    print(json.dumps({batch: seconds[1:] for batch, seconds in figures.items()}))


main()
