"""`pagedjax info --kernels`: for each op, which backend a model gets on a device, and why it does not get others."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pagedjax.core.errors import ConfigError
from pagedjax.engine.config import KV_CACHE_DTYPES, cpu_has_bf16


class Target(NamedTuple):
    """Where a model is to run: JAX's platform, and a GPU's compute capability."""

    platform: str
    capability: tuple[int, int] | None
    words: str


def report(model: str, *, dtype: str, kv_cache_dtype: str, block_size: int, gpu: str | None) -> str:
    """Several lines. `model` is what the engine takes, or a shape that kernels are tested on; `gpu` is the compute
    capability of one that need not be here.

    Raises ConfigError for what does not exist, and for a shape or a type that no model can have.
    """
    target = _target(gpu)
    shape = _shape(model, block_size)
    if dtype == "auto":
        dtype = "bfloat16" if target.platform != "cpu" or cpu_has_bf16() else "float32"
    title = f"kernels for {model} in {dtype}, KV cache {kv_cache_dtype}, on {target.words}"
    return "\n".join([title, *(f"  {line}" for line in _lines(shape, dtype, kv_cache_dtype, target))])


def _target(gpu: str | None) -> Target:
    import jax

    from pallas_kernels import dispatch, native

    if gpu is not None:
        major, _, minor = gpu.partition(".")
        if not (major.isdigit() and minor.isdigit()):
            raise ConfigError(f"{gpu!r} is no compute capability such as 9.0 or 8.0; set --gpu")
        return Target("gpu", (int(major), int(minor)), f"a GPU of compute capability {gpu}")
    try:
        native.unavailable()
    except ValueError as error:  # a variable of the environment
        raise ConfigError(str(error)) from error
    device = jax.devices()[0]
    return Target(jax.default_backend(), dispatch.capability_of(device), device.device_kind)


def _shape(model: str, block_size: int) -> Any:
    from pagedjax.core.config import SchedulerConfig
    from pagedjax.weights import load, store
    from pallas_kernels.ragged_attention import AttentionShape
    from pallas_kernels.ragged_attention.shapes import MODELS

    SchedulerConfig(block_size=block_size)  # refuses what no engine would take
    if model in MODELS:
        return MODELS[model]._replace(block_size=block_size)
    with load.open_checkpoint(store.resolve(model)) as checkpoint:
        config = checkpoint.config
    return AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, block_size)


def _lines(shape: Any, dtype: str, kv_cache_dtype: str, target: Target) -> Iterator[str]:
    from pallas_kernels import block_copy, dispatch

    yield f"{shape.num_heads} heads, {shape.num_kv_heads} KV heads of {shape.head_dim}, blocks of {shape.block_size}"
    for op in dispatch.CANDIDATES:
        yield from _op(op, shape, dtype, kv_cache_dtype, target)
    yield from _int4(dtype, target)
    yield f"block_copy: {block_copy.backend_for(target.platform).name}"


def _op(op: str, shape: Any, dtype: str, kv_cache_dtype: str, target: Target) -> Iterator[str]:
    from pallas_kernels import dispatch
    from pallas_kernels.ragged_attention import AttentionVariant

    try:
        choice = dispatch.choose(
            op,
            platform=target.platform,
            capability=target.capability,
            shape=shape,
            dtype=dtype,
            variant=AttentionVariant(kv_dtype=KV_CACHE_DTYPES.get(kv_cache_dtype)),
        )
    except NotImplementedError as error:
        yield f"none: {error}"
    except ValueError as error:
        raise ConfigError(f"{error}; set --block-size") from error
    else:
        yield from _choice(op, choice.backend.name, choice.refused)


def _int4(dtype: str, target: Target) -> Iterator[str]:
    """Products with 4-bit weights: of few tokens, as in decodes, and of many. The width is a usual one."""
    import jax.numpy as jnp

    from pallas_kernels import quant_matmul

    for num_tokens in (16, 2048):
        need = quant_matmul.QuantNeed(target.platform, num_tokens, 4096, 4096, 128, jnp.dtype(dtype), target.capability)
        choice = quant_matmul.choose(need)
        yield from _choice(f"quant_matmul of {num_tokens} tokens", choice.backend.name, choice.refused)


def _choice(op: str, name: str, refused: Mapping[str, str]) -> Iterator[str]:
    yield f"{op}: {name}"
    yield from (f"  not {other}: {reason}" for other, reason in refused.items())
