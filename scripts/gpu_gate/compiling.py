"""Compile one case for a GPU that is not there and collect what the compilers left behind.

Runs in a process that has `target.environment`'s variables since before JAX was imported.
"""

import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from scripts.gpu_gate import mosaic, reading
from scripts.gpu_gate.cases import Case, Program
from scripts.gpu_gate.target import TARGETS, jax_triton_dump, target_config

AXIS = "tp"
PTXAS_TIMEOUT_S = 120


class Kernel(NamedTuple):
    """One kernel as ptxas and the launch see it."""

    name: str
    registers: int
    num_threads: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    instructions: dict[str, int]


class Compiled(NamedTuple):
    """What came out, on one device.

    `kernels` are those that the case names, and Mosaic's and jax-triton's. `new_arrays` are those of the whole program,
    `cache_bytes` is the whole KV cache, `leaf_bytes` each size of its leaves, `layer_bytes` one layer of the largest.
    """

    kernels: tuple[Kernel, ...]
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    thunks: dict[str, int]
    new_arrays: tuple[reading.NewArray, ...]
    cache_bytes: int
    leaf_bytes: tuple[int, ...]
    layer_bytes: int
    lower_s: float
    compile_s: float


def compile_case(case: Case, ptxas: Path, dump: Path) -> Compiled:
    """Raises whatever tracing, lowering or a compiler raises."""
    mesh = _mesh(case.target, case.topology)
    program = case.build(mesh)
    arguments = _placed(program.arguments, mesh)
    for file in dump.iterdir():
        file.unlink()
    shutil.rmtree(jax_triton_dump(dump), ignore_errors=True)
    start = time.perf_counter()
    with use_abstract_mesh(mesh.abstract_mesh):
        lowered = _jitted(program).trace(*arguments).lower(lowering_platforms=("cuda",))
    lowered_at = time.perf_counter()
    with _standard_output() as said:
        compiled = lowered.compile()
    compile_s = time.perf_counter() - lowered_at

    thunks = "".join(file.read_text() for file in dump.glob("*thunk_sequence.txt"))
    arch = TARGETS[case.target].ptxas_arch
    kernels = _xla_kernels(dump, reading.dynamic_shared_bytes(thunks), ptxas, arch, tuple(case.kernels))
    kernels += mosaic.kernels(lowered, said[0]) + _jax_triton_kernels(jax_triton_dump(dump), ptxas, arch)
    memory = compiled.memory_analysis()
    leaf_bytes = [] if case.cache is None else [_device_bytes(leaf) for leaf in jax.tree.leaves(arguments[case.cache])]
    return Compiled(
        tuple(_as_kernel(*parts) for parts in kernels),
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        reading.thunk_kinds(thunks),
        tuple(reading.new_arrays(compiled.as_text())),
        sum(leaf_bytes),
        tuple(sorted(set(leaf_bytes))),
        max(leaf_bytes, default=0) // case.num_layers,
        round(lowered_at - start, 2),
        round(compile_s, 2),
    )


def _jitted(program: Program) -> Any:
    if hasattr(program.function, "trace"):
        return program.function
    return jax.jit(program.function, donate_argnums=program.donated, **program.options)


@cache
def _mesh(target: str, topology: str) -> Mesh:
    config = target_config(TARGETS[target])
    described = topologies.get_topology_desc(platform="cuda", target_config=config, topology=topology)
    return topologies.make_mesh(described, (len(described.devices),), (AXIS,))


def _placed(arguments: Any, mesh: Mesh) -> Any:
    def placed(leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(leaf, "sharding", None) or NamedSharding(mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(placed, arguments)


def _device_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    """Of an array's part on one device."""
    assert leaf.sharding is not None
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _xla_kernels(
    dump: Path, shared: dict[str, int], ptxas: Path, arch: str, names: tuple[str, ...]
) -> list[tuple[reading.Usage, str, int]]:
    """Usage, PTX and dynamic shared memory of the kernels called one of `names` in XLA's dumps."""
    found = []
    for file in sorted(dump.glob("*.ptx")):
        ptx = file.read_text()
        bodies = reading.kernel_bodies(ptx)
        if not any(reading.is_called(body, name) for body in bodies for name in names):
            continue
        for usage in reading.ptxas_usage(_run_ptxas(ptxas, arch, file)):
            found.append((usage, bodies[usage.kernel], shared.get(usage.kernel, 0)))
    return found


def _jax_triton_kernels(dump: Path, ptxas: Path, arch: str) -> list[tuple[reading.Usage, str, int]]:
    """The same of what jax-triton compiled while the program was lowered: XLA sees none of it.

    It compiles a kernel once a process, so cases of one provider must differ in their kernels.
    """
    found = []
    for file in sorted(dump.glob("*/*.ptx")):
        ptx, (usage,) = file.read_text(), reading.ptxas_usage(_run_ptxas(ptxas, arch, file))
        launched = file.with_suffix(".compile_info").read_text()
        found.append((usage, reading.kernel_bodies(ptx)[usage.kernel], reading.jax_triton_shared_bytes(launched)))
    return found


def _run_ptxas(ptxas: Path, arch: str, file: Path) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as out:
        command = [str(ptxas), "-v", f"-arch={arch}", str(file), "-o", out.name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PTXAS_TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"ptxas: {done.stderr.strip()}")
    return done.stderr


def _as_kernel(usage: reading.Usage, ptx: str, dynamic_shared_bytes: int) -> Kernel:
    return Kernel(
        usage.kernel,
        usage.registers,
        reading.num_threads(ptx),
        usage.spill_bytes,
        usage.stack_bytes,
        usage.static_shared_bytes + dynamic_shared_bytes,
        reading.instructions(ptx),
    )


@contextmanager
def _standard_output() -> Iterator[list[str]]:
    """What native code writes to file descriptor 1 meanwhile: one string, in the list once it is over."""
    said: list[str] = []
    sys.stdout.flush()
    kept = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            yield said
        finally:
            os.dup2(kept, 1)
            os.close(kept)
            file.seek(0)
            said.append(file.read().decode(errors="replace"))
