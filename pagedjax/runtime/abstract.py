"""A model's programs from shapes alone, without weights and without a device: what compiles them ahead for machines
that are not here starts from these.

On a `mesh` the model is split over its only axis (see `models.sharding`): the forward pass runs under shard_map, so
that each device's attention has its own KV heads, and the cache is split as its heads are.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pagedjax.core.config import SchedulerConfig
from pagedjax.models import registry, sharding
from pagedjax.models.config import ModelConfig
from pagedjax.models.stack import init_caches
from pagedjax.runtime import copies, programs, swap
from pagedjax.runtime.config import shapes_for
from pagedjax.runtime.programs import Job, ModelParts
from pallas_kernels import block_copy
from pallas_kernels.ragged_attention import AttentionBackend

WHOLE = PartitionSpec()


def jobs(
    config: ModelConfig,
    scheduler: SchedulerConfig,
    *,
    backend: AttentionBackend,
    dtype: Any,
    cache_dtype: Any | None = None,
    mesh: Mesh | None = None,
    relayed: Callable[[nnx.Module], nnx.Module] = lambda model: model,
) -> list[Job]:
    """Every program that the runner would warm up on a GPU; on a single device, those of swaps too.

    There, `relayed` may give the abstract model with weights in another layout. The cache is of `cache_dtype`; None: of
    the computing type.
    Raises ConfigError for limits or a split that cannot be.
    """
    dtype = jnp.dtype(dtype)
    kept = dtype if cache_dtype is None else jnp.dtype(cache_dtype)
    caches = _caches(config, scheduler, backend, kept)
    if mesh is None:
        parts = _parts(config, backend, dtype, relayed=relayed)
    else:
        shard_caches = _caches(sharding.shard_of(config, mesh.size), scheduler, backend, kept)
        parts, caches = _split(config, backend, dtype, caches, shard_caches, mesh)
    decodes = backend.prefers_decode_programs
    found = programs.jobs(parts, shapes_for(scheduler), caches, scheduler.max_num_seqs, config, dtype, decodes=decodes)
    if mesh is not None:
        return [_placed(job, mesh) for job in found]
    sizes = swap.copy_sizes(_block_bytes(caches), scheduler.num_blocks, "gpu")
    return [*found, *copies.jobs(caches, block_copy.backend_for("gpu"), sizes, swaps=True)]


def leaf_names(config: ModelConfig, backend: AttentionBackend, dtype: Any) -> tuple[tuple[str, str], ...]:
    """Module and parameter of each of a step's weights, in order."""
    return _parts(config, backend, jnp.dtype(dtype)).names


def _parts(
    config: ModelConfig,
    backend: AttentionBackend,
    dtype: Any,
    sum_over: str | None = None,
    relayed: Callable[[nnx.Module], nnx.Module] = lambda model: model,
) -> ModelParts:
    made = registry.find(config)
    model = relayed(nnx.eval_shape(lambda: made(config, dtype=dtype, backend=backend, sum_over=sum_over)))
    return programs.split_model(model, jax.ShapeDtypeStruct((1, config.hidden_size), dtype))


def _caches(config: ModelConfig, scheduler: SchedulerConfig, backend: AttentionBackend, dtype: Any) -> Any:
    sizes = {"num_blocks": scheduler.num_blocks, "block_size": scheduler.block_size}
    return jax.eval_shape(lambda: init_caches(config, backend, dtype=dtype, **sizes))


def _block_bytes(caches: Any) -> int:
    row = block_copy.staging_for(caches, 1)
    return row.size * row.dtype.itemsize


# --- on a mesh --------------------------------------------------------------------------------------------------------


def _split(
    config: ModelConfig, backend: AttentionBackend, dtype: Any, caches: Any, shard_caches: Any, mesh: Mesh
) -> tuple[ModelParts, Any]:
    """The parts of the whole model, whose functions run a shard of it on each device, and the caches, placed.
    `shard_caches` are one device's."""
    shard_config = sharding.shard_of(config, mesh.size)
    whole = _parts(config, backend, dtype)
    shard = _parts(shard_config, backend, dtype, sum_over=sharding.AXIS)
    specs = tuple(_spec(names, leaf.ndim) for names, leaf in zip(whole.names, whole.forward_leaves, strict=True))
    cache_specs = jax.tree.map(_split_spec, caches, shard_caches)

    def forward(leaves: Any, ids: Any, positions: Any, caches: Any, ragged: Any, max_q_len: int | None) -> Any:
        mapped = jax.shard_map(
            partial(shard.forward, max_q_len=max_q_len),
            mesh=mesh,
            in_specs=(specs, WHOLE, WHOLE, cache_specs, WHOLE),
            out_specs=(WHOLE, cache_specs),
            check_vma=False,
        )
        return mapped(leaves, ids, positions, caches, ragged)

    by_vocabulary = PartitionSpec(sharding.AXIS)
    head = jax.shard_map(
        lambda leaves, hidden: lax.all_gather(shard.head(leaves, hidden), sharding.AXIS, axis=1, tiled=True),
        mesh=mesh,
        in_specs=((by_vocabulary,) * len(whole.head_leaves), WHOLE),
        out_specs=WHOLE,
        check_vma=False,
    )
    leaves = tuple(_place(leaf, mesh, spec) for leaf, spec in zip(whole.forward_leaves, specs, strict=True))
    head_leaves = tuple(_place(leaf, mesh, by_vocabulary) for leaf in whole.head_leaves)
    placed = jax.tree.map(lambda leaf, spec: _place(leaf, mesh, spec), caches, cache_specs)
    return ModelParts(forward, head, leaves, head_leaves, whole.names), placed


def _spec(names: tuple[str, ...], num_axes: int) -> PartitionSpec:
    axis = sharding.split_axis(names)
    return WHOLE if axis is None else PartitionSpec(*[sharding.AXIS if i == axis else None for i in range(num_axes)])


def _split_spec(whole: jax.ShapeDtypeStruct, shard: jax.ShapeDtypeStruct) -> PartitionSpec:
    """Split along the axis on which the shapes differ: a cache's layout is its backend's own."""
    return PartitionSpec(*[None if a == b else sharding.AXIS for a, b in zip(whole.shape, shard.shape, strict=True)])


def _place(leaf: Any, mesh: Mesh, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))


def _placed(job: Job, mesh: Mesh) -> Job:
    """The job with its other inputs whole on each device."""
    inputs = jax.tree.map(lambda leaf: leaf if leaf.sharding is not None else _place(leaf, mesh, WHOLE), job.inputs)
    return job._replace(inputs=inputs)
