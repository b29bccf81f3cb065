"""Every device program, compiled ahead of time from shapes alone; a shape that is not here cannot run."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from pagedjax.core.errors import SchedulerError
from pagedjax.core.request import MAX_LOGIT_BIAS
from pagedjax.models.config import ModelConfig
from pagedjax.runtime import sampler
from pagedjax.runtime.batch import packed_size, split
from pagedjax.runtime.config import Shapes
from pallas_kernels.matmul import Largest, fused_argmax
from pallas_kernels.ragged_attention import Ragged

Progress = Callable[[int, int, str], None]
Leaves = tuple[jax.Array, ...]

_MAX_EMBEDDED_BYTES = 64 * 2**10


class ModelParts(NamedTuple):
    """A model split once: functions of flat leaves, and the leaves that each of them uses.

    `forward(leaves, token_ids, positions, caches, ragged, max_q_len)` gives (hidden [T, H], caches); `max_q_len`, an
    int or None, is the promise of `AttentionBackend`. `head(leaves, hidden [n, H])` gives logits [n, V] in float32;
    `argmax`, of the same leaves, their `Largest` without the logits, where the head's layout has a way to.
    `names` says which module and parameter each of the forward's leaves belongs to.
    """

    forward: Callable[..., Any]
    head: Callable[..., Any]
    forward_leaves: Leaves
    head_leaves: Leaves
    names: tuple[tuple[str, str], ...]
    argmax: Callable[..., Largest] | None = None


def split_model(model: nnx.Module, hidden: jax.ShapeDtypeStruct, *, embeds: bool = False) -> ModelParts:
    """Flatten the model. `hidden` is [n, H].

    Each leaf costs a call host time. So the head gets its own leaves alone, and where the model `embeds`, its short
    vectors (the weights of norms) are constants of the forward's programs, which are then of this model alone: on a CPU
    a step of SmolLM2 is called in 111 us in place of 184.
    """
    graph, state = nnx.split(model)
    every, tree = jax.tree.flatten(state)
    paths = [path for path, value in nnx.to_flat_state(state) for _ in jax.tree.leaves(value)]
    # Parameters that share an array, such as weights that are joined, have one leaf.
    first_paths: dict[int, Any] = {}
    for leaf, path in zip(every, paths, strict=True):
        first_paths.setdefault(id(leaf), path)
    names = tuple((str(path[-2]), str(path[-1])) for path in first_paths.values())
    index_of = {key: index for index, key in enumerate(first_paths)}
    sources = [index_of[id(leaf)] for leaf in every]
    leaves = list({id(leaf): leaf for leaf in every}.values())
    embedded = {index: np.asarray(leaf) for index, leaf in enumerate(leaves) if embeds and _is_short_vector(leaf)}
    given = [index for index in range(len(leaves)) if index not in embedded]

    def merged(values: Leaves | Mapping[int, Any]) -> Any:
        return nnx.merge(graph, jax.tree.unflatten(tree, [values[source] for source in sources]))

    def head(values: Leaves, hidden: jax.Array) -> jax.Array:
        return merged(values).logits(hidden)

    def argmax(values: Leaves, hidden: jax.Array) -> Largest:
        return fused(hidden, merged(values).head_weight)

    def forward(values: Leaves, *inputs: Any, **options: Any) -> Any:
        constants = {index: jnp.asarray(value) for index, value in embedded.items()}
        return merged(constants | dict(zip(given, values, strict=True)))(*inputs, **options)

    used = _used_leaves(head, leaves, hidden)

    def of_used(function: Callable[..., Any], values: Leaves, hidden: jax.Array) -> Any:
        # Leaves that the head does not read stay what they are: their values never enter the program.
        everything = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        for index, value in zip(used, values):
            everything[index] = value
        return function(tuple(everything), hidden)

    fused = fused_argmax(model.head_weight)
    return ModelParts(
        forward,
        partial(of_used, head),
        tuple(leaves[index] for index in given),
        tuple(leaves[index] for index in used),
        tuple(names[index] for index in given),
        partial(of_used, argmax) if fused else None,
    )


def _used_leaves(head: Callable[..., Any], leaves: list[jax.Array], hidden: jax.ShapeDtypeStruct) -> list[int]:
    jaxpr = jax.make_jaxpr(head)(tuple(leaves), hidden).jaxpr
    read = {id(variable) for equation in jaxpr.eqns for variable in equation.invars}
    return [index for index in range(len(leaves)) if id(jaxpr.invars[index]) in read]


def _is_short_vector(leaf: jax.Array) -> bool:
    return leaf.ndim == 1 and leaf.nbytes <= _MAX_EMBEDDED_BYTES and jnp.issubdtype(leaf.dtype, jnp.floating)


class Job(NamedTuple):
    """A program to compile: what it is, its size, the jitted function, the shapes of its inputs."""

    name: str
    size: int
    jitted: Any
    inputs: tuple[Any, ...]


class Programs:
    """Compiled programs by (name, size)."""

    def __init__(self) -> None:
        self._compiled: dict[tuple[str, int], Callable[..., Any]] = {}

    def __len__(self) -> int:
        return len(self._compiled)

    def __getitem__(self, key: tuple[str, int]) -> Callable[..., Any]:
        try:
            return self._compiled[key]
        except KeyError:
            raise SchedulerError(f"program {key[0]} of size {key[1]} is not warmed up; call warm_up first") from None

    def sizes(self, name: str) -> list[int]:
        return sorted(size for kind, size in self._compiled if kind == name)

    def compile(
        self,
        jobs: list[Job],
        num_threads: int,
        progress: Progress | None = None,
        *,
        options: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Compile what is not yet compiled. `progress(done, total, label)` is called in this thread; `options` are
        XLA's."""
        jobs = [job for job in jobs if (job.name, job.size) not in self._compiled]
        with ThreadPoolExecutor(num_threads) as pool:
            waiting = {pool.submit(compile_job, job, options): job for job in jobs}
            try:
                for done, future in enumerate(as_completed(waiting), 1):
                    job = waiting[future]
                    self._compiled[job.name, job.size] = future.result()
                    if progress is not None:
                        progress(done, len(jobs), f"{job.name} {job.size}")
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def compile_job(job: Job, options: Mapping[str, str]) -> Any:
    """The program, ready to be called and to be asked for its memory."""
    return job.jitted.lower(*job.inputs).compile(compiler_options=dict(options) or None)


