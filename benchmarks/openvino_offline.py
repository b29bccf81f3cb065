"""OpenVINO GenAI as a peer: plays workloads that arrive on stdin, as hf_offline.py does, without a server of any kind.

Runs in an environment of its own (openvino-genai); nothing of this project is imported. The lines in and out are those
of hf_offline.py. Continuous batching: requests are added when they are due, and a step runs while there are any.
"""

import argparse
import json
import os
import resource
import sys
import time
from collections import deque
from typing import Any

import openvino_genai as genai

Record = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="GGUF file, or a directory in OpenVINO's format")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--cache-gb", type=int, default=2, help="of the KV cache")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    args = parser.parse_args()
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = args.max_num_batched_tokens
    scheduler.max_num_seqs = 64
    scheduler.cache_size = args.cache_gb
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = True
    precision = {"bfloat16": "bf16", "float32": "f32"}[args.dtype]
    properties = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": args.threads}
    pipeline = genai.ContinuousBatchingPipeline(args.model, scheduler, "CPU", properties)
    names = iter(range(1 << 60))
    for line in sys.stdin:
        workload = json.loads(line)
        records = play(pipeline, names, workload["requests"], workload["max_concurrency"])
        ends_s = [record["token_times_s"][-1] for record in records if record["token_times_s"]]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(
            json.dumps({"records": records, "wall_s": max(ends_s, default=0.0), "peak_memory_bytes": peak}), flush=True
        )


def play(pipeline: Any, names: Any, requests: list[Record], max_concurrency: int | None) -> list[Record]:
    tokenizer = pipeline.get_tokenizer()
    waiting = deque(sorted(requests, key=lambda request: request["due_s"]))
    running: list[tuple[Any, Record]] = []
    records: list[Record] = []
    begin = time.perf_counter()
    while waiting or running:
        now_s = time.perf_counter() - begin
        while waiting and waiting[0]["due_s"] <= now_s and len(running) < (max_concurrency or len(requests)):
            request = waiting.popleft()
            ids = tokenizer.encode(request["prompt"]).input_ids
            record = {
                "due_s": request["due_s"],
                "start_s": now_s if max_concurrency == 1 else request["due_s"],
                "token_times_s": [],
                "prompt_len": ids.shape[1],
                "error": None,
            }
            running.append((pipeline.add_request(next(names), ids, _generation(request["max_tokens"])), record))
            records.append(record)
        if not running:
            time.sleep(max(0.0, waiting[0]["due_s"] - now_s))
            continue
        pipeline.step()
        now_s = time.perf_counter() - begin
        for handle, record in running:
            while handle.can_read():
                for output in handle.read().values():
                    record["token_times_s"] += [now_s] * len(output.generated_ids)
        running = [pair for pair in running if pair[0].get_status() == genai.GenerationStatus.RUNNING]
    for record in records:
        record["error"] = None if record["token_times_s"] else "no tokens"
    return records


def _generation(num_tokens: int) -> Any:
    config = genai.GenerationConfig()
    config.do_sample = False
    config.ignore_eos = True
    config.min_new_tokens = config.max_new_tokens = num_tokens
    return config


if __name__ == "__main__":
    main()
