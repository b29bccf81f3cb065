"""The command `pagedjax`: serve, chat, pull, bench, info.

Everything heavy is imported inside the command that needs it, so that `pagedjax --help` answers at once.
"""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from pagedjax import __version__
from pagedjax.cli import flags
from pagedjax.cli.flags import option
from pagedjax.cli.placement import EngineProcess, has_own_process
from pagedjax.core.errors import ConfigError, RequestError
from pagedjax.engine.huge_pages import restart_with_huge_pages

DEFAULT_MODEL = "smollm2-135m"
COST_MODELS = ("cpu-xla", "h200-like")
COMPUTING = ("serve", "chat", "bench")  # commands that run a model in this process
MODEL_HELP = "a bundled name (smollm2-135m), a GGUF file, a directory with config.json and safetensors, or a hub id"


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What `serve` sets beside the engine."""

    host: str = option("127.0.0.1", "http", "address to listen on")
    port: int = option(8000, "http", "port to listen on; 0 takes a free one")
    max_body_bytes: int = option(8 * 2**20, "http", "largest request body in bytes; larger ones are refused (413)")
    drain_timeout_s: float = option(30.0, "http", "seconds that running requests have to finish after SIGTERM")
    engine_process: EngineProcess = option(
        "auto", "http", "run the engine in a process of its own; auto does so on more than one core"
    )
    request_timeout_s: float = option(
        3600.0, "http", "seconds that a request has for its whole answer before it is ended (504); 0 is no limit"
    )
    step_timeout_s: float = option(
        120.0, "http", "seconds after which a step counts as stuck: /health says so, and the process ends; 0 never"
    )
    api_keys: str | None = option(
        None, "http", "TOML file of API keys; with keys every route but /health needs one", "none"
    )
    lenient: bool = option(False, "http", "pass over unknown fields of requests instead of refusing them")
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "json"] = option(
        "auto", "http", "the form in which the model writes tool calls; auto goes by its chat template"
    )
    chat_template_kwargs: str = option(
        "enable_thinking", "http", "names that requests may hand to the chat template, separated by commas"
    )
    allowed_hosts: str | None = option(
        None,
        "http",
        "names that a request's Host may hold beside addresses and localhost, separated by commas",
        "any; but none on a loopback address without keys",
    )
    trust_tenant_header: bool = option(False, "http", "take a request's tenant from its X-Tenant header")
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "http", "least severe level to log")
    access_log: Literal["text", "json", "off"] = option(
        "text", "http", "a line a request: text in the log, json on standard output, off for none"
    )
    otlp_traces_endpoint: str | None = option(
        None, "http", "URL to send OpenTelemetry's spans to, such as http://localhost:4318/v1/traces", "none"
    )
    profile_dir: str | None = option(
        None, "http", "where POST /admin/profile puts JAX's profiles", "none: none are taken"
    )

    def __post_init__(self) -> None:
        if self.max_body_bytes < 1:
            raise ConfigError(f"max_body_bytes must be at least 1, not {self.max_body_bytes}; set --max-body-bytes")
        if not 0 <= self.drain_timeout_s < float("inf"):
            raise ConfigError(f"drain_timeout_s must be 0 or more, not {self.drain_timeout_s}; set --drain-timeout-s")


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """What `chat` sets beside the engine. None is left to the engine or the server."""

    url: str | None = option(None, "conversation", "talk to the server at this address, start no engine here", "none")
    api_key: str | None = option(None, "conversation", "key that the server at --url asks for", "none")
    system: str | None = option(None, "conversation", "system message that opens the conversation", "none")
    temperature: float = option(0.7, "conversation", "0 is greedy, 2 the most random")
    top_p: float = option(1.0, "conversation", "sample from the likeliest tokens that have this probability together")
    max_tokens: int | None = option(None, "conversation", "longest answer in tokens", "up to the context's end")


def main() -> NoReturn:
    """Run the command that this process was started with, and leave with its exit status.

    It leaves without the interpreter's own exit, which waits seconds for what XLA and the compiling threads have
    left: by now servers have drained and files are closed, and the system frees the rest at once.
    """
    if sys.argv[1:2] and sys.argv[1] in COMPUTING:
        restart_with_huge_pages()
    status = run(sys.argv[1:])
    logging.shutdown()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        status = status or 1
    os._exit(status)


def run(words: Sequence[str]) -> int:
    """Run one command; gives the exit status: 0, 1 for a failure, 2 for wrong usage or configuration."""
    words = list(words)
    if words[:1] == ["bench"]:
        # It has sub-commands of its own.
        return _guarded("bench", _bench, words[1:])
    args = parser().parse_args(words)
    return _guarded(args.command, args.run, args)


def parser() -> argparse.ArgumentParser:
    """The whole command line. Flags left out are absent from the namespace, so that a --config file can set them."""
    top = argparse.ArgumentParser(
        prog="pagedjax", description="Serve language models with paged attention, in JAX.", allow_abbrev=False
    )
    top.add_argument("--version", action="version", version=f"pagedjax {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    serve = _add_command(commands, "serve", "serve a model over HTTP with OpenAI's API", _serve)
    _add_settings(serve, ServeOptions, f"{MODEL_HELP}; may stand in --config instead")
    chat = _add_command(commands, "chat", "chat with a model in the terminal", _chat)
    _add_settings(chat, ChatOptions, f"{MODEL_HELP} (default: {DEFAULT_MODEL})")
    pull = _add_command(commands, "pull", "fetch a bundled model into the model cache and print its path", _pull)
    pull.add_argument("model", metavar="MODEL", help=f"a bundled name: {DEFAULT_MODEL}")
    keys = _add_command(commands, "keys", "make an API key, and its entry for the file of --api-keys", _keys)
    keys.add_argument("name", metavar="NAME", help="what logs call the key")
    keys.add_argument("--tenant", metavar="TEXT", help="whose share pays for its requests (default: NAME)")
    keys.add_argument("--role", choices=("user", "admin"), default="user", help="admin may drain, abort and see all")
    _add_command(commands, "bench", "measure throughput and latency (pagedjax bench --help says more)", _bench)
    replay = _add_command(
        commands, "replay", "run a recording (serve --record FILE) through the scheduler again", _replay
    )
    replay.add_argument("recording", metavar="FILE", help="what serve --record wrote")
    replay.add_argument(
        "--at", type=int, metavar="N", help="stop after N events and show the queues (default: the end)"
    )
    replay.add_argument("--html", metavar="FILE", help="draw the state there, with all its blocks")
    replay.add_argument(
        "--what-if",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="simulate the recorded requests with this setting of the scheduler changed too; may be repeated",
    )
    replay.add_argument(
        "--cost", choices=COST_MODELS, help=f"the device that --what-if simulates (default: {COST_MODELS[0]})"
    )
    info = _add_command(commands, "info", "show versions, devices, the chosen backends and why, the model cache", _info)
    _add_kernel_flags(info)
    return top


def _add_kernel_flags(info: argparse.ArgumentParser) -> None:
    info.add_argument("--kernels", action="store_true", help="show the backends of one model alone")
    info.add_argument("--model", metavar="MODEL", help=f"{MODEL_HELP} (default: {DEFAULT_MODEL})")
    info.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"))
    info.add_argument("--kv-cache-dtype", choices=("auto", "int8", "fp8", "fp8_e4m3"))
    info.add_argument("--block-size", type=int, metavar="N", help="tokens in a KV block (default: 16)")
    info.add_argument(
        "--gpu", metavar="CAPABILITY", help="as on a GPU of that compute capability, 9.0 or 8.0 (default: this machine)"
    )


def settings(args: argparse.Namespace, options: type) -> dict[str, Any]:
    """What the --config file and the command line set, by field name; the command line wins."""
    from pagedjax.engine.config import EngineConfig

    given = {name: value for name, value in vars(args).items() if name not in ("command", "run", "config")}
    if not hasattr(args, "config"):
        return given
    return flags.read_toml(args.config, flags.field_types(EngineConfig) | flags.field_types(options)) | given


def _add_command(commands: Any, name: str, summary: str, run: Any) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        allow_abbrev=False,
    )
    command.set_defaults(run=run)
    return command


def _add_settings(command: argparse.ArgumentParser, options: type, model_help: str) -> None:
    from pagedjax.engine.config import EngineConfig

    absent = argparse.SUPPRESS
    file_help = "TOML file with any of the settings below, a key each; flags win over it"
    command.add_argument("model", metavar="MODEL", nargs="?", default=absent, help=model_help)
    command.add_argument("--config", metavar="FILE", default=absent, help=file_help)
    flags.add_flags(command, options)
    flags.add_flags(command, EngineConfig, without=frozenset({"model"}))


def _guarded(command: str, run: Callable[[Any], int | None], argument: Any) -> int:
    """Turn the faults a user can mend into one line each; anything else is ours and keeps its traceback."""
    try:
        return run(argument) or 0
    except (ConfigError, RequestError) as error:
        print(f"pagedjax {command}: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has gone (`| head`): nothing is left to say, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _serve(args: argparse.Namespace) -> int:
    chosen = settings(args, ServeOptions)
    options = ServeOptions(**flags.take(chosen, ServeOptions))
    config = _engine_config(chosen)
    from serving import server, tracing
    from serving.options import ApiOptions, parse_names

    _log_at(options.log_level)
    api = ApiOptions(
        lenient=options.lenient,
        tool_call_parser=options.tool_call_parser,
        template_kwargs=parse_names(options.chat_template_kwargs),
        allowed_hosts=parse_names(options.allowed_hosts or ""),
        request_timeout_s=options.request_timeout_s,
        step_timeout_s=options.step_timeout_s,
        access_log=options.access_log,
        profile_dir=options.profile_dir,
    )
    return server.serve(
        lambda: _engine(config, own_process=has_own_process(options.engine_process)),
        host=options.host,
        port=options.port,
        drain_timeout_s=options.drain_timeout_s,
        max_body_bytes=options.max_body_bytes,
        trust_tenant_header=options.trust_tenant_header,
        keys=_key_source(options.api_keys),
        options=api,
        tracer_provider=tracing.provider_to(options.otlp_traces_endpoint) if options.otlp_traces_endpoint else None,
        on_ready=lambda url: print(f"Ready on {url}", flush=True),
    )


def _key_source(path: str | None) -> Any:
    """The keys' file, and the keys in the environment."""
    from serving.keys import KeySource

    found = {"user": os.environ.get("PAGEDJAX_API_KEY"), "admin": os.environ.get("PAGEDJAX_ADMIN_API_KEY")}
    return KeySource(path, tuple((role, key) for role, key in found.items() if key))


