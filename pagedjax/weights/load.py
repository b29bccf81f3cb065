"""A checkpoint, whatever its files: a config, and tensors under Hugging Face's names; and the model made of it."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import jax.numpy as jnp
import numpy as np

from pagedjax.core.errors import ConfigError
from pagedjax.models import registry
from pagedjax.models.config import ModelConfig
from pagedjax.models.fill import Join, Pack
from pagedjax.models.llama import LlamaForCausalLM
from pagedjax.weights import gguf_llama, int4
from pagedjax.weights.gguf import open_gguf
from pagedjax.weights.pack import Layout, PackedWeight, pack_for
from pagedjax.weights.packed_cache import PackedCache
from pagedjax.weights.safetensors import SafetensorFiles, open_safetensors
from pallas_kernels import matmul
from pallas_kernels.matmul import QuantisedRows
from pallas_kernels.quant_matmul import Int4Tensor, packing
from pallas_kernels.ragged_attention import AttentionBackend

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One open checkpoint, a context manager.

    `encodings` says how each tensor is stored, in the file format's words. `get(name)` gives one tensor in float32,
    bfloat16 or float16: a view of the file, or an array of the caller's own.
    `get_quantised(name)` gives it as the file quantised it, or None where it is not in groups of 4 or 8 bits.
    `get_int4(name)` does so for what AWQ or GPTQ quantised.
    `tokenizer_source` is the path that holds the tokenizer. Views live on after `close`.
    """

    config: ModelConfig
    encodings: Mapping[str, str]
    get: Callable[[str], np.ndarray]
    get_quantised: Callable[[str], QuantisedRows | None]
    get_int4: Callable[[str], Int4Tensor | None]
    tokenizer_source: Path
    close: Callable[[], None]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.encodings)

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a GGUF file or a Hugging Face directory (config.json and *.safetensors).

    Raises ConfigError for what cannot be read, is corrupt or is not supported.
    """
    path = Path(path)
    return _open_hf(path) if path.is_dir() else _open_gguf(path)


def load_model(
    path: str | Path,
    *,
    dtype: str,
    backend: AttentionBackend,
    layout: Layout = "float",
    note: Callable[[PackedWeight], None] = lambda weight: None,
    cache: PackedCache | None = None,
) -> LlamaForCausalLM:
    """The model of the checkpoint at `path` with its weights in `dtype` (float32, bfloat16 or float16).

    `layout` is how weights of products are kept, see `pack`; "float", "int8_rows" and "w4a16" go everywhere, the others
    take native kernels. `note` is told of each weight that is not floats. One weight at a time is in memory beside the
    model. Weights packed for native kernels are taken from `cache`, if given, and kept there.
    Raises ConfigError as `open_checkpoint` does, and for tensors that are missing, too many or of the wrong shape.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not supported; set --dtype to one of {', '.join(DTYPES)}")
    with open_checkpoint(path) as checkpoint:
        kind = registry.find(checkpoint.config)
        join: Join | None = None
        if layout == "w4a16":
            pack: Pack | None = int4.pack_for(checkpoint.get_int4, note=note)
        else:
            tensors = checkpoint.get, checkpoint.get_quantised, checkpoint.encodings, layout

            def make_pack(note: Callable[[PackedWeight], None]) -> Pack | None:
                return pack_for(*tensors, note=note)

            if layout == "int8_rows":
                pack, join = make_pack(note), matmul.share_scales
            else:
                pack = make_pack(note) if cache is None else cache.through(Path(path), layout, make_pack, note)
                join = matmul.join if cache is None else cache.join
        return kind.load(
            checkpoint.config,
            checkpoint.get,
            checkpoint.names,
            dtype=DTYPES[dtype],
            backend=backend,
            pack=pack,
            join=join,
        )


def _open_gguf(path: Path) -> Checkpoint:
    file = open_gguf(path)
    config = gguf_llama.read_config(file)
    file_names = gguf_llama.hf_names(file)

    def get(name: str) -> np.ndarray:
        return gguf_llama.read_tensor(file, config, file_names[name])

    def get_quantised(name: str) -> QuantisedRows | None:
        return gguf_llama.read_quantised(file, config, file_names[name])

    encodings = {name: file.tensors[stored].encoding.name for name, stored in file_names.items()}
    return Checkpoint(config, encodings, get, get_quantised, _none, path, file.close)


def _open_hf(directory: Path) -> Checkpoint:
    stated = _read_config(directory / "config.json")
    scheme = int4.read_scheme(stated)
    config = registry.config_of({name: value for name, value in stated.items() if name != "quantization_config"})
    files = open_safetensors(directory)
    if scheme is not None:
        return _open_int4(directory, config, files, scheme)
    encodings = {name: files.encoding(name) for name in files.names}
    return Checkpoint(config, encodings, files.read, _none, _none, directory, files.close)


def _open_int4(directory: Path, config: ModelConfig, files: SafetensorFiles, scheme: int4.Scheme) -> Checkpoint:
    encodings = int4.weight_encodings(files, scheme, config)

    def get_int4(name: str) -> Int4Tensor | None:
        return int4.read_tensor(files, scheme, name) if encodings[name] in int4.ENCODINGS else None

    def get(name: str) -> np.ndarray:
        tensor = get_int4(name)
        return files.read(name) if tensor is None else packing.dequantise(tensor)

    def get_quantised(name: str) -> QuantisedRows | None:
        tensor = get_int4(name)
        return None if tensor is None else int4.as_rows(tensor)

    return Checkpoint(config, encodings, get, get_quantised, get_int4, directory, files.close)


def _none(name: str) -> None:
    return None


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return config
