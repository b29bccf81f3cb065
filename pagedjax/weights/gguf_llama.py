"""What a GGUF file of the llama architecture says in Hugging Face's words: the config, the names and the layout."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from pagedjax.core.errors import ConfigError
from pagedjax.models.config import LinearScaling, Llama3Scaling, ModelConfig, RopeScaling
from pagedjax.models.rope import inverse_frequencies
from pagedjax.weights.gguf import GgufFile
from pallas_kernels.matmul import QuantisedRows

ARCHITECTURE = "llama"
ROPE_FACTORS = "rope_freqs.weight"
_OUTER: Mapping[str, str] = MappingProxyType(
    {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
)
_INNER: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
# The converter leaves out how far Llama 3.1 to 3.3 blend; these are the values of every one of them.
_LLAMA3 = Llama3Scaling(8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)


def hf_names(file: GgufFile) -> dict[str, str]:
    """Hugging Face's name -> the file's name of every tensor but the rotary factors; unknown names stay."""
    return {_hf_name(name): name for name in file.tensors if name != ROPE_FACTORS}


def read_tensor(file: GgufFile, config: ModelConfig, name: str) -> np.ndarray:
    """Tensor `name` (the file's) in Hugging Face's layout: rows of q and k in the half-split rotary order."""
    return _half_split(file, config, name, file.read(name))


def read_quantised(file: GgufFile, config: ModelConfig, name: str) -> QuantisedRows | None:
    """The same as the file's own groups of 4 or 8 bits, or None where it has others or none."""
    rows = file.read_quantised(name)
    return rows and rows._replace(blocks=_half_split(file, config, name, rows.blocks))


def _half_split(file: GgufFile, config: ModelConfig, name: str, values: np.ndarray) -> np.ndarray:
    """Rows of q and k in the half-split rotary order, others as they are."""
    found = _LAYER_TENSOR.fullmatch(name)
    num_heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(found[2] if found else "")
    if num_heads is None:
        return values
    if values.shape[0] != num_heads * config.head_dim:
        raise ConfigError(f"{file.path}: {name} has {values.shape[0]} rows, not {num_heads} x {config.head_dim}")
    # The converter interleaved the two halves of every head: (head, pair, half) -> (head, half, pair).
    pairs = values.reshape(num_heads, config.head_dim // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def read_config(file: GgufFile) -> ModelConfig:
    """The model's config. Raises ConfigError, by name, for another architecture or a feature that is not supported."""
    architecture = file.metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise ConfigError(f"{file.path}: architecture {architecture!r} is not supported in GGUF files; known: llama")
    if _value(file, "expert_count", 0):
        raise ConfigError(f"{file.path}: it is a mixture of experts, which is not supported")
    window, context = _value(file, "attention.sliding_window", 0), _value(file, "context_length")
    if 0 < window < context:
        raise ConfigError(f"{file.path}: its sliding window of {window} tokens is not supported")
    num_heads, hidden = _value(file, "attention.head_count"), _value(file, "embedding_length")
    head_dim = _head_dim(file, hidden, num_heads)
    theta = float(_value(file, "rope.freq_base", 10_000.0))
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=_vocab_size(file),
        hidden_size=hidden,
        intermediate_size=_value(file, "feed_forward_length"),
        num_layers=_value(file, "block_count"),
        num_heads=num_heads,
        num_kv_heads=_value(file, "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=_value(file, "attention.layer_norm_rms_epsilon"),
        rope_theta=theta,
        rope_scaling=_rope_scaling(file, head_dim, theta),
        max_position_embeddings=context,
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
    )


def _value(file: GgufFile, name: str, default: Any = None) -> Any:
    key = f"{ARCHITECTURE}.{name}"
    value = file.metadata.get(key, default)
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise ConfigError(f"{file.path}: {key} differs between layers, which is not supported")
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{file.path}: its metadata needs a number {key}, not {value!r}")
    return value


def _head_dim(file: GgufFile, hidden: int, num_heads: int) -> int:
    head_dim = _value(file, "attention.key_length", hidden // max(num_heads, 1))
    for name in ("attention.value_length", "rope.dimension_count"):
        other = _value(file, name, head_dim)
        if other != head_dim:
            raise ConfigError(f"{file.path}: {ARCHITECTURE}.{name} is {other}, but heads have {head_dim} dimensions")
    return head_dim


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ConfigError(f"{file.path} has no token_embd.weight; is it one part of a split model, or an adapter?")
    num_tokens = len(file.metadata.get("tokenizer.ggml.tokens", ()))
    if num_tokens > embedding.shape[0]:
        raise ConfigError(f"{file.path}: {num_tokens} tokens, but embeddings of only {embedding.shape[0]}")
    return embedding.shape[0]


def _rope_scaling(file: GgufFile, head_dim: int, theta: float) -> RopeScaling | None:
    kind = file.metadata.get(f"{ARCHITECTURE}.rope.scaling.type", "none")
    if ROPE_FACTORS in file.tensors:
        return _llama3_scaling(file, head_dim, theta)
    if kind == "none":
        return None
    if kind == "linear":
        return LinearScaling(float(_value(file, "rope.scaling.factor")))
    raise ConfigError(f"{file.path}: rope scaling {kind!r} is not supported; known: none, linear, llama3's factors")


def _llama3_scaling(file: GgufFile, head_dim: int, theta: float) -> Llama3Scaling:
    """The scaling behind the stored factors, each pair's plain frequency over its scaled one."""
    factors = file.read(ROPE_FACTORS).astype(np.float64)
    scaling = _LLAMA3._replace(factor=round(max(factors.tolist(), default=1.0), 4))
    plain = inverse_frequencies(head_dim, theta, None).astype(np.float64)
    expected = plain / inverse_frequencies(head_dim, theta, scaling).astype(np.float64)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise ConfigError(f"{file.path}: the rotary factors in {ROPE_FACTORS} are not Llama 3's: not supported")
    return scaling


def _hf_name(name: str) -> str:
    found = _LAYER_TENSOR.fullmatch(name)
    if found and found[2] in _INNER:
        return f"model.layers.{found[1]}.{_INNER[found[2]]}.{found[3]}"
    return _OUTER.get(name, name)
