"""What the HTTP layer costs: time to the first token beside a scripted engine, memory over many requests, throughput
beside the engine without a server.

    python benchmarks/http_layer.py ttft soak soak_engine throughput --json benchmarks/results/http_layer.json

Parts that are left out keep the figures that the file has, with the command and commit that they came from. Where other
programs run, `chrt -f 10` before the command keeps them out of `ttft`.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import socket
import statistics
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

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
# Linux's number on most machines; Python has no name for it.
SO_TIMESTAMPNS = 35
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
    """From a request's first byte until the first token is at the client's socket, less what the engine took for it.

    `client_*` is what goes by until the client has read it there; it is not in the others.
    """
    with scripted_server(STEP_S) as (url, pid):
        began_s, server = perf_counter(), psutil.Process(pid)
        waits = uvloop.run(ask_in_turn(url, num_streams, num_requests))
        wall_s, cpu_s = perf_counter() - began_s, sum(server.cpu_times()[:2])
    overheads_ms, client_ms = ([1000 * wait[i] for wait in waits] for i in range(2))
    return {
        "num_concurrent": num_streams,
        "num_requests": len(waits),
        "prompt_bytes": len(PROMPT),
        "step_ms": STEP_S * 1e3,
        **percentiles(overheads_ms),
        **{f"client_{name}": value for name, value in percentiles(client_ms).items()},
        "requests_per_s": len(waits) / wall_s,
        "server_cpu_share": cpu_s / wall_s,
        "is_real_time": os.sched_getscheduler(0) == os.SCHED_FIFO,
    }


def percentiles(values_ms: list[float]) -> dict[str, float]:
    ranked = sorted(values_ms)
    return {
        "p50_ms": statistics.median(ranked),
        "p90_ms": ranked[int(0.90 * len(ranked))],
        "p99_ms": ranked[int(0.99 * len(ranked))],
        "max_ms": ranked[-1],
    }


class Wait(NamedTuple):
    """What one request lost on its way to the client's socket, and from there into the client, in seconds."""

    overhead_s: float
    client_s: float


async def ask_in_turn(url: str, num_streams: int, num_requests: int) -> list[Wait]:
    """What each request lost, without the first ones of a connection."""
    port = int(url.rpartition(":")[2])

    async def one_after_another() -> list[Wait]:
        # Not all at one tick.
        await asyncio.sleep(random.random() * 0.4)
        with Asker(port) as asker:
            return [await asker.ask() for _ in range(num_requests // num_streams)]

    found = await asyncio.gather(*(one_after_another() for _ in range(num_streams)))
    return [one for each in found for one in each[2:]]


class Asker:
    """One request after another on a connection. The kernel notes when bytes arrive (SO_TIMESTAMPNS), since all streams
    get theirs at once, and a client that takes them one by one would be part of what is measured."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self._socket.setblocking(False)
        messages = [{"role": "user", "content": PROMPT}]
        self._body = {"model": "scripted", "messages": messages, "stream": True}

    def __enter__(self) -> "Asker":
        asyncio.get_running_loop().add_reader(self._socket, self._read)
        return self

    def __exit__(self, *_error: object) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()

    async def ask(self) -> Wait:
        """Sends one, and returns at the answer's end. Raises ConnectionError, and ValueError if it has no content."""
        self._wait: Wait | None = None
        self._first = b""
        self._done: asyncio.Future[Wait] = asyncio.get_running_loop().create_future()
        # Of different lengths, so that streams do not fall into step.
        body = json.dumps(self._body | {"max_tokens": random.randint(8, 24)}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        self._began_s = time.time()
        self._socket.send(head.encode() + body)
        return await self._done

    def _read(self) -> None:
        data, notes, _, _ = self._socket.recvmsg(65536, 64)
        if not data:
            self._done.set_exception(ConnectionError("the server closed a connection"))
        elif self._wait is None:
            self._first += data
            # The first content is the empty one that comes with the role.
            _, *contents = self._first.split(b'"content":"')
            if len(contents) > 1:
                seconds, nanoseconds = struct.unpack("qq", notes[0][2])
                arrived_s, engine_s = seconds + nanoseconds / 1e9, float(contents[1].partition(b'"')[0])
                self._wait = Wait(arrived_s - self._began_s - engine_s, time.time() - arrived_s)
        if data.endswith(b"0\r\n\r\n"):
            if self._wait is None:
                self._done.set_exception(ValueError(f"an answer without content: {self._first[:200]!r}"))
            else:
                self._done.set_result(self._wait)


# ---- memory ----------------------------------------------------------------------------------------------------------


def soak() -> dict[str, Any]:
    """The server's resident memory after 1,000 requests and after 10,000, beside a scripted engine."""
    with scripted_server(0.001) as (url, pid):
        return growth(pid, lambda i: BenchRequest(0.0, f"{i} {PROMPT[:200]}", 50, 8), Target(url=url, model="scripted"))


def soak_engine() -> dict[str, Any]:
    """The same of the server and an engine that computes; with so few blocks that all are used by the first look."""
    with serving(MODEL, {"num_gpu_blocks_override": 512, "max_model_len": 512}, 300.0) as (url, pid):
        return growth(pid, lambda i: BenchRequest(0.0, f"{i} {PROMPT[:60]}", 20, 2), Target(url=url, model=MODEL))


def growth(pid: int, request: Callable[[int], BenchRequest], target: Target) -> dict[str, Any]:
    """What the process and its children hold after the first requests and after all: numbered ones, so that no two are
    the same."""
    num_done, sizes = 0, []
    for upto in (RSS_BEFORE, RSS_AFTER):
        asyncio.run(ask_all(target, [request(i) for i in range(num_done, upto)]))
        num_done = upto
        time.sleep(1)
        server = psutil.Process(pid)
        sizes.append(sum(one.memory_info().rss for one in (server, *server.children(recursive=True))))
    before, after = sizes
    return {"num_requests": RSS_AFTER, "rss_before_bytes": before, "rss_after_bytes": after, "growth": after / before}


async def ask_all(target: Target, requests: list[BenchRequest]) -> None:
    result = await run_load(target, requests, max_concurrency=64)
    figures = serve_figures(result.records, result.wall_s)
    if figures.num_ok != len(requests):
        raise SystemExit(f"only {figures.num_ok} of {len(requests)} came through: {figures.errors}")


# ---- throughput ------------------------------------------------------------------------------------------------------


def throughput(num_rounds: int = 9) -> dict[str, Any]:
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


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "ttft": ttft,
    "soak": soak,
    "soak_engine": soak_engine,
    "throughput": throughput,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    source = origin(__file__)
    told = {"command": source["command"], "commit": source["git"]["commit"], "load_average": source["load_average"]}
    figures = {part: PARTS[part]() | told for part in args.parts}
    print(json.dumps(figures, indent=1))
    if args.json:
        kept = json.loads(args.json.read_text())["figures"] if args.json.exists() else {}
        write_json(args.json, {"schema": SCHEMA, "mode": "http_layer", **source, "figures": kept | figures})


if __name__ == "__main__":
    main()
