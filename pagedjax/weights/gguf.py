"""The GGUF container: the metadata and the tensors of one file, read through a memory map.

Specification: docs/gguf.md of the ggml project. The header is read here because the `gguf` package's reader makes a
numpy view of every string and takes 3 s of CPU on a vocabulary of 49,152 tokens, against 0.05 s; the tensors are
dequantised by the package.
"""

import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from pagedjax.core.errors import ConfigError
from pallas_kernels.matmul.packing import BLOCK_BYTES, QuantisedRows

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
# Dequantising in pieces keeps the package's temporaries small beside the result.
PIECE_ELEMENTS = 1 << 22

_SCALARS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}
_PLAIN = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}


class TensorInfo(NamedTuple):
    """Where one tensor lies. `shape` is in numpy's order, outermost axis first; `start` is a byte of the file."""

    name: str
    shape: tuple[int, ...]
    encoding: GGMLQuantizationType
    start: int
    num_bytes: int


class GgufFile:
    """One open file: `metadata` (str -> int | float | bool | str | list) and `tensors` (name -> TensorInfo)."""

    def __init__(
        self, path: Path, contents: np.ndarray, metadata: dict[str, Any], tensors: dict[str, TensorInfo]
    ) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = tensors
        self._contents: np.ndarray | None = contents

    def read(self, name: str) -> np.ndarray:
        """The tensor's values: a read-only view for F32, F16 and BF16, else dequantised to a new float32 array.

        Raises ConfigError, naming the encoding, where the `gguf` package cannot dequantise it.
        """
        info, raw = self.tensors[name], self._raw(name)
        if info.encoding in _PLAIN:
            return raw.view(_PLAIN[info.encoding]).reshape(info.shape)
        try:
            return _dequantise(raw, info)
        except NotImplementedError as error:
            raise ConfigError(
                f"{self.path}: tensor {name} is stored as {info.encoding.name}, which cannot be read; take a file "
                "quantised as Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, a K-quant (Q4_K_M …), F16, BF16 or F32"
            ) from error

    def read_quantised(self, name: str) -> QuantisedRows | None:
        """A matrix in groups of 4 or 8 bits as it is, a read-only view; None for any other tensor."""
        info = self.tensors[name]
        num_bytes = BLOCK_BYTES.get(info.encoding.name)
        if num_bytes is None or len(info.shape) != 2:
            return None
        return QuantisedRows(info.encoding.name, self._raw(name).reshape(info.shape[0], -1, num_bytes))

    def _raw(self, name: str) -> np.ndarray:
        if self._contents is None:
            raise ValueError(f"{self.path} is closed")
        info = self.tensors[name]
        return self._contents[info.start : info.start + info.num_bytes]

    def close(self) -> None:
        """Let go of the memory map; views handed out keep it alive as long as they live."""
        self._contents = None


def open_gguf(path: Path) -> GgufFile:
    """Read the header of `path` and check that every tensor lies inside the file.

    Raises ConfigError for a file that cannot be read, is no GGUF file, is truncated or is inconsistent.
    """
    contents = _map(path)
    cursor = _Cursor(path, contents)
    _check_magic(path, contents, cursor)
    num_tensors, num_fields = cursor.scalar("<Q"), cursor.scalar("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_fields):
        key = cursor.text()
        if key in metadata:
            raise ConfigError(f"{path}: metadata key {key!r} occurs twice; the file is corrupt")
        metadata[key] = cursor.value(cursor.scalar("<I"))
    found = [_read_info(cursor) for _ in range(num_tensors)]
    tensors = _place(path, found, cursor.position, metadata.get("general.alignment", DEFAULT_ALIGNMENT), len(contents))
    return GgufFile(path, contents, metadata, tensors)


class _Cursor:
    """A position in the file that moves over what it reads, never past the end."""

    def __init__(self, path: Path, contents: np.ndarray) -> None:
        self.path = path
        self.position = 0
        self._bytes = memoryview(contents)

    def take(self, num_bytes: int) -> memoryview:
        start, end = self.position, self.position + num_bytes
        if end > len(self._bytes):
            raise ConfigError(f"{self.path} ends inside its header: it is truncated or corrupt; fetch it again")
        self.position = end
        return self._bytes[start:end]

    def scalar(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self) -> str:
        raw = self.take(self.scalar("<Q"))
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self.path}: a string of the header is not UTF-8; the file is corrupt") from error

    def value(self, kind: int) -> Any:
        if kind == GGUFValueType.STRING:
            return self.text()
        if kind == GGUFValueType.ARRAY:
            return self._array()
        return self.scalar(self._form(kind))

    def _array(self) -> list[Any]:
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if kind == GGUFValueType.STRING:
            return self._texts(count)
        if kind == GGUFValueType.ARRAY:
            raise ConfigError(f"{self.path}: the header nests arrays, which no known file does")
        form = self._form(kind)
        return np.frombuffer(self.take(count * struct.calcsize(form)), np.dtype(form)).tolist()

    def _texts(self, count: int) -> list[str]:
        # Vocabularies have 100,000s of these: one tight loop, errors told apart only once it has failed.
        read_len, view, position, texts = struct.Struct("<Q").unpack_from, self._bytes, self.position, []
        try:
            for _ in range(count):
                end = position + 8 + read_len(view, position)[0]
                if end > len(view):
                    break
                texts.append(str(view[position + 8 : end], "utf-8"))
                position = end
        except (struct.error, UnicodeDecodeError) as error:
            raise ConfigError(f"{self.path}: the strings of the header are truncated or corrupt") from error
        if len(texts) < count:
            raise ConfigError(f"{self.path} ends inside its header: it is truncated or corrupt; fetch it again")
        self.position = position
        return texts

    def _form(self, kind: int) -> str:
        try:
            return _SCALARS[GGUFValueType(kind)]
        except (ValueError, KeyError) as error:
            raise ConfigError(f"{self.path}: the header holds a value of unknown type {kind}; it is corrupt") from error


