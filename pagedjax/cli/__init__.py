"""The command `pagedjax`: serve, chat, pull, bench, info.

Everything heavy is imported inside the command that needs it, so that `pagedjax --help` answers at once.
"""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from pagedjax.cli import flags
from pagedjax.cli.options import ChatOptions, ServeOptions
from pagedjax.cli.parser import COST_MODELS, DEFAULT_MODEL, parser, settings
from pagedjax.cli.placement import has_own_process
from pagedjax.core.errors import ConfigError, RequestError
from pagedjax.engine.huge_pages import restart_with_huge_pages

COMPUTING = ("serve", "chat", "bench")  # commands that run a model in this process


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
    return _guarded(args.command, _COMMANDS[args.command], args)


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
    from pagedjax.weights import store
    from serving import server
    from serving.options import ApiOptions, parse_names
    from serving.telemetry import tracing

    store.find(config.model)  # before a port is taken and a process started
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
    from serving.access.keys import VARIABLES, KeySource

    found = {role: os.environ.get(variable) for role, variable in VARIABLES.items()}
    return KeySource(path, tuple((role, key) for role, key in found.items() if key is not None))


def _keys(args: argparse.Namespace) -> None:
    """A new key on standard error, and its entry for the file, which tells nothing of it, on standard output."""
    from pagedjax.core.tenants import is_tenant_name
    from serving.access import keys

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
    from pagedjax.bench import command

    return command.main(argv)


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


_COMMANDS: dict[str, Callable[[Any], int | None]] = {
    "serve": _serve,
    "chat": _chat,
    "pull": _pull,
    "keys": _keys,
    "replay": _replay,
    "info": _info,
}
