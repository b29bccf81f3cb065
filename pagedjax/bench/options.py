"""The flags of `pagedjax bench` and what they mean together."""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pagedjax.bench.metrics import Slo
from pagedjax.bench.traces import read_trace
from pagedjax.bench.workload import (
    DEFAULT_IDS,
    WORDS,
    BenchRequest,
    LengthRange,
    Symbols,
    WorkloadConfig,
    replay,
    synthetic,
)
from pagedjax.core.errors import ConfigError

DATASETS = ("random", "shared-prefix", "trace")
DEFAULT_MODEL = "smollm2-135m"
DEFAULT_NUM_PROMPTS = 64
DEFAULT_INPUT_LEN = DEFAULT_OUTPUT_LEN = LengthRange(128, 128)
DEFAULT_PREFIX_LEN = 512
# The seed of warm-up prompts differs, so that they leave nothing useful in the prefix cache.
WARMUP_SEED_OFFSET = 1_000_003
_SYNTHETIC_ONLY = ("input_len", "output_len", "prefix_len", "num_prefixes", "request_rate", "burstiness")
_TRACE_ONLY = ("time_scale", "max_input_len", "max_output_len")


def add_serve(parser: argparse.ArgumentParser) -> None:
    target = parser.add_argument_group("server")
    target.add_argument("--url", help="address of a running server with OpenAI's API; without it, one is started")
    target.add_argument(
        "--model",
        help=f"the server's model name (default: the first it lists), or the model to serve (default: {DEFAULT_MODEL})",
    )
    _add_engine(target, "of the server that is started")
    target.add_argument(
        "--startup-timeout", type=_positive, default=600.0, metavar="S", help="seconds until it is ready"
    )
    target.add_argument(
        "--server-pid", type=_count, metavar="PID", help="process of the running server, for its memory"
    )
    target.add_argument("--api", choices=("completions", "chat"), default="completions", help="(default: %(default)s)")
    target.add_argument("--timeout", type=_positive, default=600.0, metavar="S", help="seconds a request may take")
    target.add_argument("--temperature", type=float, default=0.0, help="(default: %(default)s)")
    target.add_argument(
        "--no-ignore-eos", action="store_true", help="let requests end early (OpenAI's strict fields only)"
    )
    target.add_argument("--extra-body", type=_json_object, default={}, metavar="JSON", help="merged into every request")
    _add_dataset(parser)
    load = parser.add_argument_group("load")
    load.add_argument(
        "--request-rate", type=float, metavar="R", help="requests/s; inf sends all at once (default: inf)"
    )
    load.add_argument(
        "--burstiness", type=float, metavar="B", help="shape of the gamma-distributed gaps; 1 is Poisson (default)"
    )
    load.add_argument("--max-concurrency", type=_count, metavar="N", help="most requests in flight (default: no limit)")
    load.add_argument("--time-scale", type=float, metavar="F", help="multiplies a trace's times; 0.5 is twice the load")
    load.add_argument(
        "--num-warmups", type=_natural, default=4, metavar="N", help="requests before the measured ones (default: 4)"
    )
    load.add_argument(
        "--slo", type=parse_slo, metavar="ttft=MS,…", help="bounds in ms for goodput: ttft, tpot, itl, e2e"
    )
    _add_outputs(parser, plot="distributions of TTFT and ITL, requests in flight over time")


