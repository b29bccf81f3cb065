"""Packed weights kept on disk, so that the next start reads them in place of packing a checkpoint again.

A file holds one checkpoint's weights in one layout. Its name says of which: the hash of the checkpoint's contents, the
layout, and the version of the packed forms. It is a NumPy archive, whose members have checksums; one that is damaged
is packed again, and the file is replaced. Weights are read into memory of the process and not mapped: pages of a file
are small ones, and a decode step takes a fifth longer on those.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import jax.numpy as jnp
import numpy as np

from pagedjax.models.fill import Pack, Part
from pagedjax.weights.pack import Layout, PackedWeight
from pallas_kernels.matmul import Grouped4, Grouped8, PackedBf16, packing

_KINDS = {kind.__name__: kind for kind in (PackedBf16, Grouped4, Grouped8)}
_ABOUT = "about"
# What a damaged or foreign file may raise.
_DAMAGED = (OSError, EOFError, IndexError, ValueError, KeyError, TypeError, BadZipFile, zlib.error)


class PackedCache:
    """The files in `directory`, for the load of one model. `outcome` says in a few words what became of it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file: Path | None = None
        self._files = ExitStack()
        self._archive: Any = None
        self._found: dict[str, Any] = {}
        self._kept: dict[str, tuple[Any, PackedWeight]] = {}
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
        self._open(self._file)

        def taken(parts: tuple[Part, ...], dtype: Any) -> Any:
            name = parts[0].name
            kept = self._read(name)
            if kept is None:
                kept = pack(parts, dtype), noted[-1]
                self._num_packed += 1
            self._kept[name] = kept
            note(kept[1])
            return kept[0]

        return taken

    def save(self) -> None:
        """Write what had to be packed, once all of it is there. A directory that cannot be written costs the next start
        its time, not this one its life."""
        self._files.close()
        if self._file is None or not self._num_packed:
            self.outcome = "unused" if self._file is None else "read"
            return
        try:
            _write(self._file, self._kept)
            self.outcome = "written"
        except OSError as error:
            self.outcome = f"not written: {error.strerror or error}"
        self._kept = {}

    def _open(self, file: Path) -> None:
        try:
            # Opened here, since np.load does not close what it finds to be no archive.
            opened = self._files.enter_context(file.open("rb"))
            self._archive = self._files.enter_context(np.load(opened, allow_pickle=False))
            self._found = json.loads(self._archive[_ABOUT].tobytes())
        except _DAMAGED:
            self._found = {}

    def _read(self, name: str) -> tuple[Any, PackedWeight] | None:
        try:
            about, data = self._found[name], jnp.asarray(self._archive[name])
            weight = _KINDS[about["kind"]](data, about["num_out"], about["num_in"])
            noted = about["noted"]
            return weight, PackedWeight(**{**noted, "encodings": frozenset(noted["encodings"])})
        except _DAMAGED:
            return None


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


def _write(file: Path, kept: dict[str, tuple[Any, PackedWeight]]) -> None:
    about = {
        name: {
            "kind": type(weight).__name__,
            "num_out": weight.num_out,
            "num_in": weight.num_in,
            "noted": {**noted._asdict(), "encodings": sorted(noted.encodings)},
        }
        for name, (weight, noted) in kept.items()
    }
    arrays = {name: np.asarray(weight.data) for name, (weight, _) in kept.items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}.tmp")
    try:
        with open(partial, "wb") as opened:
            np.savez(opened, **{_ABOUT: np.frombuffer(json.dumps(about).encode(), np.uint8)}, **arrays)
        os.replace(partial, file)
    finally:
        with suppress(FileNotFoundError):
            partial.unlink()
