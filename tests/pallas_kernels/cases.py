"""Batches to attend, made with everything unused poisoned by NaN."""

from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ragged_attention import AttentionBackend, AttentionShape, KVBlocks, Ragged
from tests.pallas_kernels.native.attention_layout import from_native, to_native

TOKENS, ROWS, NUM_BLOCKS = 48, 12, 64

# (query tokens, cached tokens) of each row, decodes first.
MIXES = {
    "decodes": ((1, 5), (1, 70), (1, 1), (1, 64)),
    "one chunk from the start": ((48, 48),),
    "chunks later in their prompts": ((3, 100), (2, 2), (37, 130)),
    "decodes and chunks": ((1, 9), (1, 33), (5, 5), (33, 90)),
    "one long among many short": ((1, 300), *[(1, 3)] * 11),
    "a chunk of one token": ((1, 20), (4, 8), (1, 17)),
    "nothing": (),
}


class Case(NamedTuple):
    q: jax.Array
    k: jax.Array
    v: jax.Array
    history: np.ndarray  # [2, num_blocks, block_size, kv_heads, head_dim]; NaN where no row has a cached token
    ragged: Ragged
    scale: float
    num_real: int


def make_case(shape: AttentionShape, mix: tuple[tuple[int, int], ...], seed: int = 0) -> Case:
    """float32; table entries and slots of nothing are -1."""
    rng = np.random.default_rng(seed)
    free = iter(rng.permutation(NUM_BLOCKS))
    tables = np.full((ROWS, NUM_BLOCKS), -1)
    slots, kv_lens, q_starts = np.full(TOKENS, -1), np.zeros(ROWS, int), np.zeros(ROWS + 1, int)
    history = np.full((2, NUM_BLOCKS * shape.block_size, shape.num_kv_heads, shape.head_dim), np.nan, np.float32)
    for row, (q_len, kv_len) in enumerate(mix):
        num_blocks = -(-kv_len // shape.block_size)
        tables[row, :num_blocks] = [next(free) for _ in range(num_blocks)]
        places = (tables[row, :num_blocks, None] * shape.block_size + np.arange(shape.block_size)).ravel()[:kv_len]
        old = places[: kv_len - q_len]
        history[:, old] = rng.standard_normal((2, len(old), *history.shape[2:]))
        q_starts[row + 1 :] = q_starts[row] + q_len
        slots[q_starts[row] : q_starts[row + 1]] = places[kv_len - q_len :]
        kv_lens[row] = kv_len
    num_decode = next((row for row, (q_len, _) in enumerate(mix) if q_len != 1), len(mix))
    ragged = Ragged(*(jnp.asarray(x, jnp.int32) for x in (tables, q_starts, kv_lens, slots, num_decode)))
    q, k, v = (
        jnp.asarray(rng.standard_normal((TOKENS, heads, shape.head_dim)), jnp.float32)
        for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    )
    history = history.reshape(2, NUM_BLOCKS, *shape[3:], *shape[1:3])
    return Case(q, k, v, history, ragged, shape.head_dim**-0.5, int(q_starts[-1]))


def run(
    backend: AttentionBackend,
    case: Case,
    dtype: Any,
    num_layers: int = 1,
    layer: int = 0,
    kv_dtype: str | None = None,
    sinks: jax.Array | None = None,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """(out [tokens, heads, head_dim], that layer's K and V as `case.history` is laid out), float32.

    Layers other than `layer` hold NaN. With a `kv_dtype` the cache is quantised, and K and V are what it says.
    """
    q, k, v = (x.astype(dtype) for x in (case.q, case.k, case.v))
    plain = np.full((2, NUM_BLOCKS, num_layers, *case.history.shape[2:]), np.nan, jnp.dtype(dtype))
    plain[:, :, layer] = case.history
    attend = compiled(backend, case.scale, tuple(options.items()))
    cache = laid_out(backend, plain, kv_dtype)
    out, new = attend(q, k, v, cache, case.ragged, layer=jnp.int32(layer), sinks=sinks)
    stored = np.stack(read_back(backend, new, plain, kv_dtype))[:, :, layer]
    return np.asarray(out, np.float32), stored.astype(np.float32)


def laid_out(backend: AttentionBackend, plain: np.ndarray, kv_dtype: str | None = None) -> KVBlocks:
    """K and V [2, num_blocks, num_layers, block_size, kv_heads, head_dim] as the backend lays them out."""
    leaves = list(plain)
    if kv_dtype is not None:
        values, scales = zip(*(quantised(x, kv_dtype) for x in plain))
        leaves = [*values, *scales]
    if backend.name == "native":
        k, v, *scales = *to_native(*leaves[:2])[:2], *(scale.swapaxes(2, 3) for scale in leaves[2:])
        return KVBlocks(*map(jnp.asarray, (k, v, *scales)))
    empty = backend.init_cache(plain.shape[1], *plain.shape[3:], kv_dtype or plain.dtype, num_layers=plain.shape[2])
    if backend.name != "xla":  # heads before the tokens of a block
        leaves = [x.swapaxes(2, 3) for x in leaves]
    leaves = [np.ascontiguousarray(x).view(leaf.dtype).reshape(leaf.shape) for leaf, x in zip(empty, leaves)]
    return KVBlocks(*map(jnp.asarray, leaves))


def read_back(
    backend: AttentionBackend, cache: KVBlocks, plain: np.ndarray, kv_dtype: str | None = None
) -> tuple[np.ndarray, ...]:
    """K and V of a cache as `plain` is laid out; float32 where quantised."""
    if backend.name == "native":
        values = from_native(cache, plain.shape[1:], plain.dtype if kv_dtype is None else np.dtype(kv_dtype))
        if kv_dtype is None:
            return values
        scales = (np.asarray(scale).swapaxes(2, 3)[..., None] for scale in cache[2:])
        return tuple(x.astype(np.float32) * scale for x, scale in zip(values, scales))
    shape, leaves = plain.shape[1:], [np.asarray(leaf) for leaf in cache if leaf is not None]
    shapes = [shape, shape, shape[:-1], shape[:-1]]
    if backend.name == "xla":
        leaves = [x.reshape(s) for x, s in zip(leaves, shapes)]
    else:
        leaves = [x.swapaxes(2, 3) for x in leaves]
    leaves[:2] = [np.ascontiguousarray(x).view(jnp.dtype(kv_dtype or plain.dtype)) for x in leaves[:2]]
    if kv_dtype is None:
        return tuple(leaves)
    return tuple(x.astype(np.float32) * scale[..., None] for x, scale in zip(leaves[:2], leaves[2:]))


def quantised(x: np.ndarray, kv_dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """x [..., head_dim] as `kv_dtype` and scales [...], in numpy. NaN stays in the scale alone, as types without NaN
    can't hold it."""
    x, limit = x.astype(np.float32), np.float32({"int8": 127, "float8_e4m3fn": 448}[kv_dtype])
    scale = np.abs(x).max(-1) * np.float32(1 / float(limit))
    scaled = np.nan_to_num(x * (np.float32(1) / np.where(scale == 0, np.float32(1), scale))[..., None]).clip(
        -limit, limit
    )
    return (np.rint(scaled) if kv_dtype == "int8" else scaled).astype(jnp.dtype(kv_dtype)), scale


@cache
def compiled(backend: AttentionBackend, scale: float, options: tuple[tuple[str, Any], ...]) -> Any:
    """One function for all mixes: they share their shapes, as steps do."""
    return jax.jit(partial(backend.attend, scale=scale, **dict(options)))


def expected(
    case: Case,
    window: int | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
    kv_dtype: str | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The same by loops over tokens and heads in numpy, float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (case.q, case.k, case.v))
    stored = case.history.reshape(2, -1, *case.history.shape[3:]).astype(np.float64)
    slots = np.asarray(case.ragged.slots)
    stored[0, slots[slots >= 0]], stored[1, slots[slots >= 0]] = k[slots >= 0], v[slots >= 0]
    if kv_dtype is not None:
        values, scale = quantised(stored, kv_dtype)
        stored = values.astype(np.float64) * scale[..., None]
    out = np.zeros(q.shape)
    block_size, group = case.history.shape[2], q.shape[1] // k.shape[1]
    for row, kv_len in enumerate(np.asarray(case.ragged.kv_lens)):
        first, end = np.asarray(case.ragged.q_starts)[row : row + 2]
        where = np.arange(kv_len)
        places = np.asarray(case.ragged.block_tables)[row, where // block_size] * block_size + where % block_size
        for token in range(first, end):
            seen = places[: kv_len - (end - first) + (token - first) + 1][-(window or kv_len) :]
            for head in range(q.shape[1]):
                scores = stored[0, seen, head // group] @ q[token, head] * case.scale
                weights = np.exp(scores if softcap is None else softcap * np.tanh(scores / softcap))
                total = weights.sum() + (0 if sinks is None else np.exp(float(sinks[head])))
                out[token, head] = weights @ stored[1, seen, head // group] / total
    return out, stored.reshape(case.history.shape)
