"""Packed weights kept on disk, so that the next start reads them in place of packing a checkpoint again.

A file holds one checkpoint's weights in one layout. Its name says of which: the hash of the checkpoint's contents, the
layout, and the version of the packed forms. It is a NumPy archive, whose members have checksums; where it is damaged,
all is packed again, and the file is replaced. Weights are read into memory of the process and not mapped: pages of a
file are small ones, and a decode step takes a fifth longer on those.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import jax
import numpy as np

from pagedjax.models.fill import Pack, Part
from pagedjax.weights.pack import Layout, PackedWeight
from pallas_kernels import matmul
from pallas_kernels.aligned import aligned_bytes
from pallas_kernels.matmul import Grouped4, Grouped8, Packed, PackedBf16, packing

_KINDS = {kind.__name__: kind for kind in (PackedBf16, Grouped4, Grouped8)}
_ABOUT, _DATA = "about", "data"
_PIECE_BYTES = 1 << 24
# What a damaged or foreign file may raise.
_DAMAGED = (OSError, EOFError, IndexError, ValueError, KeyError, TypeError, BadZipFile, zlib.error)


class PackedCache:
    """The files in `directory`, for the load of one model. `outcome` says in a few words what became of it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file: Path | None = None
        self._found: dict[str, tuple[Packed, PackedWeight]] = {}
        self._noted: dict[str, PackedWeight] = {}
        self._num_packed = 0
        self.outcome = "unused"

    def through(
        self,
        checkpoint: Path,
        layout: Layout,
        make_pack: Callable[[Callable[[PackedWeight], None]], Pack | None],
        note: Callable[[PackedWeight], None],
    ) -> Pack | None:
        """The packing that `make_pack(note)` gives, with each weight taken from the file where it is sound."""
        noted: list[PackedWeight] = []
        pack = make_pack(noted.append)
        if pack is None:
            return None
        self._file = self._directory / f"{digest(checkpoint)}-{layout}-{packing.VERSION}.npz"
        with suppress(*_DAMAGED):
            self._found = _read(self._file)

        def taken(parts: tuple[Part, ...], dtype: Any) -> Any:
            name = parts[0].name
            kept = self._found.pop(name, None)
            if kept is None:
                kept = pack(parts, dtype), noted[-1]
                self._num_packed += 1
            self._noted[name] = kept[1]
            note(kept[1])
            return kept[0]

        return taken

    def join(self, weights: dict[str, Packed]) -> dict[str, Packed]:
        """All weights as one array, which is written if some of it had to be packed. A directory that cannot be written
        costs the next start its time, not this one its life."""
        joined = matmul.join(weights)
        if self._file is None or not self._num_packed:
            self.outcome = "unused" if self._file is None else "read"
            return joined
        try:
            _write(self._file, joined, self._noted)
            self.outcome = "written"
        except OSError as error:
            self.outcome = f"not written: {error.strerror or error}"
        return joined


def digest(checkpoint: Path) -> str:
    """A hash of a checkpoint's contents: of a file, or of a directory's weights and configuration."""
    files = [checkpoint]
    if checkpoint.is_dir():
        files = sorted(file for file in checkpoint.iterdir() if file.suffix in (".safetensors", ".json"))
    found = hashlib.sha256()
    for file in files:
        with open(file, "rb") as opened:
            found.update(hashlib.file_digest(opened, "sha256").digest())
    return found.hexdigest()[:32]


def _read(file: Path) -> dict[str, tuple[Packed, PackedWeight]]:
    # Opened here, since np.load does not close what it finds to be no archive.
    with file.open("rb") as opened, np.load(opened, allow_pickle=False) as archive:
        about = json.loads(archive[_ABOUT].tobytes())
        data = jax.device_put(_read_bytes(archive.zip, f"{_DATA}.npy"), may_alias=True)
    return {
        name: (
            _KINDS[kind](data, num_out, num_in, offset),
            PackedWeight(**{**noted, "encodings": frozenset(noted["encodings"])}),
        )
        for name, (kind, num_out, num_in, offset, noted) in about.items()
    }


def _read_bytes(archive: ZipFile, member: str) -> np.ndarray:
    """A member's array of bytes where the device takes it, so that it is in memory once."""
    with archive.open(member) as stream:
        np.lib.format.read_magic(stream)
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
        if len(shape) != 1 or dtype != np.uint8:
            raise ValueError(f"{member} holds no bytes")
        values, end = aligned_bytes(shape[0]), 0
        while piece := stream.read(_PIECE_BYTES):
            start, end = end, end + len(piece)
            values[start:end] = np.frombuffer(piece, np.uint8)
    if end != len(values):
        raise EOFError(f"{member} has another length than it says")
    return values


def _write(file: Path, weights: dict[str, Packed], notes: dict[str, PackedWeight]) -> None:
    about = {
        name: (type(weight).__name__, weight.num_out, weight.num_in, weight.offset, _plain(notes[name]))
        for name, weight in weights.items()
    }
    (data,) = {id(weight.data): weight.data for weight in weights.values()}.values()
    arrays = {_ABOUT: np.frombuffer(json.dumps(about).encode(), np.uint8), _DATA: np.asarray(data)}
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}.tmp")
    try:
        with open(partial, "wb") as opened:
            np.savez(opened, **arrays)
        os.replace(partial, file)
    finally:
        with suppress(FileNotFoundError):
            partial.unlink()


def _plain(noted: PackedWeight) -> dict[str, Any]:
    return {**noted._asdict(), "encodings": sorted(noted.encodings)}
