"""What is wrong with a compiled case, in words."""

from scripts.gpu_gate.cases import Case
from scripts.gpu_gate.compiling import Compiled, Kernel
from scripts.gpu_gate.reading import is_called
from scripts.gpu_gate.target import TARGETS


def violations(case: Case, compiled: Compiled) -> list[str]:
    """Empty if nothing is."""
    found = [complaint for kernel in compiled.kernels for complaint in _of_kernel(case, kernel)]
    for name, groups in case.kernels.items():
        mine = [kernel for kernel in compiled.kernels if is_called(kernel.name, name)]
        if not mine:
            found.append(f"there is no kernel {name}")
        for kernel in mine:
            found += [f"{kernel.name} has no {' or '.join(group)}" for group in groups if not _any(kernel, group)]
    found += [f"there is no thunk {kind}" for kind in case.thunks if kind not in compiled.thunks]
    return found + (_of_cache(compiled) if case.cache is not None else [])


def _any(kernel: Kernel, group: tuple[str, ...]) -> bool:
    return any(name in kernel.instructions for name in group)


def _of_kernel(case: Case, kernel: Kernel) -> list[str]:
    found, limit = [], TARGETS[case.target].shared_bytes_per_block
    if kernel.spill_bytes:
        found.append(f"{kernel.name} spills {kernel.spill_bytes} bytes of registers")
    if kernel.stack_bytes:
        found.append(f"{kernel.name} keeps {kernel.stack_bytes} bytes on the stack")
    if kernel.shared_bytes > limit:
        found.append(f"{kernel.name} wants {kernel.shared_bytes:,} bytes of shared memory; a block has {limit:,}")
    return found


def _of_cache(compiled: Compiled) -> list[str]:
    found = []
    if compiled.alias_bytes < compiled.cache_bytes:
        found.append(f"only {compiled.alias_bytes:,} of the KV cache's {compiled.cache_bytes:,} bytes are aliased")
    for array in compiled.new_arrays:
        if array.num_bytes >= compiled.layer_bytes:
            found.append(
                f"{array.name} writes {array.num_bytes:,} bytes: a layer of the KV cache is {compiled.layer_bytes:,}"
            )
        elif array.num_bytes in compiled.leaf_bytes:
            found.append(f"{array.name} writes {array.num_bytes:,} bytes, just what a leaf of the KV cache takes")
    if compiled.temp_bytes >= compiled.cache_bytes:
        found.append(f"{compiled.temp_bytes:,} bytes of temporaries: as much as the KV cache")
    return found
