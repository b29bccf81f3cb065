"""A tiny Llama model as a GGUF file and as a Hugging Face directory, made by the tools that others use."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCAB = 32, 64, 4, 2, 8, 2, 40
INNER_NAMES = {
    "attn_norm": ("input_layernorm", (HIDDEN,)),
    "attn_q": ("self_attn.q_proj", (HEADS * HEAD_DIM, HIDDEN)),
    "attn_k": ("self_attn.k_proj", (KV_HEADS * HEAD_DIM, HIDDEN)),
    "attn_v": ("self_attn.v_proj", (KV_HEADS * HEAD_DIM, HIDDEN)),
    "attn_output": ("self_attn.o_proj", (HIDDEN, HEADS * HEAD_DIM)),
    "ffn_norm": ("post_attention_layernorm", (HIDDEN,)),
    "ffn_gate": ("mlp.gate_proj", (INNER, HIDDEN)),
    "ffn_up": ("mlp.up_proj", (INNER, HIDDEN)),
    "ffn_down": ("mlp.down_proj", (HIDDEN, INNER)),
}


def tiny_tensors(tied: bool = True) -> dict[str, tuple[str, np.ndarray]]:
    """The GGUF file's name -> (Hugging Face's name, values in its layout)."""
    shapes = {"token_embd": ("model.embed_tokens", (VOCAB, HIDDEN)), "output_norm": ("model.norm", (HIDDEN,))}
    shapes |= {} if tied else {"output": ("lm_head", (VOCAB, HIDDEN))}
    for i in range(LAYERS):
        shapes |= {f"blk.{i}.{g}": (f"model.layers.{i}.{hf}", shape) for g, (hf, shape) in INNER_NAMES.items()}
    rng = np.random.default_rng(0)
    values = {name: rng.standard_normal(shape, np.float32) for name, (_, shape) in shapes.items()}
    return {f"{name}.weight": (f"{hf}.weight", values[name]) for name, (hf, _) in shapes.items()}


def interleaved(values: np.ndarray, num_heads: int) -> np.ndarray:
    """As llama.cpp's converter stores q and k: within each head the two rotary halves alternate."""
    out = np.empty_like(values)
    half = HEAD_DIM // 2
    for head in range(num_heads):
        for i in range(half):
            out[head * HEAD_DIM + 2 * i] = values[head * HEAD_DIM + i]
            out[head * HEAD_DIM + 2 * i + 1] = values[head * HEAD_DIM + half + i]
    return out


@pytest.fixture
def tiny_gguf(tmp_path):
    """Writes the tiny model: `tiny_gguf(architecture=, tied=, theta=, metadata={…}, tensors={…})`."""

    def write(*, architecture="llama", tied=True, theta=10_000.0, metadata=None, tensors=None) -> Path:
        path = tmp_path / "tiny.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_block_count(LAYERS)
        writer.add_context_length(64)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(INNER)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(theta)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        for key, value in (metadata or {}).items():
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
        for name, (_, values) in tiny_tensors(tied).items():
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2])
            writer.add_tensor(name, interleaved(values, heads) if heads else values)
        for name, values in (tensors or {}).items():
            writer.add_tensor(name, values)
        _finish(writer)
        return path

    return write


@pytest.fixture
def tensor_gguf(tmp_path):
    """Writes a file of one tensor "x" from its stored bytes: `tensor_gguf(raw, encoding)`."""

    def write(raw: np.ndarray, encoding: gguf.GGMLQuantizationType) -> Path:
        path = tmp_path / "one.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_tensor("x", raw, raw_dtype=encoding)
        _finish(writer)
        return path

    return write


@pytest.fixture
def tiny_hf(tmp_path):
    """Writes the same model as a Hugging Face directory: `tiny_hf(tied=)`."""

    def write(*, tied=True, **config) -> Path:
        directory = tmp_path / "tiny-hf"
        directory.mkdir()
        save_file(dict(tiny_tensors(tied).values()), directory / "model.safetensors")
        plain = {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "rms_norm_eps": float(np.float32(1e-5)),
            "rope_theta": 10_000.0,
            "max_position_embeddings": 64,
            "tie_word_embeddings": tied,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        (directory / "config.json").write_text(json.dumps(plain | config))
        return directory

    return write


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
