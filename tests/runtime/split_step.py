"""Steps of a tiny model on one device and split over two; prints the largest difference. Run apart: JAX must be told of
a second CPU device before it starts."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from pagedjax.core.config import SchedulerConfig
from pagedjax.models import sharding
from pagedjax.runtime import abstract, batch
from pagedjax.runtime.config import shapes_for
from pallas_kernels.ragged_attention import reference
from tests.runtime.tiny import CONFIG

SCHEDULER = SchedulerConfig(block_size=4, num_blocks=16, max_num_seqs=4, max_num_batched_tokens=8, max_model_len=16)
MODEL = partial(abstract.jobs, backend=reference.BACKEND, dtype=jnp.float32)


def packed() -> np.ndarray:
    """A chunk of five tokens of one row, and three padding tokens."""
    shapes = shapes_for(SCHEDULER)
    inputs = np.zeros(batch.packed_size(shapes, 8), np.int32)
    parts = batch.split(inputs, shapes, 8)
    parts.token_ids[:5], parts.positions[:5] = [7, 3, 91, 4, 25], range(5)
    parts.slots[:] = -1
    parts.slots[:5] = np.arange(5) + 8
    parts.block_tables[0, :2] = [2, 3]
    parts.q_starts[1:], parts.kv_lens[0] = 5, 5
    return inputs


def run(config, mesh):
    """[hidden, logits of the last token, caches], whole."""
    jobs = {(job.name, job.size): job for job in MODEL(config, SCHEDULER, mesh=mesh)}
    step, head = jobs["step", 8], jobs["head", 1]
    names = abstract.leaf_names(config, reference.BACKEND, jnp.float32)
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(leaf.shape).astype(np.float32) * 0.3 for leaf in step.inputs[0]]
    heads = tuple(value for value, name in zip(values, names) if name == ("lm_head", "weight"))
    if mesh is not None:
        values = [sharding.arranged(name, value, config, mesh.size) for value, name in zip(values, names)]
    caches, last_ids = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), step.inputs[1:3])
    hidden, _, caches = call(step, tuple(values), caches, last_ids, packed())
    (logits,) = call(head, heads, np.repeat(np.asarray(hidden)[4:5], head.inputs[1].shape[0], 0))
    return [np.asarray(x) for x in (hidden, logits, *jax.tree.leaves(caches))]


def call(job, *inputs):
    """Put the inputs where the job wants them, compile and run it."""
    placed = jax.tree.map(lambda value, leaf: jax.device_put(value, leaf.sharding), inputs, job.inputs)
    out = job.jitted.lower(*job.inputs).compile()(*placed)
    return out if isinstance(out, tuple) else (out,)


if __name__ == "__main__":
    config = dataclasses.replace(CONFIG, vocab_size=302)  # an even number of tokens, to be split too
    one = run(config, None)
    two = run(config, Mesh(np.array(jax.devices()[:2]), (sharding.AXIS,)))
    assert any(np.abs(x).max() > 0.1 for x in one)
    print(max(float(np.abs(a - b).max()) for a, b in zip(one, two, strict=True)))