def _keys(args: argparse.Namespace) -> None:
    """A new key on standard error, and its entry for the file, which tells nothing of it, on standard output."""
    from pagedjax.core.tenants import is_tenant_name
    from serving import keys

    key = keys.new_key()
    entry = {"name": args.name, "hash": keys.shown_hash(key), "tenant": args.tenant or args.name, "role": args.role}
    for name in ("name", "tenant"):
        if not is_tenant_name(entry[name]):
            raise ConfigError(f"the {name} {entry[name]!r} must have 1 to 64 letters, digits and _ . : @ / -")
    print("[[keys]]", *(f'{name} = "{value}"' for name, value in entry.items()), sep="\n")
    print(f"The key, shown only once: {key}", file=sys.stderr)


def _chat(args: argparse.Namespace) -> int:
    from pagedjax.cli import chat

    chosen = settings(args, ChatOptions)
    options = ChatOptions(**flags.take(chosen, ChatOptions))
    sampling = {"temperature": options.temperature, "top_p": options.top_p, "max_tokens": options.max_tokens}
    if options.url is None:
        if options.api_key is not None:
            raise ConfigError("--api-key is for a server; give its --url too")
        _log_at("warning")
        answers = chat.local(_engine(_engine_config({"model": DEFAULT_MODEL} | chosen)), sampling)
    else:
        model = chosen.pop("model", None)
        if chosen:
            wrong = ", ".join(flags.flag_name(name) for name in chosen)
            raise ConfigError(f"{wrong} would set up an engine here, but --url names a server: drop one")
        answers = chat.remote(options.url, sampling, model=model, api_key=options.api_key)
    with answers as ask:
        return 0 if chat.converse(ask, system=options.system) else 1


