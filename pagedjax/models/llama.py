"""Llama: pre-norm decoder layers of rotary grouped-query attention and SwiGLU (arXiv:2302.13971, 2407.21783).

Module names are the checkpoint's, with q, k, v and gate, up fused into one weight each.
"""

from collections.abc import Callable, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pagedjax.core.errors import ConfigError
from pagedjax.models.attention import Attention, mixer
from pagedjax.models.config import ModelConfig
from pagedjax.models.fill import Join, Pack, Part, fill
from pagedjax.models.layers import Embedding, Linear, RMSNorm, SwiGLU
from pagedjax.models.stack import run_layers
from pallas_kernels.ragged_attention import AttentionBackend, KVBlocks, Ragged


class LlamaLayer(nnx.Module):
    """A `stack.DecoderLayer`."""

    def __init__(self, config: ModelConfig, *, dtype: Any, sum_over: str | None = None) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.input_layernorm = RMSNorm(hidden, config.rms_norm_eps)
        self.self_attn = Attention(config, dtype=dtype, sum_over=sum_over)
        self.post_attention_layernorm = RMSNorm(hidden, config.rms_norm_eps)
        self.mlp = SwiGLU(hidden, inner, bias=config.mlp_bias, dtype=dtype, sum_over=sum_over)

    def before(self, x: jax.Array) -> jax.Array:
        return self.self_attn.heads(x, norm=self.input_layernorm)

    def after(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        x = self.self_attn.merge(attended, residual=x)
        return self.mlp(x, norm=self.post_attention_layernorm, residual=x)


class LlamaForCausalLM(nnx.Module):
    """One shard of the model where `sum_over` names the mesh axis over which it is split: `config` is then
    `sharding.shard_of` the whole one's, and the module runs inside a shard_map.

    Raises ConfigError for an activation other than SiLU.
    """

    def __init__(
        self, config: ModelConfig, *, dtype: Any, backend: AttentionBackend, sum_over: str | None = None
    ) -> None:
        if config.hidden_act not in ("silu", "swish"):
            raise ConfigError(f"Llama with hidden_act {config.hidden_act!r} is not supported; known: silu")
        self.config, self.backend = config, backend
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        layers = [LlamaLayer(config, dtype=dtype, sum_over=sum_over) for _ in range(config.num_layers)]
        self.layers = nnx.List(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)

    def __call__(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        caches: tuple[KVBlocks, ...],
        ragged: Ragged,
        max_q_len: int | None = None,
    ) -> tuple[jax.Array, tuple[KVBlocks, ...]]:
        """token_ids and positions [tokens], caches of `stack.init_caches`: (hidden [tokens, hidden], caches).

        `hidden` is after the final norm. `max_q_len` is the promise of `AttentionBackend`.
        Raises ValueError unless there is one cache of all layers or one a layer.
        """
        mix = mixer(self.backend, self.config, positions, ragged, max_q_len=max_q_len)
        loop = self.backend.prefers_loop and len(token_ids) > 1  # for one token the switches cost a twentieth
        x, caches = run_layers(self.layers, self.embed_tokens(token_ids), caches, mix, loop=loop)
        return self.norm(x), caches

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Scores of every token from normed hidden states [n, hidden]: [n, vocab], float32."""
        if self.lm_head is None:
            return self.embed_tokens.attend(hidden)
        return self.lm_head(hidden, out_dtype=jnp.float32)

    @property
    def head_weight(self) -> Any:
        """That of `logits`, [vocab, hidden], in whatever layout."""
        return (self.embed_tokens if self.lm_head is None else self.lm_head).weight.get_value()

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        get: Callable[[str], np.ndarray],
        names: Set[str],
        *,
        dtype: Any,
        backend: AttentionBackend,
        pack: Pack | None = None,
        join: Join | None = None,
    ) -> "LlamaForCausalLM":
        """The model with each parameter filled once from `get(name)`, under Hugging Face's names and layout.

        `pack` gives weights in another layout than FloatWeight, and `join` joins them (see `fill`). Raises ConfigError,
        by name, for tensors that are missing, too many or of the wrong shape.
        """
        model = nnx.eval_shape(lambda: cls(config, dtype=dtype, backend=backend))
        return fill(model, parts(config), get, names, may_skip=may_skip(config, names, get), pack=pack, join=join)


def parts(config: ModelConfig) -> dict[str, tuple[Part, ...]]:
    """Model parameter -> the checkpoint's tensors that make it, stacked along axis 0. In the order in which a step uses
    them; it takes but a few rows of an embedding, unless that is the head too."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    found: dict[str, tuple[Part, ...]] = {}
    for i in range(config.num_layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"layers.{i}.{norm}.weight"] = (Part(f"model.layers.{i}.{norm}.weight", (hidden,)),)
        attention, mlp = (f"layers.{i}.{name}" for name in ("self_attn", "mlp"))
        bias = config.attention_bias
        qkv = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        found |= _linear(f"{attention}.qkv_proj", attention, qkv, hidden, bias=bias)
        found |= _linear(f"{attention}.o_proj", attention, {"o_proj": hidden}, q, bias=bias)
        gate_up = {"gate_proj": inner, "up_proj": inner}
        found |= _linear(f"{mlp}.gate_up_proj", mlp, gate_up, hidden, bias=config.mlp_bias)
        found |= _linear(f"{mlp}.down_proj", mlp, {"down_proj": hidden}, inner, bias=config.mlp_bias)
    found["norm.weight"] = (Part("model.norm.weight", (hidden,)),)
    if not config.tie_word_embeddings:
        found["lm_head.weight"] = (Part("lm_head.weight", (config.vocab_size, hidden)),)
    found["embed_tokens.weight"] = (Part("model.embed_tokens.weight", (config.vocab_size, hidden)),)
    return found


def _linear(target: str, source: str, outs: dict[str, int], num_in: int, *, bias: bool) -> dict[str, tuple[Part, ...]]:
    found = {f"{target}.weight": tuple(Part(f"model.{source}.{n}.weight", (out, num_in)) for n, out in outs.items())}
    if bias:
        found[f"{target}.bias"] = tuple(Part(f"model.{source}.{n}.bias", (out,)) for n, out in outs.items())
    return found


def may_skip(config: ModelConfig, names: Set[str], get: Callable[[str], np.ndarray]) -> frozenset[str]:
    """Tensors that some checkpoints carry beside the parameters: rotary tables, and a tied head written out."""
    skipped = {name for name in names if name.endswith(".rotary_emb.inv_freq")}
    if config.tie_word_embeddings and "lm_head.weight" in names and "model.embed_tokens.weight" in names:
        if not np.array_equal(get("lm_head.weight"), get("model.embed_tokens.weight")):
            raise ConfigError("the config ties lm_head.weight to model.embed_tokens.weight, but their values differ")
        skipped.add("lm_head.weight")
    return frozenset(skipped)
