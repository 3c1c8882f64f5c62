"""lm-eval as its users run it: tasks of one's own in YAML over local JSONL, by its `hf` model and by a server.

    python -m tests.support.lm_eval_run URL FOLDER

FOLDER holds what URL serves, in `model`, and all files that come of it. Prints as JSON what every evaluation got,
document by document.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

CHOICES = [
    ("The capital of France is", ["Paris, on the Seine", "Rome", "a very large cat", "London"], 0),
    ("Water boils at one hundred", ["degrees Celsius", "apples", "of them", "kilometres above the sea"], 0),
    ("def add(a, b):\n    return", ["a + b", "a - b", "None", "the sum of both\n"], 0),
    ("Zwölf Boxkämpfer jagen Viktor quer über den", ["großen Sylter Deich", "Tisch", "naïve café", "🚀"], 0),
    ("One, two, three,", ["four, five, six", "banana", "two, one", "three hundred and twelve"], 0),
    ("She opened the window because it was", ["hot", "hot in the room", "a window", "Tuesday"], 1),
    ("The opposite of dark is", ["light", "darker", "blue", "night"], 0),
    ("Dear Sir or Madam,\n\nI am writing", ["to you", "to complain about the noise", "rite", "\n"], 1),
]
QUESTIONS = ["Name a colour.", "What is two plus two?", "Who wrote Hamlet?", "Say hello in German.", "Count to five."]
SCORED = """
task: scored
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {folder}/scored.jsonl}}}}
validation_split: validation
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: choices
doc_to_target: answer
"""
WRITTEN = """
task: written
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {folder}/written.jsonl}}}}
validation_split: validation
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: ""
generation_kwargs: {{until: ["\\n\\n", "!"], max_gen_toks: 24, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


def write_tasks(folder: Path) -> None:
    documents = {
        "scored": [{"context": text, "choices": choices, "answer": answer} for text, choices, answer in CHOICES],
        "written": [{"question": question} for question in QUESTIONS],
    }
    for name, task in (("scored", SCORED), ("written", WRITTEN)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in documents[name]))
        (folder / f"{name}.yaml").write_text(task.format(folder=folder))


def evaluate(model: str, arguments: dict[str, Any], task: str, folder: Path, **options: Any) -> list[Any]:
    """The responses to each document: (log-probability, whether it is the greedy one) of each choice, or a text."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    result = lm_eval.simple_evaluate(
        model=model, model_args=arguments, tasks=[task], task_manager=manager, bootstrap_iters=0, **options
    )
    samples = sorted(result["samples"][task], key=lambda sample: sample["doc_id"])
    return [[response[0] for response in sample["resps"]] for sample in samples]


def main() -> None:
    url, folder = sys.argv[1], Path(sys.argv[2])
    write_tasks(folder)
    model = str(folder / "model")
    here = {"pretrained": model, "dtype": "float32"}
    server = {"model": "default", "base_url": f"{url}/v1/completions", "num_concurrent": 3}
    local = server | {"tokenizer": model, "tokenizer_backend": "huggingface"}
    remote = server | {"tokenizer_backend": "remote"}
    chat = {"model": "default", "base_url": f"{url}/v1/chat/completions", "num_concurrent": 3}
    found = {
        "scored": {
            "hf": evaluate("hf", here, "scored", folder, device="cpu"),
            "huggingface": evaluate("local-completions", local, "scored", folder, batch_size=4),
            "remote": evaluate("local-completions", remote, "scored", folder),
            "texts": evaluate("local-completions", local | {"tokenized_requests": False}, "scored", folder),
        },
        "written": {
            "hf": evaluate("hf", here, "written", folder, device="cpu"),
            "huggingface": evaluate("local-completions", local, "written", folder, batch_size=2),
            "remote": evaluate("local-completions", remote, "written", folder),
        },
        "chatted": {
            "hf": evaluate("hf", here, "written", folder, device="cpu", apply_chat_template=True),
            "chat": evaluate("local-chat-completions", chat, "written", folder, apply_chat_template=True),
        },
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