def add_throughput(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    _add_engine(parser, "of the engine")
    _add_dataset(parser)
    parser.add_argument(
        "--num-warmups", type=_natural, default=1, metavar="N", help="prompts before the measured ones (default: 1)"
    )
    _add_outputs(parser)


def add_latency(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    _add_engine(parser, "of the engine")
    parser.add_argument("--batch-size", type=_count, default=1, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--input-len", type=_count, default=128, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--output-len", type=_count, default=128, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--num-iters", type=_count, default=10, metavar="N", help="measured batches (default: %(default)s)"
    )
    parser.add_argument(
        "--num-iters-warmup", type=_natural, default=2, metavar="N", help="before them (default: %(default)s)"
    )
    _add_prompts(parser)
    _add_outputs(parser, plot="distribution of the latency")


def workload(args: argparse.Namespace) -> tuple[BenchRequest, ...]:
    """The requests that the flags describe. Raises ConfigError for flags that do not go together."""
    kind, file = dataset(args)
    given = {name for name in (*_SYNTHETIC_ONLY, *_TRACE_ONLY) if getattr(args, name, None) is not None}
    wrong = given.intersection(_SYNTHETIC_ONLY if kind == "trace" else _TRACE_ONLY)
    if wrong:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(wrong))
        raise ConfigError(f"{flags} does not go with --dataset {kind}")
    if file is not None:
        return replay(
            read_trace(file, args.num_prompts),
            symbols=symbols(args),
            seed=args.seed,
            time_scale=_or(getattr(args, "time_scale", None), 1.0),
            max_input_len=args.max_input_len,
            max_output_len=args.max_output_len,
        )
    return synthetic(synthetic_config(args, args.seed, _or(args.num_prompts, DEFAULT_NUM_PROMPTS)))


def warmup_workload(args: argparse.Namespace) -> tuple[BenchRequest, ...]:
    """`--num-warmups` requests at once, with lengths like those of the measured ones but other prompts."""
    if not args.num_warmups:
        return ()
    seed = args.seed + WARMUP_SEED_OFFSET
    _, file = dataset(args)
    if file is not None:
        return replay(
            read_trace(file, args.num_warmups),
            symbols=symbols(args),
            seed=seed,
            time_scale=0.0,
            max_input_len=args.max_input_len,
            max_output_len=args.max_output_len,
        )
    config = synthetic_config(args, seed, args.num_warmups)
    return tuple(BenchRequest(0.0, r.prompt, r.prompt_len, r.max_tokens) for r in synthetic(config))


def synthetic_config(args: argparse.Namespace, seed: int, num_prompts: int) -> WorkloadConfig:
    shared = dataset(args)[0] == "shared-prefix"
    return WorkloadConfig(
        num_prompts=num_prompts,
        input_len=args.input_len or DEFAULT_INPUT_LEN,
        output_len=args.output_len or DEFAULT_OUTPUT_LEN,
        prefix_len=_or(args.prefix_len, DEFAULT_PREFIX_LEN if shared else 0),
        num_prefixes=_or(args.num_prefixes, 1),
        request_rate=_or(getattr(args, "request_rate", None), math.inf),
        burstiness=_or(getattr(args, "burstiness", None), 1.0),
        symbols=symbols(args),
        seed=seed,
    )


def dataset(args: argparse.Namespace) -> tuple[str, Path | None]:
    """The kind of dataset and, for a trace, its file."""
    kind, *files = args.dataset
    if kind not in DATASETS:
        raise ConfigError(f"--dataset {kind}: choose from {', '.join(DATASETS)}")
    if len(files) != (kind == "trace"):
        raise ConfigError("--dataset trace needs one FILE" if kind == "trace" else f"--dataset {kind} takes no file")
    return kind, Path(files[0]) if files else None


def symbols(args: argparse.Namespace) -> Symbols:
    """What prompts are made of: words or token ids."""
    if args.prompt_format == "text":
        if args.id_range is not None:
            raise ConfigError("--id-range needs --prompt-format ids")
        return WORDS
    if getattr(args, "api", None) == "chat":
        raise ConfigError("--prompt-format ids needs --api completions: chat messages are text")
    return DEFAULT_IDS if args.id_range is None else range(args.id_range.low, args.id_range.high + 1)


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """The flags in force, as JSON values, for the report."""
    hidden = {"run", "bench_mode"}
    return {name: _setting(value) for name, value in vars(args).items() if name not in hidden}


def parse_slo(text: str) -> Slo:
    """`ttft=500,itl=50` in milliseconds."""
    bounds: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in Slo.__dataclass_fields__:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(Slo.__dataclass_fields__)}")
        bounds[name] = _positive(value)
    return Slo(**bounds)


def parse_length(text: str) -> LengthRange:
    """`128` or `32:512`, both ends included."""
    low, colon, high = text.partition(":")
    try:
        return LengthRange(int(low), int(high if colon else low))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a length nor LOW:HIGH") from error
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parse_engine_option(text: str) -> tuple[str, Any]:
    """`dtype=bfloat16`, `max_num_seqs=32`: values are JSON where they parse as such, else text."""
    name, equals, value = text.partition("=")
    name = name.replace("-", "_")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, help="bundled name, GGUF file, model folder or hub id (default: %(default)s)"
    )


def _add_engine(parser: Any, whose: str) -> None:
    parser.add_argument(
        "--engine", type=parse_engine_option, action="append", default=[], metavar="KEY=VALUE",
        help=f"an option {whose}, as in dtype=bfloat16 or max_num_seqs=32; repeatable",
    )  # fmt: skip


def _add_dataset(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--dataset", nargs="+", default=["random"], metavar=("KIND", "FILE"),
        help="random, shared-prefix, or trace FILE (Azure .csv, Mooncake .jsonl)",
    )  # fmt: skip
    group.add_argument(
        "--num-prompts", "--limit", type=_count, metavar="N",
        help=f"requests to send (default: {DEFAULT_NUM_PROMPTS}; a trace's all)",
    )  # fmt: skip
    for side in ("input", "output"):
        group.add_argument(
            f"--{side}-len", type=parse_length, metavar="N|LOW:HIGH", help=f"{side} tokens (default: 128)"
        )
    group.add_argument(
        "--prefix-len", type=_natural, metavar="N", help="tokens of the common prefix (shared-prefix: 512)"
    )
    group.add_argument("--num-prefixes", type=_count, metavar="N", help="different common prefixes (default: 1)")
    for side in ("input", "output"):
        group.add_argument(f"--max-{side}-len", type=_count, metavar="N", help=f"cut a trace's {side} lengths to this")
    _add_prompts(group)


def _add_prompts(parser: Any) -> None:
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument(
        "--prompt-format",
        choices=("text", "ids"),
        default="text",
        help="common words, or token ids (default: %(default)s)",
    )
    parser.add_argument(
        "--id-range", type=parse_length, metavar="LOW:HIGH", help="token ids to draw (default: 1000:29999)"
    )


def _add_outputs(parser: argparse.ArgumentParser, plot: str | None = None) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--json", type=Path, metavar="FILE", help="write every figure, with command, commit and machine")
    if plot:
        group.add_argument("--plot", type=Path, metavar="FILE", help=f"draw a picture (.png, .svg, .pdf): {plot}")


def _number(convert: Callable[[str], Any], low: float, what: str) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = convert(text)
        except ValueError:
            value = math.nan
        if not low <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return parse


_count = _number(int, 1, "a whole number of at least 1")
_natural = _number(int, 0, "a whole number of at least 0")
_positive = _number(float, 1e-9, "a number above 0")


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


def _setting(value: Any) -> Any:
    match value:
        case LengthRange(low, high):
            return [low, high]
        case Slo():
            return {name: getattr(value, name) for name in Slo.__dataclass_fields__}
        case Path():
            return str(value)
        case list() | tuple():
            return [_setting(entry) for entry in value]
        case float() if not math.isfinite(value):
            return str(value)
    return value


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
