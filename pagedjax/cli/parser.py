"""The whole command line of `pagedjax`, and what it and the --config file set."""

import argparse
from typing import Any

from pagedjax import __version__
from pagedjax.cli import flags
from pagedjax.cli.options import ChatOptions, ServeOptions
from pagedjax.engine.config import EngineConfig

DEFAULT_MODEL = "smollm2-135m"
COST_MODELS = ("cpu-xla", "h200-like")
MODEL_HELP = "a bundled name (smollm2-135m), a GGUF file, a directory with config.json and safetensors, or a hub id"


def parser() -> argparse.ArgumentParser:
    """The whole command line. Flags left out are absent from the namespace, so that a --config file can set them."""
    top = argparse.ArgumentParser(
        prog="pagedjax", description="Serve language models with paged attention, in JAX.", allow_abbrev=False
    )
    top.add_argument("--version", action="version", version=f"pagedjax {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    serve = _add_command(commands, "serve", "serve a model over HTTP with OpenAI's API")
    _add_settings(serve, ServeOptions, f"{MODEL_HELP}; may stand in --config instead")
    chat = _add_command(commands, "chat", "chat with a model in the terminal")
    _add_settings(chat, ChatOptions, f"{MODEL_HELP} (default: {DEFAULT_MODEL})")
    pull = _add_command(commands, "pull", "fetch a bundled model into the model cache and print its path")
    pull.add_argument("model", metavar="MODEL", help=f"a bundled name: {DEFAULT_MODEL}")
    keys = _add_command(commands, "keys", "make an API key, and its entry for the file of --api-keys")
    keys.add_argument("name", metavar="NAME", help="what logs call the key")
    keys.add_argument(
        "--tenant", type=flags.text, metavar="TEXT", help="whose share pays for its requests (default: NAME)"
    )
    keys.add_argument("--role", choices=("user", "admin"), default="user", help="admin may drain, abort and see all")
    _add_command(commands, "bench", "measure throughput and latency (pagedjax bench --help says more)")
    replay = _add_command(commands, "replay", "run a recording (serve --record FILE) through the scheduler again")
    replay.add_argument("recording", metavar="FILE", help="what serve --record wrote")
    replay.add_argument(
        "--at", type=int, metavar="N", help="stop after N events and show the queues (default: the end)"
    )
    replay.add_argument("--html", type=flags.text, metavar="FILE", help="draw the state there, with all its blocks")
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
    info = _add_command(commands, "info", "show versions, devices, the chosen backends and why, the model cache")
    _add_kernel_flags(info)
    return top


def _add_kernel_flags(info: argparse.ArgumentParser) -> None:
    info.add_argument("--kernels", action="store_true", help="show the backends of one model alone")
    info.add_argument("--model", type=flags.text, metavar="MODEL", help=f"{MODEL_HELP} (default: {DEFAULT_MODEL})")
    info.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"))
    info.add_argument("--kv-cache-dtype", choices=("auto", "int8", "fp8", "fp8_e4m3"))
    info.add_argument("--block-size", type=int, metavar="N", help="tokens in a KV block (default: 16)")
    info.add_argument(
        "--gpu",
        type=flags.text,
        metavar="CAPABILITY",
        help="as on a GPU of that compute capability, 9.0 or 8.0 (default: this machine)",
    )


def settings(args: argparse.Namespace, options: type) -> dict[str, Any]:
    """What the --config file and the command line set, by field name; the command line wins."""
    given = {name: value for name, value in vars(args).items() if name not in ("command", "config")}
    if not hasattr(args, "config"):
        return given
    return flags.read_toml(args.config, flags.field_types(EngineConfig) | flags.field_types(options)) | given


def _add_command(commands: Any, name: str, summary: str) -> argparse.ArgumentParser:
    described = f"{summary[0].upper()}{summary[1:]}."
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=described, allow_abbrev=False
    )
    return command


def _add_settings(command: argparse.ArgumentParser, options: type, model_help: str) -> None:
    absent = argparse.SUPPRESS
    file_help = "TOML file with any of the settings below, a key each; flags win over it"
    command.add_argument("model", metavar="MODEL", nargs="?", default=absent, help=model_help)
    command.add_argument("--config", metavar="FILE", default=absent, help=file_help)
    flags.add_flags(command, options)
    flags.add_flags(command, EngineConfig, without=frozenset({"model"}))