def jobs(
    parts: ModelParts,
    shapes: Shapes,
    caches: Any,
    num_slots: int,
    config: ModelConfig,
    dtype: Any,
    *,
    decodes: bool = False,
) -> list[Job]:
    """Everything that can be hit at run time, the longest first. `dtype` is that of hidden states. `parts` and `caches`
    may hold arrays or shapes. With `decodes`, steps whose rows have one token each have programs of their own."""
    sizes = _Sizes(shapes, num_slots, config.vocab_size, config.hidden_size, dtype)
    steps = list(_step_jobs(parts, caches, sizes, "step", shapes.token_sizes, None))
    if decodes:
        steps += _step_jobs(parts, caches, sizes, "decode", shapes.decode_sizes, 1)
    return [*steps, *_row_jobs(parts, sizes), *_small_jobs(sizes)]


class _Sizes(NamedTuple):
    """The shapes of what programs pass on."""

    shapes: Shapes
    num_slots: int
    vocab: int
    width: int
    dtype: Any

    def hidden(self, rows: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, self.width), self.dtype)

    @property
    def last_ids(self) -> jax.ShapeDtypeStruct:
        return _ints(self.num_slots + 1)

    @property
    def penalties(self) -> jax.ShapeDtypeStruct:
        return _ints(self.num_slots + 1, self.vocab)


def _step_jobs(
    parts: ModelParts, caches: Any, sizes: _Sizes, name: str, token_sizes: tuple[int, ...], max_q_len: int | None
) -> Iterator[Job]:
    leaves, caches = jax.tree.map(shape_of, (parts.forward_leaves, caches))
    for size in reversed(token_sizes):
        step = partial(_step, parts, sizes.shapes, size, max_q_len)
        step = _jitted(f"{name}_{size}", step, donate=1, places=places_beside(caches, 2))
        yield Job(name, size, step, (leaves, caches, sizes.last_ids, _ints(packed_size(sizes.shapes, size))))


