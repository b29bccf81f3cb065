"""What the HTTP layer costs: time to the first token beside a scripted engine, memory over many requests, throughput
beside the engine without a server.

    python benchmarks/http_layer.py ttft soak throughput --json benchmarks/results/http_layer.json

Parts that are left out keep the figures that the file has. Where other programs run, `chrt -f 10` before the command
keeps them out of `ttft`.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import aiohttp
import psutil
import uvloop
from scripted_engine import ScriptedEngine

from pagedjax.bench.client import Target, run_load
from pagedjax.bench.machine import origin
from pagedjax.bench.metrics import serve_figures
from pagedjax.bench.report import SCHEMA, write_json
from pagedjax.bench.server_process import free_port, serving
from pagedjax.bench.workload import BenchRequest
from serving.options import ApiOptions
from serving.server import serve

MODEL = "smollm2-135m"
STEP_S = 0.02
PROMPT = "Tell me how a paged KV cache works, and what it is good for. " * 16
RSS_BEFORE, RSS_AFTER = 1000, 10_000
OFFLINE_PROMPTS, OFFLINE_LEN = 48, 64


@contextlib.contextmanager
def scripted_server(step_s: float) -> Iterator[tuple[str, int]]:
    """A server over a scripted engine, in a process of its own: its address and process id."""
    port = free_port()
    process = multiprocessing.get_context("spawn").Process(target=serve_scripted, args=(port, step_s))
    process.start()
    assert process.pid is not None
    try:
        asyncio.run(until_ready(f"http://127.0.0.1:{port}"))
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.join()


def serve_scripted(port: int, step_s: float) -> None:
    serve(lambda: ScriptedEngine(step_s), port=port, options=ApiOptions(access_log="off"))


async def until_ready(url: str) -> None:
    async with aiohttp.ClientSession() as http:
        for _ in range(600):
            with contextlib.suppress(aiohttp.ClientError):
                async with http.get(f"{url}/ready") as answer:
                    if answer.ok:
                        return
            await asyncio.sleep(0.1)
    raise SystemExit("the server does not come up")


# ---- time to the first token -----------------------------------------------------------------------------------------


def ttft(num_streams: int = 32, num_requests: int = 2000) -> dict[str, Any]:
    """From a request's first byte to its answer's first token, less what the engine took for that."""
    with scripted_server(STEP_S) as (url, pid):
        began_s, server = perf_counter(), psutil.Process(pid)
        overheads_s = uvloop.run(ask_in_turn(url, num_streams, num_requests))
        wall_s, cpu_s = perf_counter() - began_s, sum(server.cpu_times()[:2])
    ranked = sorted(1000 * overhead_s for overhead_s in overheads_s)
    return {
        "num_concurrent": num_streams,
        "num_requests": len(ranked),
        "prompt_bytes": len(PROMPT),
        "step_ms": STEP_S * 1e3,
        "p50_ms": statistics.median(ranked),
        "p90_ms": ranked[int(0.90 * len(ranked))],
        "p99_ms": ranked[int(0.99 * len(ranked))],
        "max_ms": ranked[-1],
        "requests_per_s": len(ranked) / wall_s,
        "server_cpu_share": cpu_s / wall_s,
        "is_real_time": os.sched_getscheduler(0) == os.SCHED_FIFO,
    }


async def ask_in_turn(url: str, num_streams: int, num_requests: int) -> list[float]:
    """What each request lost on its way, without the first ones of a connection."""
    loop, port = asyncio.get_running_loop(), int(url.rpartition(":")[2])

    async def one_after_another() -> list[float]:
        # Not all at one tick.
        await asyncio.sleep(random.random() * 0.4)
        _, asker = await loop.create_connection(Asker, "127.0.0.1", port)
        return [await asker.ask() for _ in range(num_requests // num_streams)]

    found = await asyncio.gather(*(one_after_another() for _ in range(num_streams)))
    return [one for each in found for one in each[2:]]


class Asker(asyncio.Protocol):
    """One request after another on a connection. It notes when a first token arrives and does little else, since all
    streams get theirs at once and a client that parses each would be what is measured."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        messages = [{"role": "user", "content": PROMPT}]
        self._body = {"model": "scripted", "messages": messages, "stream": True}

    async def ask(self) -> float:
        """Seconds from sending to the first token, less those that the engine took for it."""
        self._found_s, self._first = 0.0, b""
        self._done = asyncio.get_running_loop().create_future()
        # Of different lengths, so that streams do not fall into step.
        body = json.dumps(self._body | {"max_tokens": random.randint(8, 24)}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        began_s = perf_counter()
        self._transport.write(head.encode() + body)
        await self._done
        return self._found_s - began_s - float(self._first.split(b'"content":"')[2].partition(b'"')[0])

    def data_received(self, data: bytes) -> None:
        if not self._found_s:
            self._first += data
            # The first content is the empty one that comes with the role.
            if self._first.count(b'"content":"') > 1:
                self._found_s = perf_counter()
        if data.endswith(b"0\r\n\r\n"):
            self._done.set_result(None)


# ---- memory ----------------------------------------------------------------------------------------------------------


def soak() -> dict[str, Any]:
    """The server's resident memory after 1,000 requests and after 10,000."""
    with scripted_server(0.001) as (url, pid):
        server, num_done, sizes = psutil.Process(pid), 0, []
        for upto in (RSS_BEFORE, RSS_AFTER):
            asyncio.run(ask_many(url, upto - num_done))
            num_done = upto
            time.sleep(1)
            sizes.append(server.memory_info().rss)
    before, after = sizes
    return {"num_requests": RSS_AFTER, "rss_before_bytes": before, "rss_after_bytes": after, "growth": after / before}


async def ask_many(url: str, num_requests: int) -> None:
    target = Target(url=url, model="scripted", ignore_eos=True)
    requests = [BenchRequest(0.0, f"{i} {PROMPT[:200]}", 50, 8) for i in range(num_requests)]
    result = await run_load(target, requests, max_concurrency=64)
    figures = serve_figures(result.records, result.wall_s)
    if figures.num_ok != num_requests:
        raise SystemExit(f"only {figures.num_ok} of {num_requests} came through: {figures.errors}")


# ---- throughput ------------------------------------------------------------------------------------------------------


def throughput(num_rounds: int = 3) -> dict[str, Any]:
    """Output tokens a second of one burst: of `LLM.generate`, and through HTTP less the client's share of the cores."""
    from pagedjax import LLM, SamplingParams

    draw = random.Random(0)
    prompts = [[draw.randrange(1000, 40_000) for _ in range(OFFLINE_LEN)] for _ in range(OFFLINE_PROMPTS)]
    params = SamplingParams(temperature=0.0, max_tokens=OFFLINE_LEN, ignore_eos=True)
    offline_s, http_s, client_s = [], [], []
    with serving(MODEL, {"enable_prefix_caching": False}, 300.0) as (url, _):
        engine = LLM(MODEL, enable_prefix_caching=False)
        for _ in range(num_rounds + 1):
            began_s = perf_counter()
            engine.generate(prompts, params, use_tqdm=False)
            offline_s.append(perf_counter() - began_s)
            target = Target(url=url, model=MODEL)
            burst = [BenchRequest(0.0, tuple(prompt), OFFLINE_LEN, OFFLINE_LEN) for prompt in prompts]
            result = asyncio.run(run_load(target, burst))
            http_s.append(result.wall_s)
            client_s.append(result.client_cpu_s)
    num_tokens, num_cpus = OFFLINE_PROMPTS * OFFLINE_LEN, os.cpu_count() or 1
    # The first round of each warms up.
    rounds = list(zip(offline_s, http_s, client_s))[1:]
    ratios = [offline / (http - client / num_cpus) for offline, http, client in rounds]
    return {
        "model": MODEL,
        "num_prompts": OFFLINE_PROMPTS,
        "input_len": OFFLINE_LEN,
        "output_len": OFFLINE_LEN,
        "offline_tokens_per_s": [num_tokens / offline for offline, _, _ in rounds],
        "http_tokens_per_s": [num_tokens / http for _, http, _ in rounds],
        "client_cpu_s": [client for _, _, client in rounds],
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


PARTS: dict[str, Callable[[], dict[str, Any]]] = {"ttft": ttft, "soak": soak, "throughput": throughput}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    figures = {part: PARTS[part]() for part in args.parts}
    print(json.dumps(figures, indent=1))
    if args.json:
        kept = json.loads(args.json.read_text())["figures"] if args.json.exists() else {}
        write_json(args.json, {"schema": SCHEMA, "mode": "http_layer", **origin(__file__), "figures": kept | figures})


if __name__ == "__main__":
    main()
