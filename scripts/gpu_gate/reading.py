"""Text that compilers leave behind, into numbers: PTX, what ptxas says, XLA's thunks and its optimised HLO."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

# Names used in cases -> what PTX has for them.
INSTRUCTIONS: Mapping[str, str] = MappingProxyType(
    {
        "wgmma": "wgmma.mma_async",
        "mma": "mma.sync",
        "tma": "cp.async.bulk.tensor",
        "cp.async": "cp.async.c",
    }
)
ITEM_BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "bf16": 16, "f16": 16, "s16": 16, "u16": 16} | {
    "f8e4m3fn": 8, "f8e5m2": 8, "s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64
}  # fmt: skip


class Usage(NamedTuple):
    """What ptxas says of one kernel."""

    kernel: str
    registers: int
    spill_bytes: int  # stores and loads together
    stack_bytes: int
    static_shared_bytes: int


class NewArray(NamedTuple):
    """An instruction that fills an array anew, and the array's bytes."""

    name: str
    num_bytes: int


def ptxas_usage(text: str) -> list[Usage]:
    """Each kernel in the output of `ptxas -v`."""
    return [_usage(part) for part in text.split("Compiling entry function ")[1:]]


def _usage(text: str) -> Usage:
    def number(pattern: str) -> int:
        found = re.search(pattern, text)
        return int(found[1]) if found else 0

    # The stack frame's line is of the kernel itself; functions that it calls have lines of their own, which count too.
    spills = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", text)))
    stack = max(map(int, re.findall(r"(\d+) bytes stack frame", text)), default=0)
    registers = number(r"Used (\d+) registers")
    return Usage(text.split("'")[1], registers, spills, stack, number(r"(\d+) bytes smem"))


def kernel_bodies(ptx: str) -> dict[str, str]:
    """Kernel's name -> its PTX."""
    parts = re.split(r"\.entry\s+(\w+)", ptx)
    return dict(zip(parts[1::2], parts[2::2]))


def is_called(kernel: str, name: str) -> bool:
    """Whether a kernel is one that the source calls `name`: Mosaic adds its mark, XLA a number to further ones."""
    return re.fullmatch(rf"{re.escape(name)}(_mosaic_gpu_kernel)?(_\d+)?", kernel) is not None


def instructions(ptx: str) -> dict[str, int]:
    """How often each of `INSTRUCTIONS` stands in it; those that don't are left out."""
    return {name: n for name, text in INSTRUCTIONS.items() if (n := ptx.count(text))}


def num_threads(ptx: str) -> int:
    """The threads of a block that a kernel is compiled for, 0 where it does not say."""
    found = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)(?:,\s*(\d+))?(?:,\s*(\d+))?", ptx)
    if found is None:
        return 0
    x, y, z = (int(n or 1) for n in found.groups())
    return x * y * z


def thunk_kinds(text: str) -> dict[str, int]:
    """How many thunks there are of each kind, those inside loops counted once."""
    return dict(sorted(Counter(re.findall(r"^\s*\d+: k(\w+)", text, re.MULTILINE)).items()))


def dynamic_shared_bytes(text: str) -> dict[str, int]:
    """Kernel's name -> the shared memory that its launch asks for, from the list of thunks."""
    found = re.findall(r"kCustomKernel\s+\[.*?\] (\S+) grid:.*?shared_memory: (\d+)", text)
    return {name: int(num_bytes) for name, num_bytes in found}


def jax_triton_shared_bytes(text: str) -> int:
    """The shared memory of a kernel's launch, from what jax-triton notes beside it."""
    found = re.search(r"shared_mem_bytes:\s*(\d+)", text)
    return int(found[1]) if found else 0


def new_arrays(hlo: str) -> list[NewArray]:
    """What optimised HLO writes other than in place, largest first: a copy of the KV cache is among them, however made.

    A fusion that ends in a scatter or a dynamic-update-slice works in place; whether XLA then copied the operand first
    shows as an instruction of its own. Custom calls state their aliases themselves.
    """
    bodies = _computations(hlo)
    fused = set(re.findall(r"fusion\(.*calls=%?([\w.\-]+)", hlo))
    found = []
    for name, body in bodies.items():
        if name not in fused:
            found += [array for each in body for array in _written(each, bodies)]
    return sorted(found, key=lambda array: -array.num_bytes)


class _Instruction(NamedTuple):
    name: str
    result: str
    opcode: str
    rest: str
    is_root: bool


IN_PLACE = ("scatter", "dynamic-update-slice")
_NO_ARRAY = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call"} | {
    "custom-call", "async-start", "async-update", "async-done", "copy-done", "opt-barrier", "after-all", *IN_PLACE
}  # fmt: skip
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")


def _computations(hlo: str) -> dict[str, list[_Instruction]]:
    found: dict[str, list[_Instruction]] = {}
    body: list[_Instruction] = []
    for line in hlo.splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            body = found.setdefault(header[1], [])
        elif parts := _LINE.match(line):
            root, name, result, opcode, rest = parts.groups()
            body.append(_Instruction(name, result, opcode, rest, root is not None))
    return found


def _written(instruction: _Instruction, bodies: dict[str, list[_Instruction]]) -> list[NewArray]:
    if instruction.opcode in _NO_ARRAY:
        return []
    if instruction.opcode != "fusion":
        return [NewArray(instruction.name, _largest(instruction.result))]
    called = re.search(r"calls=%?([\w.\-]+)", instruction.rest)
    results = _results(bodies[called[1]]) if called else []
    sizes = [_largest(each.result) for each in results if each.opcode not in IN_PLACE]
    return [NewArray(instruction.name, max(sizes))] if sizes else []


def _results(body: list[_Instruction]) -> list[_Instruction]:
    """What a fusion's result is made of: its root, seen through tuples and bitcasts."""
    by_name = {instruction.name: instruction for instruction in body}
    open_ones = [instruction for instruction in body if instruction.is_root]
    found = []
    while open_ones:
        instruction = open_ones.pop()
        if instruction.opcode in ("tuple", "bitcast"):
            operands = re.findall(r"%([\w.\-]+)", instruction.rest.split(")")[0])
            open_ones += [by_name[name] for name in operands]
        else:
            found.append(instruction)
    return found


def _largest(result: str) -> int:
    """Bytes of the largest array in a result's type, such as `bf16[16,8]{1,0}` or a tuple of them."""
    sizes = [0]
    for dtype, dimensions in re.findall(r"(\w+)\[([\d,]*)\]", result):
        count = math.prod(int(dimension) for dimension in dimensions.split(",") if dimension)
        sizes.append(count * ITEM_BITS.get(dtype, 64) // 8)
    return max(sizes)