def _row_jobs(parts: ModelParts, sizes: _Sizes) -> Iterator[Job]:
    num_picked, last_ids = sizes.shapes.num_picked, sizes.last_ids
    leaves, uniform = jax.tree.map(shape_of, parts.head_leaves), _floats(num_picked)
    for size in reversed(sizes.shapes.row_sizes):
        logits, fields = _floats(size, sizes.vocab), _ints(size, sampler.NUM_FIELDS)
        bias = _ints(size, MAX_LOGIT_BIAS), _floats(size, MAX_LOGIT_BIAS)
        head = _jitted(f"head_{size}", partial(_head, parts, size))
        yield Job("sample", size, jax.jit(sampler.sample), (logits, last_ids, fields, uniform))
        yield Job("greedy", size, jax.jit(sampler.greedy), (logits, last_ids, fields))
        if parts.argmax is not None:
            argmax = _jitted(f"argmax_{size}", partial(_argmax, parts.argmax, size))
            yield Job("argmax", size, argmax, (leaves, sizes.hidden(num_picked), last_ids, fields))
        yield Job("score", size, jax.jit(sampler.score), (logits, _ints(size)))
        yield Job("adjust", size, jax.jit(sampler.adjust), (logits, sizes.penalties, fields, *bias))
        words = _ints(size, sampler.num_mask_words(sizes.vocab))
        yield Job("restrict", size, jax.jit(sampler.restrict), (logits, words))
        yield Job("head", size, head, (leaves, sizes.hidden(num_picked)))


def _small_jobs(sizes: _Sizes) -> Iterator[Job]:
    num_picked, state = sizes.shapes.num_picked, sizes.penalties
    for size in sizes.shapes.token_sizes:
        yield Job("pick", size, jax.jit(_pick), (sizes.hidden(size), _ints(num_picked)))
        add = _jitted(f"add_rows_{size}", partial(_add_rows, sizes.shapes.num_rows(size)))
        yield Job("add_rows", size, add, (sizes.hidden(size), _ints(size)))
    count = jax.jit(sampler.count_sampled, donate_argnums=0)
    yield Job("uniforms", num_picked, jax.jit(sampler.uniforms), (_ints(num_picked, sampler.NUM_FIELDS),))
    yield Job("count", num_picked, count, (state, sizes.last_ids, _ints(num_picked)))
    yield Job("write", 1, jax.jit(sampler.write_state, donate_argnums=0), (state, _ints(), _ints(sizes.vocab)))


def _step(
    parts: ModelParts,
    shapes: Shapes,
    num_tokens: int,
    max_q_len: int | None,
    leaves: Leaves,
    caches: Any,
    last_ids: jax.Array,
    packed: jax.Array,
) -> tuple[jax.Array, jax.Array, Any]:
    """(hidden [T, H], hidden of the picked tokens [P, H], caches) of a packed batch."""
    inputs = split(packed, shapes, num_tokens)
    sampled = last_ids[jnp.maximum(-1 - inputs.token_ids, 0)]
    token_ids = jnp.where(inputs.token_ids < 0, sampled, inputs.token_ids)
    ragged = Ragged(inputs.block_tables, inputs.q_starts, inputs.kv_lens, inputs.slots, inputs.num_decode_rows[0])
    hidden, caches = parts.forward(leaves, token_ids, inputs.positions, caches, ragged, max_q_len)
    return hidden, hidden[inputs.picked], caches


def _head(parts: ModelParts, size: int, leaves: Leaves, picked: jax.Array) -> jax.Array:
    return parts.head(leaves, picked[:size])


def _argmax(
    argmax: Callable[..., Largest],
    size: int,
    leaves: Leaves,
    picked: jax.Array,
    last_ids: jax.Array,
    fields: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """What `sampler.greedy` gives of the head's logits."""
    return sampler.keep(argmax(leaves, picked[:size]), last_ids, fields)


def _pick(hidden: jax.Array, index: jax.Array) -> jax.Array:
    return hidden[index]


def _add_rows(num_rows: int, hidden: jax.Array, rows: jax.Array) -> jax.Array:
    """The sum [num_rows, H] of each row's hidden states [T, H], float32. `rows` [T] past the last count nowhere."""
    return jnp.zeros((num_rows, hidden.shape[1]), jnp.float32).at[rows].add(hidden.astype(jnp.float32), mode="drop")


def _jitted(name: str, function: Any, donate: int | None = None, places: Any = None) -> Any:
    # Profiles and compile logs show the name.
    function.__name__ = name
    return jax.jit(function, donate_argnums=donate, out_shardings=places)


def places_beside(caches: Any, num_others: int) -> Any:
    """The places of a program's outputs, where the last one is like `caches` and the others are whole; None on a single
    device. Were they left to the compiler, donated caches could go to any outputs of as many bytes, and be copied."""
    first = jax.tree.leaves(caches)[0].sharding
    if not isinstance(first, NamedSharding):
        return None
    whole = NamedSharding(first.mesh, PartitionSpec())
    return (*(whole,) * num_others, jax.tree.map(lambda leaf: leaf.sharding, caches))


def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """A leaf's shape; only what is split over several devices has a place that matters."""
    sharding = getattr(leaf, "sharding", None)
    place = sharding if isinstance(sharding, NamedSharding) else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)
