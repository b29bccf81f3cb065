"""What the load client itself costs per token: it shares cores with the server that it measures.

A process of its own sends one token to each of many streams at every step, as an engine would; the client is the one
of `pagedjax bench serve`. Run: python benchmarks/client_cost.py [--json FILE]
"""

import argparse
import asyncio
import json
import multiprocessing
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from pagedjax.bench.client import LoadResult, Target, run_load
from pagedjax.bench.machine import origin
from pagedjax.bench.metrics import serve_figures
from pagedjax.bench.report import SCHEMA, write_json
from pagedjax.bench.server_process import free_port
from pagedjax.bench.workload import BenchRequest

STEP_S = 0.02
EVENT = {
    "id": "cmpl-0123456789abcdef0123456789abcdef",
    "object": "text_completion",
    "created": 1_700_000_000,
    "model": "smollm2-135m",
    "choices": [{"index": 0, "text": " word", "logprobs": None, "finish_reason": None, "stop_reason": None}],
    "usage": None,
}


@dataclass
class Paced:
    """Writes one event to every open stream at each step; a stream ends after `num_tokens`."""

    num_tokens: int

    def __post_init__(self) -> None:
        self._streams: dict[asyncio.StreamWriter, int] = {}

    async def serve(self, port: int, ready: Event) -> None:
        async with await asyncio.start_server(self._accept, "127.0.0.1", port, backlog=1024):
            ready.set()
            while True:
                await asyncio.sleep(STEP_S)
                self._step()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        self._streams[writer] = 0

    def _step(self) -> None:
        token = chunked(b"data: " + json.dumps(EVENT).encode() + b"\n\n")
        for writer, sent in list(self._streams.items()):
            writer.write(token)
            self._streams[writer] = sent + 1
            if sent + 1 == self.num_tokens:
                usage = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": self.num_tokens}}
                writer.write(chunked(b"data: " + json.dumps(usage).encode() + b"\n\n"))
                writer.write(chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n")
                writer.close()
                del self._streams[writer]


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def measure(num_streams: int, num_tokens: int) -> dict[str, Any]:
    """Client cost per token and what the client saw, with `num_streams` at once."""
    port = free_port()
    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Event()
    server = spawn.Process(target=serve, args=(port, num_tokens, ready), daemon=True)
    server.start()
    try:
        ready.wait(30)
        result = asyncio.run(load(port, num_streams, num_tokens))
    finally:
        server.terminate()
        server.join()
    figures = serve_figures(result.records, result.wall_s)
    if figures.num_ok != num_streams or figures.output_tokens != num_streams * num_tokens or figures.itl_ms is None:
        raise SystemExit(f"only {figures.num_ok} of {num_streams} streams came through: {figures.errors}")
    return {
        "num_streams": num_streams,
        "num_tokens": figures.output_tokens,
        "cpu_us_per_token": result.client_cpu_s / figures.output_tokens * 1e6,
        "cpu_share": result.client_cpu_s / result.wall_s,
        "step_ms": STEP_S * 1e3,
        "itl_ms": figures.itl_ms._asdict(),
    }


async def load(port: int, num_streams: int, num_tokens: int) -> LoadResult:
    target = Target(url=f"http://127.0.0.1:{port}", model="m")
    return await run_load(target, [BenchRequest(0.0, "word", 1, num_tokens)] * num_streams)


def serve(port: int, num_tokens: int, ready: Event) -> None:
    asyncio.run(Paced(num_tokens).serve(port, ready))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [measure(num_streams, args.tokens) for num_streams in args.streams]
    for row in rows:
        cost, share = row["cpu_us_per_token"], row["cpu_share"]
        print(f"{row['num_streams']:4d} streams: {cost:6.1f} us/token, {share:.1%} of a core")
    if args.json:
        write_json(
            args.json,
            {
                "schema": SCHEMA,
                "mode": "client_cost",
                **origin(__file__),
                "figures": rows,
            },
        )


if __name__ == "__main__":
    main()
