"""Tiny Llamas with random weights, and their forward pass once more in numpy, float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.models import llama
from pagedjax.models.config import LinearScaling, ModelConfig
from pallas_kernels.ragged_attention import AttentionBackend, Ragged, xla

BLOCK_SIZE, NUM_BLOCKS, ROWS = 8, 32, 4
UNTIED = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
)
TIED = dataclasses.replace(UNTIED, tie_word_embeddings=True, rope_theta=500.0, rope_scaling=LinearScaling(4.0))
BIASED = dataclasses.replace(UNTIED, attention_bias=True, mlp_bias=True, num_kv_heads=6, head_dim=8)


def make_tensors(config: ModelConfig) -> dict[str, np.ndarray]:
    """A checkpoint, by name."""
    rng = np.random.default_rng(0)
    every = [part for sources in llama.parts(config).values() for part in sources]
    return {part.name: rng.standard_normal(part.shape).astype(np.float32) * 0.2 for part in every}


def load(
    config: ModelConfig, tensors: dict[str, np.ndarray], dtype: str = "float32", backend: AttentionBackend = xla.BACKEND
) -> llama.LlamaForCausalLM:
    return llama.LlamaForCausalLM.load(config, tensors.__getitem__, tensors.keys(), dtype=dtype, backend=backend)


def pack(rows: list[tuple[int, int, int]], num_tokens: int) -> tuple[np.ndarray, Ragged]:
    """Positions [num_tokens] and the batch of rows (sequence, start, length), decodes first.

    Sequence i owns the i-th eighth of the blocks, in reverse.
    """
    tables = np.full((ROWS, NUM_BLOCKS // 8), -1)
    positions, slots, q_starts, kv_lens = [], [], [0], np.zeros(ROWS, int)
    for row, (sequence, start, length) in enumerate(rows):
        tables[row] = np.arange(NUM_BLOCKS).reshape(8, -1)[sequence, ::-1]
        at = np.arange(start, start + length)
        positions.extend(at)
        slots.extend(tables[row, at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE)
        q_starts.append(q_starts[-1] + length)
        kv_lens[row] = start + length
    padding = num_tokens - len(slots)
    q_starts += [q_starts[-1]] * (ROWS + 1 - len(q_starts))
    num_decode = next((i for i, row in enumerate(rows) if row[2] != 1), len(rows))
    arrays = (tables, q_starts, kv_lens, slots + [-1] * padding, num_decode)
    return np.array(positions + [0] * padding), Ragged(*(np.asarray(x, np.int32) for x in arrays))


def numpy_logits(config: ModelConfig, tensors: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    """Scores after each of a sequence's tokens: [tokens, vocab]. No cache, no batch, one head at a time."""
    t = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    x = t["model.embed_tokens.weight"][ids]
    for i in range(config.num_layers):
        layer = f"model.layers.{i}."
        x = x + numpy_attention(config, t, f"{layer}self_attn.", rms(x, t[f"{layer}input_layernorm.weight"], config))
        h = rms(x, t[f"{layer}post_attention_layernorm.weight"], config)
        gate, up = (linear(t, f"{layer}mlp.{name}_proj", h) for name in ("gate", "up"))
        x = x + linear(t, f"{layer}mlp.down_proj", gate / (1 + np.exp(-gate)) * up)
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return rms(x, t["model.norm.weight"], config) @ t[head].T


def numpy_attention(config: ModelConfig, t: dict[str, np.ndarray], layer: str, h: np.ndarray) -> np.ndarray:
    q, k, v = (linear(t, f"{layer}{name}_proj", h).reshape(len(h), -1, config.head_dim) for name in "qkv")
    factor = config.rope_scaling.factor if config.rope_scaling else 1.0
    heads = []
    for head in range(config.num_heads):
        kv_head = head * config.num_kv_heads // config.num_heads
        queries, keys = (turned(x, config.rope_theta, factor) for x in (q[:, head], k[:, kv_head]))
        scores = np.where(np.tri(len(h), dtype=bool), queries @ keys.T / np.sqrt(config.head_dim), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        heads.append(weights / weights.sum(-1, keepdims=True) @ v[:, kv_head])
    return linear(t, f"{layer}o_proj", np.concatenate(heads, -1))


def turned(x: np.ndarray, theta: float, factor: float) -> np.ndarray:
    """x [positions, head_dim]: pair (j, j + head_dim / 2) as a complex number, turned."""
    half = x.shape[1] // 2
    angles = np.arange(len(x))[:, None] / factor * theta ** -(np.arange(half) / half)
    turned_pairs = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angles)
    return np.concatenate([turned_pairs.real, turned_pairs.imag], -1)


def linear(t: dict[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    return x @ t[f"{name}.weight"].T + t.get(f"{name}.bias", 0.0)


def rms(x: np.ndarray, weight: np.ndarray, config: ModelConfig) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.rms_norm_eps) * weight


class Stepper:
    """Runs batches of rows of known sequences on a model, keeping its caches."""

    def __init__(self, model: llama.LlamaForCausalLM, caches: tuple, sequences: list[np.ndarray]) -> None:
        self.model, self.caches, self.sequences = model, caches, sequences
        self.forward = jax.jit(lambda caches, *batch: self._run(caches, *batch), donate_argnums=0)

    def step(self, rows: list[tuple[int, int, int]], num_tokens: int = 48) -> list[np.ndarray]:
        """Logits [length, vocab] of each row (sequence, start, length)."""
        ids = np.concatenate([self.sequences[s][a : a + n] for s, a, n in rows])
        positions, ragged = pack(rows, num_tokens)
        logits, self.caches = self.forward(self.caches, np.pad(ids, (0, num_tokens - len(ids))), positions, ragged)
        return np.split(np.asarray(logits)[: len(ids)], np.cumsum([n for _, _, n in rows])[:-1])

    def _run(self, caches: tuple, ids: jax.Array, positions: jax.Array, ragged: Ragged) -> tuple[jax.Array, tuple]:
        hidden, caches = self.model(ids, positions.astype(jnp.int32), caches, ragged)
        return self.model.logits(hidden), caches
