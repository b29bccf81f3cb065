"""What each dtype, quantisation of weights and type of KV cache costs in quality, against float32 of the same model.

    python benchmarks/quality.py [--model smollm2-135m] [--json benchmarks/results/quality.json]
    PAGEDJAX_NATIVE=off python benchmarks/quality.py --variants grouped int8 --json benchmarks/results/quality_xla.json

Perplexity is that of the text in data/opticks.txt, in windows of 512 tokens whose first is given, by the engine's own
prompt log-probabilities. "argmax_agreement" is the part of those positions at which the likeliest token is float32's.
"greedy_tokens" counts the tokens that continuations of the beginnings of windows share with float32's before the first
that differs. The gates are the ratios in GATES; the exit status is 1 where one is missed.

The text is the beginning of Isaac Newton's Opticks, 4th edition, London 1730: in the public domain everywhere. Figures'
captions are left out.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

from pagedjax import LLM, SamplingParams
from pagedjax.bench.machine import origin
from pagedjax.weights import load, store
from pallas_kernels import native

TEXT = Path(__file__).parent / "data" / "opticks.txt"
WINDOW = 512
NUM_CONTINUED, CONTINUED_AT, CONTINUED_BY = 16, 128, 48
LIMITS = {"max_model_len": 1024, "max_num_seqs": 8, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 512}
VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "grouped": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "grouped_kv_int8": {"kv_cache_dtype": "int8"},
    "kv_int8": {"dtype": "float32", "kv_cache_dtype": "int8"},
    "kv_fp8": {"dtype": "float32", "kv_cache_dtype": "fp8_e4m3"},
}
# Perplexity over float32's at most.
GATES = {name: 1.01 for name in VARIANTS if name != "float32"}


class Scores(NamedTuple):
    """Of one variant: log-probabilities and likeliest tokens of all scored positions, and continuations."""

    logprobs: list[float]
    likeliest: list[int]
    continuations: list[list[int]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--windows", type=int, help="the first so many only")
    parser.add_argument("--json")
    options = parser.parse_args()
    measured = origin(__file__)
    text = TEXT.read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(["float32", *options.variants]):
        llm = LLM(options.model, show_progress_bars=False, **LIMITS, **VARIANTS[name])
        cut = windows(llm.get_tokenizer().encode(text, add_special_tokens=False))[: options.windows]
        scores = score(llm, cut)
        if name == "float32":
            exact = scores
        found[name] = compare(scores, exact) | {"options": VARIANTS[name]}
        print(f"{name}: " + "  ".join(f"{key} {value}" for key, value in found[name].items()), flush=True)
        del llm
    missed = [name for name, most in GATES.items() if name in found and found[name]["perplexity_ratio"] > most]
    print(f"missed: {', '.join(missed)}" if missed else "every gate is kept")
    if options.json:
        with load.open_checkpoint(store.resolve(options.model)) as checkpoint:
            encodings = sorted(set(checkpoint.encodings.values()))
        record = {
            **measured,
            "encodings": encodings,
            "native_kernels": native.unavailable() or native.load().level,
            "num_tokens": sum(map(len, cut)),
            "gates": GATES,
            "variants": found,
        }
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n")
    return bool(missed)


def windows(token_ids: list[int]) -> list[list[int]]:
    return [token_ids[start : start + WINDOW] for start in range(0, len(token_ids) - 1, WINDOW)]


def score(llm: LLM, cut: list[list[int]], *, continued: int = NUM_CONTINUED) -> Scores:
    """One variant's scores of the tokens of each window but the first, and continuations of so many windows."""
    outputs = llm.generate(cut, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1), use_tqdm=False)
    entries = [
        (entry, token) for output, ids in zip(outputs, cut) for entry, token in zip(output.prompt_logprobs[1:], ids[1:])
    ]
    greedy = SamplingParams(temperature=0, max_tokens=CONTINUED_BY, ignore_eos=True)
    later = llm.generate([ids[:CONTINUED_AT] for ids in cut[:continued]], greedy, use_tqdm=False) if continued else []
    return Scores(
        [entry[token].logprob for entry, token in entries],
        [max(entry, key=lambda token: entry[token].logprob) for entry, _ in entries],
        [list(output.outputs[0].token_ids) for output in later],
    )


def compare(scores: Scores, exact: Scores) -> dict[str, float]:
    perplexity, reference = (math.exp(-sum(s.logprobs) / len(s.logprobs)) for s in (scores, exact))
    same = [a == b for a, b in zip(scores.likeliest, exact.likeliest, strict=True)]
    shared = [num_shared(a, b) for a, b in zip(scores.continuations, exact.continuations, strict=True)]
    return {
        "perplexity": round(perplexity, 4),
        "perplexity_ratio": round(perplexity / reference, 5),
        "argmax_agreement": round(sum(same) / len(same), 4),
        "greedy_tokens": round(sum(shared) / max(len(shared), 1), 1),
    }


def num_shared(a: list[int], b: list[int]) -> int:
    """How many tokens a and b begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


if __name__ == "__main__":
    sys.exit(main())
