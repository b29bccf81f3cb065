"""The command `pagedjax`: serve, chat, pull, bench, info.

Everything heavy is imported inside the command that needs it, so that `pagedjax --help` answers at once.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from pagedjax import __version__
from pagedjax.core.errors import ConfigError, RequestError

MODEL_HELP = "a bundled name (smollm2-135m), a GGUF file, a directory with config.json and safetensors, or a hub id"


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
