"""Memory that samples and beams save by sharing blocks: the scheduler on simulated time, and beams of a real model.

    python benchmarks/sharing.py --beams smollm2-135m --out benchmarks/results/sharing.json

Requests with n samples each arrive in a burst and share nothing else. At every step the blocks that are in use are set
against those that the same sequences would hold without sharing; *saved* is their sum over the run, as in the paper
(PagedAttention, SOSP'23, figure 15: 6 to 10 % with Alpaca's lengths, 16 to 31 % with ShareGPT's, for n of 2 to 6). The
peaks are those of runs that have room for everybody, with forks and without any sharing.

Which beams live on is the model's to say, so beams are searched by one: all prompts at once, as many tokens for each.
(The paper: 38 to 55 % with Alpaca's lengths, 44 to 66 % with ShareGPT's.)
"""

import argparse
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from pagedjax import LLM, SamplingParams
from pagedjax.bench.machine import origin
from pagedjax.core.config import SchedulerConfig
from pagedjax.core.effects import Effect
from pagedjax.core.events import Event, StepDone
from pagedjax.core.state import State
from pagedjax.simulator import H200_LIKE, SimRequest, simulate
from pagedjax.simulator.workload import Traffic, mix

NUM_REQUESTS = 24
# Medians and spreads that give the paper's mean lengths: 19 and 58 tokens, 161 and 338.
LENGTHS = {
    "alpaca": Traffic(
        num_requests=NUM_REQUESTS, rate=100, prompt_median=17, output_median=45, prompt_sigma=0.5, output_sigma=0.7
    ),
    "sharegpt": Traffic(
        num_requests=NUM_REQUESTS, rate=100, prompt_median=98, output_median=205, prompt_sigma=1.0, output_sigma=1.0
    ),
}
SAMPLES = (1, 2, 4, 6, 8)
BEAMS, NUM_BEAM_TOKENS = (2, 4, 6), 58
PROMPTS = (
    "Give three tips for staying healthy, and say for each why it helps.",
    "Describe the structure of an atom to a child of ten years.",
    "What are the three primary colours, and how are they mixed?",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Explain why the sky is blue and why sunsets are red.",
    "Name the largest cities of South America and what they are known for.",
    "Rewrite this sentence so that it sounds more formal: I can't come today.",
    "How does a bill become a law in the United States?",
    "Suggest a simple dinner for two that takes less than half an hour.",
    "Compare the advantages of trains and of cars for a long journey.",
    "What is the difference between weather and climate?",
    "Summarise the plot of Romeo and Juliet in a few sentences.",
)
Figure = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beams", metavar="MODEL", help="search beams with this model too")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    args = parser.parse_args()
    found = []
    report = origin(__file__)
    for figure in chain(figures(), beam_figures(args.beams) if args.beams else ()):
        found.append(figure)
        print(json.dumps(figure), flush=True)
    if args.out:
        args.out.write_text(json.dumps(report | {"figures": found}, indent=1) + "\n")


def figures() -> Iterator[Figure]:
    for name, traffic in LENGTHS.items():
        for n in SAMPLES:
            used, held, peak = run(samples(traffic, n, forks=True))
            *_, peak_apart = run(samples(traffic, n, forks=False))
            saved = round(1 - used / held, 4)
            yield {"lengths": name, "n": n, "saved": saved, "peak_blocks": peak, "peak_blocks_apart": peak_apart}


def beam_figures(model: str) -> Iterator[Figure]:
    """Blocks of the real engine's device pool, step by step."""
    llm = LLM(
        model,
        max_model_len=256,
        max_num_seqs=max(BEAMS) * len(PROMPTS),
        num_gpu_blocks_override=max(BEAMS) * len(PROMPTS) * 16,
        enable_prefix_caching=False,
        show_progress_bars=False,
    )
    for width in BEAMS:
        params = SamplingParams(beam_width=width, max_tokens=NUM_BEAM_TOKENS, ignore_eos=True)
        for index, prompt in enumerate(PROMPTS):
            llm.engine.add(llm.engine.prepare(prompt, params, request_id=str(index)))
        used, held = [0], [0]
        while llm.engine.has_work:
            llm.engine.step()
            state = llm.engine.state
            used.append(len(state.pool.counts))
            held.append(sum(len(sequence.blocks) for sequence in state.running))
        saved = round(1 - sum(used) / sum(held), 4)
        yield {
            "model": model,
            "num_prompts": len(PROMPTS),
            "output_len": NUM_BEAM_TOKENS,
            "beam_width": width,
            "saved": saved,
            "peak_blocks": max(used),
            "peak_blocks_apart": max(held),
        }


def samples(traffic: Traffic, n: int, *, forks: bool) -> list[SimRequest]:
    """Each request n times, with output lengths that belong to others too: samples do not end together."""
    requests = mix(traffic)
    lengths = [request.output_len for request in requests]
    return [
        request._replace(output_len=lengths[(place + index) % len(lengths)], sample_index=index if forks else 0)
        for place, request in enumerate(requests)
        for index in range(n)
    ]


def run(requests: list[SimRequest]) -> tuple[int, int, int]:
    """Blocks in use and blocks in block tables, summed over the steps, and the most in use at once."""
    longest = max(request.prompt_len + request.output_len for request in requests)
    config = SchedulerConfig(
        block_size=16,
        num_blocks=len(requests) * (longest // 16 + 2),
        max_num_seqs=len(requests),
        max_num_batched_tokens=2048,
        max_model_len=longest,
        enable_prefix_caching=False,
    )
    used, held = [0], [0]

    def observe(before: State, event: Event, after: State, effects: tuple[Effect, ...]) -> None:
        if isinstance(event, StepDone):
            used.append(len(after.pool.counts))
            held.append(sum(len(sequence.blocks) for sequence in after.running))

    simulate(config, requests, H200_LIKE, observe=observe)
    return sum(used), sum(held), max(used)


if __name__ == "__main__":
    main()
