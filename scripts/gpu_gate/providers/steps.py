"""Whole programs: steps, head, sampler and block copies of Llama-3-8B, and steps of Llama-3-70B on eight GPUs.

A step's cache is aliased whole and never copied. What is donated is matched with an output by its shape on one device,
and by its place on several (see `programs.places_beside`).
"""

from collections.abc import Iterable
from functools import partial

import jax.numpy as jnp
from jax.sharding import Mesh

from pagedjax.core.config import SchedulerConfig
from pagedjax.models.config import ModelConfig
from pagedjax.runtime import abstract
from pallas_kernels import dispatch
from pallas_kernels.ragged_attention import AttentionBackend, AttentionNeed, AttentionShape
from scripts.gpu_gate.attention import DECODES, MIXED
from scripts.gpu_gate.cases import Case, Program
from scripts.gpu_gate.target import TARGETS

_LLAMA = {
    "architecture": "LlamaForCausalLM",
    "vocab_size": 128256,
    "num_kv_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 8192,
}
LLAMA_8B = ModelConfig(hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, **_LLAMA)
LLAMA_70B = ModelConfig(hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64, **_LLAMA)
DTYPE, BLOCK_SIZE = "bfloat16", 16
# Blocks as on a GPU of 141 GB; a layer of them is larger than any activation, so that a copy of it stands out.
NUM_BLOCKS = {1: 32_768, 8: 65_536}
# (name, size) -> what it is, the position of the cache where it is donated, whether the short gate has it
WHOLE = {
    ("step", 2048): ("prefill of 2048 tokens", 1, False),
    ("step", 512): ("mixed step of 512 tokens", 1, False),
    ("decode", 64): ("decode of 64 rows", 1, True),
    ("head", 64): ("head of 64 rows", None, False),
    ("greedy", 64): ("greedy sampler of 64 rows", None, False),
    ("gather", 64): ("64 blocks out of the cache", None, False),
    ("scatter", 64): ("64 blocks into the cache", 0, True),
    ("copy", 16): ("16 blocks within the cache", 0, False),
}
# By the name of a program: attention kernels that must be there, by backend.
KERNELS = {"step": MIXED, "decode": DECODES}
# What devices say to each other.
COLLECTIVES = {"step": ("AllReduce",), "decode": ("AllReduce",), "head": ("AllGather",)}
SPLIT = {key: WHOLE[key] for key in (("step", 2048), ("decode", 64), ("head", 64))}


def cases(target: str) -> Iterable[Case]:
    shape = AttentionShape(LLAMA_8B.num_heads, LLAMA_8B.num_kv_heads, LLAMA_8B.head_dim, BLOCK_SIZE)
    need = AttentionNeed("gpu", shape, jnp.dtype(DTYPE), capability=TARGETS[target].capability)
    for candidate in dispatch.CANDIDATES["ragged_attention"]:
        if candidate.backend.name not in MIXED:
            continue
        refused = candidate.refuse(need)
        yield from _cases(target, candidate.backend, "Llama-3-8B", LLAMA_8B, 1, refused)
        if target == "h200":
            yield from _cases(target, candidate.backend, "Llama-3-70B over 8", LLAMA_70B, 8, refused)


def _cases(
    target: str, backend: AttentionBackend, name: str, model: ModelConfig, num_devices: int, refused: str | None
) -> Iterable[Case]:
    for key, (what, cache, quick) in (WHOLE if num_devices == 1 else SPLIT).items():
        yield Case(
            op="step",
            backend=backend.name,
            target=target,
            shape=f"{name}, {what}, {DTYPE}",
            build=partial(program, backend, model, key, None),
            topology=f"1x1x{num_devices}",
            kernels=KERNELS[key[0]][backend.name] if key[0] in KERNELS else {},
            thunks=COLLECTIVES.get(key[0], ()) if num_devices > 1 else (),
            cache=cache,
            refused=refused,
            quick=quick and num_devices == 1,
        )


def program(
    backend: AttentionBackend, model: ModelConfig, key: tuple[str, int], cache_dtype: str | None, mesh: Mesh
) -> Program:
    """One of the runtime's programs, split over the mesh if that has several devices."""
    scheduler = SchedulerConfig(
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS[mesh.size],
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_model_len=model.max_position_embeddings,
    )
    types = {"dtype": DTYPE, "cache_dtype": cache_dtype}
    jobs = abstract.jobs(model, scheduler, backend=backend, mesh=mesh if mesh.size > 1 else None, **types)
    job = next(job for job in jobs if (job.name, job.size) == key)
    return Program(job.jitted, job.inputs)
