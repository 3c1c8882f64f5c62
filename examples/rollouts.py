"""Many samples of each problem, with what reinforcement learning needs: `python examples/rollouts.py [model]`.

The ids are those that were sampled, one log-probability for each, so a trainer need not tokenize the text again.
Samples of one prompt share its computation, and problems are scored as they finish, while others still run.
"""

from __future__ import annotations

import sys

import toka

PROBLEMS = [(f"{first} + {second} =", str(first + second)) for first in range(2, 5) for second in range(2, 5)]
SAMPLES = 16


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else None
    params = toka.SamplingParams(n=SAMPLES, max_tokens=8, temperature=1.0, logprobs=0, stop="\n", seed=1)
    with toka.LLM(model) as llm:
        for output in llm.iter_generate([prompt for prompt, _ in PROBLEMS], params):
            prompt, answer = PROBLEMS[output.index]
            rewards = [float(choice.text.strip().startswith(answer)) for choice in output.outputs]
            baseline = sum(rewards) / len(rewards)
            for choice, reward in zip(output.outputs, rewards):
                assert choice.logprobs is not None and len(choice.logprobs) == len(choice.token_ids)
                trajectory = {
                    "ids": output.prompt_token_ids + choice.token_ids,
                    "logprobs": [each.logprob for each in choice.logprobs],
                    "advantage": reward - baseline,
                }
                assert len(trajectory) == 3, "here it would go to the trainer"
            print(f"{prompt!r}: {sum(rewards):g} of {len(rewards)} right")


if __name__ == "__main__":
    main()
