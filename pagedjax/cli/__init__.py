"""The command `pagedjax`: serve, chat, pull, bench, info.

Everything heavy is imported inside the command that needs it, so that `pagedjax --help` answers at once.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from pagedjax import __version__
from pagedjax.cli import flags
from pagedjax.core.errors import ConfigError, RequestError
from pagedjax.core.request import SamplingParams

MODEL_HELP = "a bundled name (smollm2-135m), a GGUF file, a directory with config.json and safetensors, or a hub id"

DEFAULT_MODEL = "smollm2-135m"
# Flags of `chat` that are not the engine's, by their name in SamplingParams and in OpenAI's API.
CHAT_SAMPLING = {"temperature": "temperature", "top_p": "top_p", "max_tokens": "max_tokens", "sampling_seed": "seed"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; gives the exit status: 0, 1 for a failure, 2 for wrong usage or configuration."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["bench"]:
        return _guarded("bench", _bench, argv[1:])
    args = parser().parse_args(argv)
    return _guarded(args.command, args.run, args)


def parser() -> argparse.ArgumentParser:
    """The whole command line. Flags left out are absent from the namespace, so that a --config file can set them."""
    top = argparse.ArgumentParser(
        prog="pagedjax", description="Serve language models with paged attention, in JAX.", allow_abbrev=False
    )
    top.add_argument("--version", action="version", version=f"pagedjax {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    _add_serve(_command(commands, "serve", "serve a model over HTTP with OpenAI's API", _serve))
    _add_chat(_command(commands, "chat", "chat with a model in the terminal", _chat))
    _add_pull(_command(commands, "pull", "fetch a bundled model into the model cache", _pull))
    _command(commands, "bench", "measure throughput and latency (see: pagedjax bench --help)", _bench)
    _command(commands, "info", "show versions, devices, the chosen backends and why", _info)
    return top


def _command(commands: Any, name: str, summary: str, run: Any) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    command.set_defaults(run=run)
    return command


def _guarded(command: str, run: Any, argument: Any) -> int:
    """Turn the faults a user can mend into one line each; anything else is ours and keeps its traceback."""
    try:
        return run(argument) or 0
    except ConfigError as error:
        print(f"pagedjax {command}: error: {error}", file=sys.stderr)
        return 2
    except RequestError as error:
        print(f"pagedjax {command}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has gone (`| head`): nothing is left to say, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _add_serve(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="MODEL", nargs="?", help=f"{MODEL_HELP}; may stand in --config instead")
    http = command.add_argument_group("http")
    http.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    http.add_argument("--port", type=int, metavar="N", help="port to listen on (default: 8000)")
    _add_engine_flags(command)


def _serve(args: argparse.Namespace) -> None:
    from serving import server

    chosen = {"host": "127.0.0.1", "port": 8000} | settings(args, {"host": str, "port": int})
    host, port = chosen.pop("host"), chosen.pop("port")
    server.run(_engine_config(chosen), host=host, port=port)


def _add_chat(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="MODEL", nargs="?", help=f"{MODEL_HELP} (default: {DEFAULT_MODEL})")
    talk = command.add_argument_group("conversation")
    talk.add_argument("--url", help="talk to the server at this address instead of starting an engine here")
    talk.add_argument("--api-key", metavar="KEY", help="key that the server at --url asks for")
    talk.add_argument("--system", metavar="TEXT", help="system message that opens the conversation")
    talk.add_argument("--temperature", type=float, metavar="X", help="0 is greedy, 2 the most random (default: 0.7)")
    talk.add_argument("--top-p", type=float, metavar="X", help="sample from the likeliest tokens of this total mass")
    talk.add_argument(
        "--max-tokens", type=int, metavar="N", help="longest answer in tokens (default: to the context's end)"
    )
    talk.add_argument("--seed", dest="sampling_seed", type=int, metavar="N", help="makes answers repeatable")
    _add_engine_flags(command, without=frozenset({"model", "seed"}))


def _chat(args: argparse.Namespace) -> None:
    from pagedjax.cli import chat

    given = vars(args)
    system = given.pop("system", None)
    sampling = {"temperature": 0.7} | {word: given.pop(name) for name, word in CHAT_SAMPLING.items() if name in given}
    with _answers(args, sampling) as ask:
        chat.converse(ask, system=system)


def _answers(args: argparse.Namespace, sampling: dict[str, Any]) -> Any:
    """Who answers in a chat: the server at --url, or an engine in this process."""
    from pagedjax.cli import chat

    url, api_key = vars(args).pop("url", None), vars(args).pop("api_key", None)
    chosen = settings(args, {})
    if url is None:
        if api_key is not None:
            raise ConfigError("--api-key is for a server; give its --url too")
        config = _engine_config({"model": DEFAULT_MODEL} | chosen)
        return chat.local(config, SamplingParams(**{"max_tokens": None} | sampling))
    model = chosen.pop("model", None)
    if chosen:
        raise ConfigError(f"{', '.join(chosen)} set up an engine here; with --url the server has its own: drop one")
    return chat.remote(url, sampling, model=model, api_key=api_key)


def _add_engine_flags(command: argparse.ArgumentParser, *, without: frozenset[str] = frozenset({"model"})) -> None:
    from pagedjax.engine.config import EngineConfig

    file = command.add_argument_group("file")
    file.add_argument("--config", metavar="FILE", help="TOML file with any of these settings; flags win over it")
    flags.add_flags(command, EngineConfig, without=without)


def settings(args: argparse.Namespace, further: dict[str, type]) -> dict[str, Any]:
    """What the --config file and the command line set, by field name; the command line wins."""
    from pagedjax.engine.config import EngineConfig

    given = {name: value for name, value in vars(args).items() if name not in ("command", "run", "config")}
    if not hasattr(args, "config"):
        return given
    return flags.read_toml(args.config, flags.field_types(EngineConfig) | further) | given


def _engine_config(chosen: dict[str, Any]) -> Any:
    from pagedjax.engine.config import EngineConfig

    if "model" not in chosen:
        raise ConfigError("no model named; give MODEL, for example: pagedjax serve smollm2-135m")
    return EngineConfig(**chosen)


def _bench(argv: Sequence[str]) -> int:
    from pagedjax import bench

    return bench.main(argv)


def _info(_args: argparse.Namespace) -> None:
    from pagedjax.cli import info

    print(info.report())


def _add_pull(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="MODEL", help="a bundled name: smollm2-135m")


def _pull(args: argparse.Namespace) -> None:
    from pagedjax.weights import store

    print(store.pull(args.model))
