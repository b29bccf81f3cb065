"""Run a decoder's layers, and make the caches they share.

Two ways with equal results. Unrolled, each layer with its own cache, or with its part of one cache where the backend
updates that in place: XLA may overlap layers, but compiles attention once a layer. As a loop over one cache of all
layers: attention is compiled once, and the parts around it once a layer, as the branches of a switch, as a scan would
first copy each layer's weights out of a stack. For 30 layers on 2 cores that is 3.5 s in place of 11 a program, at the
same speed; a GPU would wait for the host at each switch.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from jax import lax

from pagedjax.models.config import ModelConfig
from pallas_kernels.ragged_attention import AttentionBackend, KVBlocks


class DecoderLayer(Protocol):
    """What lies around a layer's attention. All layers of a stack have the same shapes."""

    def before(self, x: jax.Array) -> jax.Array:
        """x [tokens, hidden]: q, k and v, not yet rotated, in one array [tokens, heads + 2 kv_heads, head_dim]."""

    def after(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        """x and attended [tokens, heads, head_dim]: the layer's output [tokens, hidden]."""


# (qkv, cache, layer) -> (attended [tokens, heads, head_dim], cache)
Mix = Callable[..., tuple[jax.Array, KVBlocks]]


def init_caches(
    config: ModelConfig, backend: AttentionBackend, *, num_blocks: int, block_size: int, dtype: Any
) -> tuple[KVBlocks, ...]:
    """Empty caches for `run_layers`: one of all layers if the backend loops over or joins them, else one a layer."""
    shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim, dtype)
    if backend.prefers_loop or backend.joins_layers:
        return (backend.init_cache(*shape, num_layers=config.num_layers),)
    return tuple(backend.init_cache(*shape) for _ in range(config.num_layers))


def run_layers(
    layers: Sequence[DecoderLayer], x: jax.Array, caches: tuple[KVBlocks, ...], mix: Mix, *, loop: bool
) -> tuple[jax.Array, tuple[KVBlocks, ...]]:
    """x [tokens, hidden] through all layers: unrolled, or by a `loop` where there is one cache for many layers."""
    if len(caches) == 1 and len(layers) > 1:
        x, cache = (_looped if loop else _joined)(layers, x, caches[0], mix)
        return x, (cache,)
    # As a function of its own it is traced and lowered once: a kernel of Mosaic takes seconds to lower.
    mix = jax.jit(mix, static_argnums=2)
    new = []
    for layer, cache in zip(layers, caches, strict=True):
        attended, cache = mix(layer.before(x), cache, 0)
        x = layer.after(x, attended)
        new.append(cache)
    return x, tuple(new)


def _joined(layers: Sequence[DecoderLayer], x: jax.Array, cache: KVBlocks, mix: Mix) -> tuple[jax.Array, KVBlocks]:
    for i, layer in enumerate(layers):
        attended, cache = mix(layer.before(x), cache, i)
        x = layer.after(x, attended)
    return x, cache


def _looped(layers: Sequence[DecoderLayer], x: jax.Array, cache: KVBlocks, mix: Mix) -> tuple[jax.Array, KVBlocks]:
    before, after = ([getattr(layer, part) for layer in layers] for part in ("before", "after"))

    def step(i: jax.Array, carry: tuple[jax.Array, KVBlocks]) -> tuple[jax.Array, KVBlocks]:
        x, cache = carry
        attended, cache = mix(lax.switch(i, before, x), cache, i)
        return lax.switch(i, after, x, attended), cache

    return lax.fori_loop(0, len(layers), step, (x, cache))
