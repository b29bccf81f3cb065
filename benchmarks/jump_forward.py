"""What jump-forward saves: answers to JSON schemas with and without it, in turn, in one process.

    python benchmarks/jump_forward.py smollm2-135m --out benchmarks/results/jump_forward.json

Without it each token that the grammar forces takes a step like any other. At temperature 0 the tokens are the same both
times, but for rounding: in bfloat16 a chunk may round otherwise than its tokens one by one. `cpu_s` is the processor
time of all threads, `wall_s` the time that passed; both are medians of the rounds, of which a first one is not counted.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagedjax import LLM, SamplingParams
from pagedjax.bench.machine import origin
from pagedjax.core.structure import StructuredOutputsParams
from pagedjax.engine.grammar import GrammarState


def record(**properties: Any) -> dict[str, Any]:
    """The schema of an object that has all of these."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


TEXT, NUMBER = {"type": "string", "maxLength": 24}, {"type": "integer", "minimum": 0, "maximum": 9999}
SHAPES = {
    "user": record(name=TEXT, age=NUMBER, email=TEXT, active={"type": "boolean"}),
    "order": record(
        order_number=NUMBER,
        customer_email_address=TEXT,
        shipping_address=record(street_address=TEXT, postal_code=TEXT, city=TEXT),
        payment_method={"enum": ["credit_card", "bank_transfer", "cash_on_delivery"]},
        is_gift_wrapped={"type": "boolean"},
    ),
    "call": record(
        name={"const": "get_current_weather_forecast"},
        arguments=record(
            location=TEXT,
            temperature_unit={"enum": ["celsius", "fahrenheit"]},
            number_of_days={"type": "integer", "minimum": 1, "maximum": 7},
        ),
    ),
}
PROMPT = "Write one made-up example of this as JSON: {}."
Figure = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--at-once", type=int, nargs="*", default=[1, 8], help="equal requests at a time")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    args = parser.parse_args()
    report, found = origin(__file__), []
    llm = LLM(args.model, max_model_len=512, num_gpu_blocks_override=512, show_progress_bars=False)
    for figure in figures(llm, args.at_once, args.rounds):
        found.append(figure)
        print(json.dumps(figure), flush=True)
    if args.out:
        args.out.write_text(json.dumps(report | {"figures": found}, indent=1) + "\n")


def figures(llm: LLM, at_once: list[int], num_rounds: int) -> Iterator[Figure]:
    for name in SHAPES:
        for num_requests in at_once:
            rounds = [
                [answer(llm, name, num_requests, jumps=jumps) for jumps in (True, False)] for _ in range(num_rounds + 1)
            ]
            with_it, without = (medians(runs[1:]) for runs in zip(*rounds))
            yield {
                "shape": name,
                "num_requests": num_requests,
                "same_tokens": all(one["token_ids"] == other["token_ids"] for one, other in rounds),
                "with": with_it,
                "without": without,
            }


def medians(runs: tuple[Figure, ...] | list[Figure]) -> Figure:
    names = ("steps", "output_tokens", "forced_tokens", "cpu_s", "wall_s")
    return {name: round(statistics.median(run[name] for run in runs), 4) for name in names}


def answer(llm: LLM, name: str, num_requests: int, *, jumps: bool) -> Figure:
    """Requests for one shape, each with a prompt of its own, from the first to the last token."""
    shape = StructuredOutputsParams(json=SHAPES[name])
    params = SamplingParams(temperature=0.0, max_tokens=256, structured_outputs=shape)
    chats = [[{"role": "user", "content": PROMPT.format(f"{name} {i}")}] for i in range(num_requests)]
    forced, before = GrammarState.forced, counts(llm)
    if not jumps:
        GrammarState.forced = lambda self: None
    try:
        wall, cpu = time.perf_counter(), time.process_time()
        outputs = llm.chat(chats, params, use_tqdm=False)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    finally:
        GrammarState.forced = forced
    token_ids = [output.outputs[0].token_ids for output in outputs]
    steps, forced_tokens = (now - old for now, old in zip(counts(llm), before))
    return {
        "token_ids": token_ids,
        "steps": steps,
        "output_tokens": sum(map(len, token_ids)),
        "forced_tokens": forced_tokens,
        "cpu_s": cpu,
        "wall_s": wall,
    }


def counts(llm: LLM) -> tuple[float, float]:
    registry = llm.engine.metrics.registry
    names = ("pagedjax_steps_total", "pagedjax_jump_forward_tokens_total")
    steps, forced = (registry.get_sample_value(name) or 0.0 for name in names)
    return steps, forced


if __name__ == "__main__":
    main()