def _map(path: Path) -> np.ndarray:
    try:
        if path.stat().st_size < 24:
            raise ConfigError(f"{path} is not a GGUF file: it has only {path.stat().st_size} bytes")
        return np.memmap(path, dtype=np.uint8, mode="r")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error


def _check_magic(path: Path, contents: np.ndarray, cursor: _Cursor) -> None:
    if bytes(cursor.take(4)) != MAGIC:
        raise ConfigError(f"{path} is not a GGUF file: it begins with {bytes(contents[:4])!r}, not {MAGIC!r}")
    version = cursor.scalar("<I")
    if version not in VERSIONS:
        kind = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
        raise ConfigError(f"{path} is a {kind} GGUF file; versions 2 and 3, little-endian, can be read")


def _read_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, num_dimensions = cursor.text(), cursor.scalar("<I")
    if num_dimensions > MAX_DIMENSIONS:
        raise ConfigError(f"{cursor.path}: tensor {name!r} has {num_dimensions} dimensions; the file is corrupt")
    shape = tuple(cursor.scalar("<Q") for _ in range(num_dimensions))[::-1]
    return name, shape, cursor.scalar("<I"), cursor.scalar("<Q")


def _place(
    path: Path, found: list[tuple[str, tuple[int, ...], int, int]], header_end: int, alignment: Any, file_bytes: int
) -> dict[str, TensorInfo]:
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ConfigError(f"{path}: general.alignment is {alignment!r}, not a power of two; the file is corrupt")
    first = -(-header_end // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, code, offset in found:
        if name in tensors:
            raise ConfigError(f"{path}: tensor {name} occurs twice; the file is corrupt")
        encoding, num_bytes = _encoded_size(path, name, shape, code)
        if first + offset + num_bytes > file_bytes:
            raise ConfigError(
                f"{path}: tensor {name} ends at byte {first + offset + num_bytes:,} of a file of {file_bytes:,} bytes: "
                "it is truncated; fetch it again"
            )
        tensors[name] = TensorInfo(name, shape, encoding, first + offset, num_bytes)
    return tensors


def _encoded_size(path: Path, name: str, shape: tuple[int, ...], code: int) -> tuple[GGMLQuantizationType, int]:
    try:
        encoding = GGMLQuantizationType(code)
    except ValueError as error:
        raise ConfigError(f"{path}: tensor {name} has the unknown encoding {code}") from error
    group, group_bytes = GGML_QUANT_SIZES[encoding]
    if not shape or 0 in shape or shape[-1] % group:
        raise ConfigError(f"{path}: tensor {name} of shape {shape} cannot be stored as {encoding.name}; it is corrupt")
    return encoding, math.prod(shape) // group * group_bytes


def _dequantise(raw: np.ndarray, info: TensorInfo) -> np.ndarray:
    columns = info.shape[-1]
    rows = raw.reshape(math.prod(info.shape) // columns, -1)
    out = np.empty((len(rows), columns), np.float32)
    step = max(1, PIECE_ELEMENTS // columns)
    for start in range(0, len(rows), step):
        out[start : start + step] = quants.dequantize(rows[start : start + step], info.encoding)
    return out.reshape(info.shape)
