"""Rotary position embeddings (arXiv:2104.09864) in Hugging Face's half-split form."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.models.config import LinearScaling, Llama3Scaling, RopeScaling


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """Radians a position turns each pair by: [head_dim / 2], float32."""
    plain = 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    match scaling:
        case None:
            scaled = plain
        case LinearScaling(factor):
            scaled = plain / factor
        case Llama3Scaling():
            scaled = _llama3(plain, scaling)
        case _:
            raise NotImplementedError(f"rope scaling {type(scaling).__name__}")
    return scaled.astype(np.float32)


def tables(positions: jax.Array, frequencies: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines at `positions` [tokens]: [tokens, head_dim / 2] each, float32."""
    angles = positions[:, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """x [tokens, heads, head_dim] turned by the tables [tokens, head_dim / 2], computed in float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _llama3(plain: np.ndarray, s: Llama3Scaling) -> np.ndarray:
    waves = 2 * math.pi / plain
    longest, shortest = (s.original_max_position_embeddings / f for f in (s.low_freq_factor, s.high_freq_factor))
    share = (s.original_max_position_embeddings / waves - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    blended = (1 - share) * plain / s.factor + share * plain
    return np.where(waves > longest, plain / s.factor, np.where(waves < shortest, plain, blended))
