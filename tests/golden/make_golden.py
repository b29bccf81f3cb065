"""Make greedy references with transformers: `python make_golden.py MODEL.gguf PROMPTS.json > OUT.json`.

PROMPTS.json is a list of {"prompt": text} and {"messages": [...]}. Needs torch, transformers and gguf, none of which
the project's tests need.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

NUM_TOKENS = 48


def main() -> None:
    path = Path(sys.argv[1])
    options = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(**options)
    model = AutoModelForCausalLM.from_pretrained(**options, dtype=torch.float32).eval()
    cases = json.loads(Path(sys.argv[2]).read_text())
    print(json.dumps([reference(model, tokenizer, case) for case in cases], ensure_ascii=False))


def reference(model, tokenizer, case):
    """The case with its ids, and per generated token its log-probability and margin to the runner-up."""
    text = case.get("prompt")
    if text is None:
        text = tokenizer.apply_chat_template(case["messages"], tokenize=False, add_generation_prompt=True)
    prompt_ids = tokenizer(text, add_special_tokens=False).input_ids
    ids, logprobs, margins = list(prompt_ids), [], []
    while len(logprobs) < NUM_TOKENS and (not logprobs or ids[-1] != tokenizer.eos_token_id):
        with torch.no_grad():
            scores = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1], -1)
        best = scores.topk(2)
        ids.append(int(best.indices[0]))
        logprobs.append(round(float(best.values[0]), 5))
        margins.append(round(float(best.values[0] - best.values[1]), 5))
    generated = ids[len(prompt_ids) :]
    text = tokenizer.decode(generated, skip_special_tokens=True)
    found = {"prompt_ids": prompt_ids, "greedy_ids": generated, "logprobs": logprobs, "margins": margins, "text": text}
    return case | found


if __name__ == "__main__":
    main()
