"""The demo model converted for the peers is the model that Toka serves."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from toka.model import open_model
from tools.bench.weights import demo_folder


def test_transformers_reads_the_converted_model(tmp_path: Path) -> None:
    folder = demo_folder(tmp_path)
    source, converted = open_model(""), open_model(str(folder))
    assert converted.config.eos_token_ids == source.config.eos_token_ids[:1]
    assert converted.chat_template() == source.chat_template()
    assert converted.tokenizer().to_str() == source.tokenizer().to_str()

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=1, do_sample=False)
    assert tokenizer.decode(answer[0, -1]) == " Paris"
    assert demo_folder(tmp_path) == folder
