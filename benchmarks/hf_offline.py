"""Hugging Face transformers as a peer: plays workloads that arrive on stdin, without a server of any kind.

Runs in an environment of its own (torch, transformers); nothing of this project is imported. Each line in is
{"requests": [{"due_s", "prompt", "max_tokens"}], "max_concurrency": N or null}; each line out is {"records": [...],
"wall_s", "peak_memory_bytes"}, times in seconds since the workload's start.

static: `generate` on left-padded batches. Whatever has arrived when the last batch ends makes the next one, up to
--batch-size; a batch runs to its longest output, and what a request did not ask for is not counted.
continuous: transformers' own continuous batching, requests added when they are due.
"""

import argparse
import json
import os
import resource
import sys
import time
from collections import deque
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# transformers looks for a package named kernels and would find the benchmark of that name beside this script.
sys.path.pop(0)

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, StoppingCriteria, StoppingCriteriaList

Record = dict[str, Any]
EOS_NEVER = -1


class NoteTimes(StoppingCriteria):
    """Asked after every step: notes when, stops never."""

    def __init__(self, begin: float) -> None:
        self.begin = begin
        self.times_s: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.times_s.append(time.perf_counter() - self.begin)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Static:
    def __init__(self, model: Any, tokenizer: Any, batch_size: int) -> None:
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size

    def play(self, requests: list[Record], max_concurrency: int | None) -> list[Record]:
        limit = min(self.batch_size, max_concurrency or self.batch_size)
        begin, records = time.perf_counter(), []
        waiting = deque(sorted(requests, key=lambda request: request["due_s"]))
        while waiting:
            now_s = time.perf_counter() - begin
            if waiting[0]["due_s"] > now_s:
                time.sleep(waiting[0]["due_s"] - now_s)
                now_s = waiting[0]["due_s"]
            batch = []
            while waiting and len(batch) < limit and waiting[0]["due_s"] <= now_s:
                batch.append(waiting.popleft())
            # With a concurrency limit of one, a request is sent only when the one before it has ended.
            starts_s = [now_s if max_concurrency == 1 else request["due_s"] for request in batch]
            records += self._generate(batch, starts_s, begin)
        return records

    def _generate(self, batch: list[Record], starts_s: list[float], begin: float) -> list[Record]:
        inputs = self.tokenizer([request["prompt"] for request in batch], return_tensors="pt", padding=True)
        num_tokens = max(request["max_tokens"] for request in batch)
        note = NoteTimes(begin)
        self.model.generate(
            **inputs,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=self.tokenizer.pad_token_id,
            stopping_criteria=StoppingCriteriaList([note]),
        )
        lens = inputs["attention_mask"].sum(dim=1).tolist()
        return [
            make_record(request, start_s, prompt_len, note.times_s[: request["max_tokens"]])
            for request, start_s, prompt_len in zip(batch, starts_s, lens)
        ]


class Continuous:
    def __init__(self, model: Any, tokenizer: Any, num_blocks: int, max_batch_tokens: int) -> None:
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        self.model, self.tokenizer = model, tokenizer
        self.config = ContinuousBatchingConfig(num_blocks=num_blocks, max_batch_tokens=max_batch_tokens)
        self.generation = GenerationConfig(
            do_sample=False, eos_token_id=EOS_NEVER, pad_token_id=tokenizer.pad_token_id, use_cache=False
        )

    def play(self, requests: list[Record], max_concurrency: int | None) -> list[Record]:
        waiting = deque(sorted(requests, key=lambda request: request["due_s"]))
        ids = {id(request): self.tokenizer(request["prompt"]).input_ids for request in waiting}
        running: dict[str, tuple[Record, float]] = {}
        records = []
        with self.model.continuous_batching_context_manager(
            generation_config=self.generation, continuous_batching_config=self.config
        ) as manager:
            begin = time.perf_counter()
            while waiting or running:
                now_s = time.perf_counter() - begin
                while waiting and waiting[0]["due_s"] <= now_s and len(running) < (max_concurrency or len(requests)):
                    request = waiting.popleft()
                    name = manager.add_request(
                        ids[id(request)],
                        max_new_tokens=request["max_tokens"],
                        record_timestamps=True,
                        eos_token_id=EOS_NEVER,
                    )
                    running[name] = (request, now_s if max_concurrency == 1 else request["due_s"])
                result = manager.get_result(timeout=self._patience_s(waiting, now_s))
                if result is not None and result.is_finished():
                    request, start_s = running.pop(result.request_id)
                    times_s = [stamp - begin for stamp in result.timestamps or ()]
                    records.append(make_record(request, start_s, len(result.prompt_ids), times_s, result.error))
                elif result is None and not manager.is_running():
                    raise SystemExit("transformers' continuous batching ended by itself")
        return records

    @staticmethod
    def _patience_s(waiting: deque[Record], now_s: float) -> float:
        return min(1.0, max(0.001, waiting[0]["due_s"] - now_s)) if waiting else 1.0


def make_record(
    request: Record, start_s: float, prompt_len: int, times_s: list[float], error: str | None = None
) -> Record:
    return {
        "due_s": request["due_s"],
        "start_s": start_s,
        "token_times_s": times_s,
        "prompt_len": prompt_len,
        "error": error if error or times_s else "no tokens",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="directory in Hugging Face's format")
    parser.add_argument("--mode", choices=("static", "continuous"), default="static")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--batch-size", type=int, default=64, help="of static batches")
    parser.add_argument("--num-blocks", type=int, default=256, help="of 256 tokens, for continuous batching")
    parser.add_argument("--max-batch-tokens", type=int, default=512, help="for continuous batching")
    args = parser.parse_args()
    # Libraries may print; the answers alone belong on stdout.
    answers, sys.stdout = sys.stdout, sys.stderr
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=getattr(torch, args.dtype), attn_implementation="sdpa"
    ).eval()
    if args.mode == "static":
        player: Static | Continuous = Static(model, tokenizer, args.batch_size)
    else:
        player = Continuous(model, tokenizer, args.num_blocks, args.max_batch_tokens)
    for line in sys.stdin:
        workload = json.loads(line)
        with torch.inference_mode():
            records = player.play(workload["requests"], workload["max_concurrency"])
        ends_s = [record["token_times_s"][-1] for record in records if record["token_times_s"]]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        answer = {"records": records, "wall_s": max(ends_s, default=0.0), "peak_memory_bytes": peak}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
