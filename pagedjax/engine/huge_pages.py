"""Huge pages for what malloc gives: weights, KV cache and XLA's temporaries.

On CPUs a step reads all weights, and with pages of 4 KiB a good part of its time goes to address translation and to
faults on fresh temporaries (decode steps of SmolLM2-135M take a fifth longer). glibc reads its tunables once, when a
process starts, so asking for huge pages means to start again.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "GLIBC_TUNABLES"
TUNABLE = "glibc.malloc.hugetlb"
# "always", "madvise" or "never", the one in force in brackets.
KERNEL = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# The first release that has the tunable.
GLIBC = (2, 35)


def restart_with_huge_pages() -> None:
    """Replace this process by one like it whose malloc asks for huge pages; return where that is had or can't be.

    Who sets the tunable (to 0, say) is left with what they set.
    """
    if refusal(os.environ, glibc_version(), kernel_setting()) is None:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], with_huge_pages(os.environ))


def refusal(environment: Mapping[str, str], glibc: tuple[int, ...] | None, kernel: str) -> str | None:
    """Why not to ask malloc for huge pages, or None: given the version of glibc, and what the file KERNEL holds."""
    if TUNABLE in environment.get(VARIABLE, ""):
        return f"{VARIABLE} says so"
    if glibc is None or glibc < GLIBC:
        return "it takes glibc 2.35"
    if "[madvise]" not in kernel and "[always]" not in kernel:
        return "the kernel gives none"
    return None


def with_huge_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment, its other tunables kept."""
    others = environment.get(VARIABLE)
    return {**environment, VARIABLE: f"{others}:{TUNABLE}=1" if others else f"{TUNABLE}=1"}


def glibc_version() -> tuple[int, ...] | None:
    """(2, 36), or None where the C library is another."""
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (ValueError, AttributeError):  # a system without that name, or without confstr
        return None
    return tuple(int(x) for x in version.split(".")) if name == "glibc" else None


def state() -> str:
    """For people: whether this process asked for them, or why not."""
    if f"{TUNABLE}=1" in os.environ.get(VARIABLE, "") or f"{TUNABLE}=2" in os.environ.get(VARIABLE, ""):
        return "asked for"
    return f"not asked for: {refusal(os.environ, glibc_version(), kernel_setting()) or 'only serve, chat and bench do'}"


def kernel_setting() -> str:
    """What the file KERNEL holds; empty where there is none."""
    return KERNEL.read_text() if KERNEL.exists() else ""
