"""Where models come from: bundled names, paths and hub ids to files on this machine."""

import difflib
import re
from pathlib import Path

from pagedjax.core.errors import ConfigError
from pagedjax.weights.bundled import BUNDLED, Progress, ProgressBar, cached_path, home_directory, is_complete, pull

__all__ = [
    "BUNDLED",
    "Progress",
    "ProgressBar",
    "cached_path",
    "find",
    "home_directory",
    "pull",
    "resolve",
    "served_model_name",
]

HUB_FILES = (
    *("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json"),
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json"),
)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def resolve(model: str, progress: Progress | None = None) -> Path:
    """The GGUF file or Hugging Face directory that `model` means, fetched first where need be.

    `model` is a bundled name, the path of a GGUF file or of a Hugging Face directory, or a hub id "owner/name".
    Raises ConfigError that says what would work.
    """
    return find(model) or (pull(model, progress) if model in BUNDLED else _from_hub(model))


def find(model: str) -> Path | None:
    """Where a model is on this machine; None for one that has to be fetched. Raises ConfigError for what means none."""
    if model in BUNDLED:
        # The size is all that a start can afford to check; `pull` checks the hash.
        return cached_path(model) if is_complete(model) else None
    path = _path_of(model)
    if model and path.is_dir():
        return _checked_directory(path)
    if path.is_file():
        return path
    if _HUB_ID.fullmatch(model) and path.suffix != ".gguf":
        return None
    raise ConfigError(f"there is no model {model!r}.{_suggestion(model)} {_what_works()}")


def served_model_name(model: str) -> str:
    """What clients call `model`: the bundled name or hub id as it is, a file's stem, a directory's name."""
    path = _path_of(model)
    if model in BUNDLED or not path.exists():
        return model
    resolved = path.resolve()
    return resolved.stem if resolved.suffix == ".gguf" else resolved.name


def _path_of(model: str) -> Path:
    """`model` as a path that may be there or not. Raises ConfigError for one that cannot even be looked for."""
    try:
        path = Path(model).expanduser()
        path.exists()
    except OSError as error:
        raise ConfigError(f"cannot look for the model {model[:100]!r}: {error.strerror}. {_what_works()}") from error
    except RuntimeError as error:
        raise ConfigError(f"cannot look for the model {model[:100]!r}: nobody has that home directory") from error
    return path


def _checked_directory(path: Path) -> Path:
    if (path / "config.json").is_file():
        return path
    found = sorted(file.name for file in path.glob("*.gguf"))
    hint = f"; it holds {', '.join(found)}: give the path of one" if found else ""
    raise ConfigError(f"the directory {path} has no config.json, so it is no Hugging Face model{hint}")


def _from_hub(model: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ConfigError(f"the hub id {model!r} needs the package huggingface_hub. {_what_works()}") from error
    try:
        return _checked_directory(Path(snapshot_download(model, allow_patterns=list(HUB_FILES))))
    # The hub's client raises its own, requests', httpx's and the system's errors: all mean that the id gave no model.
    except ConfigError:
        raise
    except Exception as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        hint = f"{_suggestion(model)} {_what_works()}"
        raise ConfigError(f"cannot fetch {model!r} from the hub: {said[0]}.{hint}") from error


def _suggestion(model: str) -> str:
    close = difflib.get_close_matches(model.lower().rsplit("/", 1)[-1], BUNDLED, n=1, cutoff=0.5)
    return f" Did you mean {close[0]}?" if close else ""


def _what_works() -> str:
    return (
        f"A model is a bundled name ({', '.join(BUNDLED)}), the path of a GGUF file, a directory with config.json, "
        "*.safetensors and tokenizer.json, or a hub id owner/name that can be reached"
    )
