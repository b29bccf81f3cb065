"""Tensors of a directory of safetensors files, read through a memory map, one at a time."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from pagedjax.core.errors import ConfigError

INDEX = "model.safetensors.index.json"
_DTYPES = ("F32", "F16", "BF16")


class SafetensorFiles:
    """The tensors of one or more open files by name."""

    def __init__(self, files: dict[str, Any]) -> None:
        self._files = files

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._files)

    def encoding(self, name: str) -> str:
        """How the tensor is stored, in the format's words: F32, BF16 …"""
        return self._files[name].get_slice(name).get_dtype()

    def read(self, name: str) -> np.ndarray:
        """The tensor as stored: float32, float16 or bfloat16. Raises ConfigError, by name, for another dtype."""
        stored = self.encoding(name)
        if stored not in _DTYPES:
            raise ConfigError(
                f"tensor {name} is stored as {stored}; {', '.join(_DTYPES)} can be read. Of quantised safetensors "
                "4 bits by AWQ or GPTQ are supported: take those, the plain checkpoint, or a GGUF file"
            )
        return self._files[name].get_tensor(name)

    def read_integers(self, name: str) -> np.ndarray:
        """The tensor of int32. Raises ConfigError, by name, for another dtype."""
        if (stored := self.encoding(name)) != "I32":
            raise ConfigError(f"tensor {name} is stored as {stored}, not as I32")
        return self._files[name].get_tensor(name)

    def close(self) -> None:
        """Let go of the files."""
        self._files = {}


def open_safetensors(directory: Path) -> SafetensorFiles:
    """Open the shards that the index names, else every *.safetensors file of `directory`.

    Raises ConfigError for missing, truncated or corrupt files, and for a tensor that two files hold.
    """
    files: dict[str, Any] = {}
    for path in _paths(directory):
        try:
            file = safe_open(path, framework="numpy")
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"cannot read {path}: {error}; fetch it again") from error
        twice = sorted(set(file.keys()) & set(files))
        if twice:
            raise ConfigError(f"{path} holds {twice[0]} (of {len(twice)} such) a second time")
        files.update(dict.fromkeys(file.keys(), file))
    return SafetensorFiles(files)


def _paths(directory: Path) -> list[Path]:
    index = directory / INDEX
    if not index.exists():
        found = sorted(directory.glob("*.safetensors"))
        if not found:
            raise ConfigError(f"{directory} has no *.safetensors files")
        return found
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except OSError as error:
        raise ConfigError(f"cannot read {index}: {error.strerror}") from error
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ConfigError(f"{index} is not an index of safetensors files: {error!r}") from error
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{index} is not an index of safetensors files: it must name files")
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise ConfigError(f"{directory} lacks {', '.join(missing)}, named in {INDEX}; fetch the model again")
    return [directory / name for name in names]
