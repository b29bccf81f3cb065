"""What a bug report needs: versions, devices, which backends were chosen and why, what the model cache holds."""

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from pagedjax import __version__
from pagedjax.bench.machine import describe_machine
from pagedjax.core.errors import ConfigError
from pagedjax.engine import huge_pages
from pagedjax.engine.config import cpu_flags

PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "tokenizers",
    "numpy",
    "gguf",
    "starlette",
    "uvicorn",
    "jax-triton",
)
X86_FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_bf16", "amx_int8")
ARM_FEATURES = ("asimd", "asimdhp", "asimddp", "sve", "i8mm", "bf16")


def report() -> str:
    """Several lines of text, under headings."""
    parts = {
        "versions": _versions,
        "processor": _processor,
        "devices": _devices,
        "backends for smollm2-135m in bfloat16": _backends,
        "model cache": _models,
    }
    return "\n\n".join("\n".join([title, *(f"  {line}" for line in lines())]) for title, lines in parts.items())


def _versions() -> Iterator[str]:
    yield _row("pagedjax", __version__)
    yield _row("python", f"{platform.python_version()} on {platform.platform()}")
    for name in PACKAGES:
        try:
            yield _row(name, version(name))
        except PackageNotFoundError:
            yield _row(name, "not installed")


def _processor() -> Iterator[str]:
    machine, flags = describe_machine(), cpu_flags()
    memory_bytes = machine["memory_bytes"]
    yield _row("model", machine["cpu"])
    yield _row("cores", f"{machine['num_cpus']} usable of {os.cpu_count()}")
    yield _row("features", " ".join(f for f in X86_FEATURES + ARM_FEATURES if f in flags) or "none known")
    yield _row("memory", "unknown" if memory_bytes is None else f"{memory_bytes / 2**30:.1f} GiB")
    yield _row("huge pages", huge_pages.state())


def _devices() -> Iterator[str]:
    import jax

    yield _row("platform", jax.default_backend())
    for device in jax.devices():
        yield _row(str(device), device.device_kind)
    on_host = jax.default_backend() == "cpu"
    yield _row("swap space", "plain memory, as the cache is" if on_host else "pinned memory of the host")


def _backends() -> Iterator[str]:
    """The choice for each operation, then the reasons against the others."""
    import jax

    from pallas_kernels import dispatch, native
    from pallas_kernels.ragged_attention.shapes import MODELS

    try:
        native.unavailable()
    except ValueError as error:
        raise ConfigError(str(error)) from error
    for op in dispatch.CANDIDATES:
        choice = dispatch.choose(op, platform=jax.default_backend(), shape=MODELS["smollm2-135m"], dtype="bfloat16")
        yield f"{op}: {choice.backend.name}"
        yield from (f"  not {name}: {reason}" for name, reason in choice.refused.items())
    yield from _products()
    yield from _weights()
    yield f"native kernels: {_native()}"


def _products() -> Iterator[str]:
    """The choice for products with AWQ's and GPTQ's weights as they are, in a small decode step."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.dispatch import capability_of
    from pallas_kernels.quant_matmul import QuantNeed, choose
    from pallas_kernels.quant_matmul.shapes import MODELS

    shape, capability = MODELS["llama-3.1-8b down"], capability_of(jax.devices()[0])
    choice = choose(QuantNeed(jax.default_backend(), 16, *shape, jnp.dtype("bfloat16"), capability))
    yield f"quant_matmul of 16 tokens: {choice.backend.name}"
    yield from (f"  not {name}: {reason}" for name, reason in choice.refused.items())


def _weights() -> Iterator[str]:
    from pagedjax.engine.quantisation import choose_layout

    kinds = {"quantised files": ["Q4_1"], "AWQ and GPTQ files": ["AWQ4"], "other files": ["BF16"]}
    for files, encodings in kinds.items():
        choice = choose_layout("auto", asked_dtype="auto", dtype="bfloat16", encodings=encodings)
        yield f"weights of {files}: {choice.layout}"
        yield from (f"  not {name}: {reason}" for name, reason in choice.refused.items())


def _native() -> str:
    from pallas_kernels import native

    reason = native.unavailable()
    if reason is not None:
        return f"none: {reason}"
    library = native.load()
    return f"{library.level}, {library.num_threads} threads"


def _models() -> Iterator[str]:
    from pagedjax.weights import store

    for name in store.BUNDLED:
        path = store.cached_path(name)
        yield _row(name, f"{path} ({path.stat().st_size / 2**20:.0f} MiB)" if path.exists() else "not fetched yet")


def _row(name: str, value: str) -> str:
    return f"{name:<14} {value}"