def _engine_config(chosen: dict[str, Any]) -> Any:
    from pagedjax.engine.config import EngineConfig

    if "model" not in chosen:
        raise ConfigError(f"no model named; give MODEL, for example: pagedjax serve {DEFAULT_MODEL}")
    return EngineConfig(**chosen)


def _engine(config: Any, *, own_process: bool = False) -> Any:
    """An engine that is not started yet."""
    from pagedjax.engine.async_engine import AsyncEngine

    return AsyncEngine.from_config(config, own_process=own_process)


def _log_at(level: str) -> None:
    from pagedjax.engine import logs

    logs.log_at(level)


def _replay(args: argparse.Namespace) -> int:
    from pagedjax.cli import replay

    if args.cost and not args.what_if:
        raise ConfigError("--cost is the device of a simulation: give --what-if too")
    cost = args.cost or COST_MODELS[0]
    return replay.run(args.recording, at=args.at, html=args.html, what_if=args.what_if, cost=cost)


def _pull(args: argparse.Namespace) -> None:
    from pagedjax.weights import store

    with store.ProgressBar(args.model) as bar:
        path = store.pull(args.model, bar)
    print(path)


def _bench(argv: Sequence[str]) -> int:
    from pagedjax import bench

    return bench.main(argv)


def _info(args: argparse.Namespace) -> None:
    from pagedjax.cli import info, kernels

    if not args.kernels:
        names = ("model", "dtype", "kv_cache_dtype", "block_size", "gpu")
        given = [flags.flag_name(name) for name in names if getattr(args, name) is not None]
        if given:
            raise ConfigError(f"{', '.join(given)} is about kernels: give --kernels too")
        print(info.report())
        return
    said = kernels.report(
        args.model or DEFAULT_MODEL,
        dtype=args.dtype or "auto",
        kv_cache_dtype=args.kv_cache_dtype or "auto",
        block_size=16 if args.block_size is None else args.block_size,
        gpu=args.gpu,
    )
    print(said)
