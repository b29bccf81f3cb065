"""A tiny Llama, and sequences driven through the runner by hand."""

from itertools import count
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from pagedjax.core.config import SchedulerConfig
from pagedjax.core.plan import Row, StepPlan
from pagedjax.core.request import SamplingParams
from pagedjax.models import llama
from pagedjax.models.config import ModelConfig
from pagedjax.runtime.config import RuntimeConfig
from pagedjax.runtime.runner import Runner
from pallas_kernels.ragged_attention import xla

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=301,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)
SCHEDULER = SchedulerConfig(block_size=4, num_blocks=64, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64)
POISON = 300  # a token whose embedding is not a number
_ids = count(1)


def make_model(dtype=jnp.float32, backend=xla.BACKEND, *, pack=None):
    """`pack`, if given, makes each product's weight of its values [out, in]."""
    rng, values = np.random.default_rng(0), {}
    for _, sources in sorted(llama.parts(CONFIG).items()):
        for name, shape in sources:
            values[name] = rng.standard_normal(shape).astype(np.float32) * (0.4 if len(shape) > 1 else 1.0)
    values["model.embed_tokens.weight"][POISON] = np.nan

    def packed(parts, _):
        return pack(np.concatenate([values[part.name] for part in parts]))

    model = llama.LlamaForCausalLM
    return model.load(
        CONFIG, values.__getitem__, set(values), dtype=dtype, backend=backend, pack=packed if pack else None
    )


def make_runner(*, dtype=jnp.float32, cache_dtype=None, pools=None, backend=xla.BACKEND, pack=None, **options):
    runtime, made = RuntimeConfig(**options), {"backend": backend, "dtype": dtype, "cache_dtype": cache_dtype}
    return Runner(make_model(dtype, backend, pack=pack), CONFIG, SCHEDULER, runtime, pools=pools or {}, **made)


class Done(NamedTuple):
    """What a sequence gave: its sampled ids, their log-probabilities, the prompt's, whether it became faulty."""

    ids: list[int]
    logprobs: list[float]
    prompt_logprobs: dict[int, float]
    faulty: bool


class Sequence:
    """A sequence with blocks of its own."""

    def __init__(self, prompt, params, seed):
        self.sequence_id, self.prompt, self.params, self.seed = next(_ids), list(prompt), params, seed
        self.num_computed, self.blocks = 0, ()
        self.done = Done([], [], {}, False)

    @property
    def max_len(self):
        return len(self.prompt) + self.params.max_tokens


def generate(runner, prompts, params, *, chunk=16, ahead=1, preempt_after=None, seed=0):
    """Run all prompts together, chunk by chunk, `ahead` steps dispatched before the first is collected."""
    every = params if isinstance(params, list) else [params] * len(prompts)
    live = [Sequence(prompt, wish, seed + i) for i, (prompt, wish) in enumerate(zip(prompts, every))]
    for i, sequence in enumerate(live):
        width = SCHEDULER.num_blocks // len(live)
        sequence.blocks = tuple(range(i * width, (i + 1) * width))[: SCHEDULER.max_model_len // SCHEDULER.block_size]
        runner.tokens.add(
            sequence.sequence_id, sequence.prompt, sequence.params, seed=sequence.seed, stop_token_ids=[0]
        )
    flight = []
    for plan_id in count():
        rows = plan_rows(live, chunk)
        if rows:
            flight.append((rows, runner.dispatch(StepPlan(plan_id, tuple(rows)))))
        while flight and (len(flight) > ahead or not rows):
            take(runner, live, *flight.pop(0))
        if preempt_after is not None and plan_id >= preempt_after:
            while flight:
                take(runner, live, *flight.pop(0))
            preempt_after = None
            for sequence in live[::-1]:  # released in another order, so that slots move
                runner.release(sequence.sequence_id)
                sequence.num_computed = 0
        elif not rows and not flight:
            break
    for sequence in live:
        runner.release(sequence.sequence_id)
        runner.tokens.drop(sequence.sequence_id)
    return [sequence.done for sequence in live]


def plan_rows(live, chunk):
    budget, rows = chunk, []
    for sequence in live:
        known = len(sequence.prompt) + len(sequence.done.ids)
        # A decode right behind a step in flight: one token past the known ones.
        end = max(known, sequence.num_computed + 1)
        length = min(end - sequence.num_computed, budget)
        if end >= sequence.max_len or length < 1:
            continue
        budget -= length
        samples = sequence.num_computed + length == end
        rows.append(Row(sequence.sequence_id, sequence.num_computed, length, sequence.blocks, samples))
        sequence.num_computed += length
    return sorted(rows, key=lambda row: row.length > 1)


def take(runner, live, rows, handle):
    result = runner.collect(handle)
    by_id = {sequence.sequence_id: sequence for sequence in live}
    for i, row in enumerate(rows):
        sequence = by_id[row.sequence_id]
        if row.samples and not result.faulty[i]:
            runner.tokens.append(row.sequence_id, result.ids[i])
            sequence.done.ids.append(result.ids[i])
            if sequence.params.logprobs is not None:
                assert result.logprobs.ids[i, 0] == result.ids[i]
                sequence.done.logprobs.append(float(result.logprobs.logprobs[i, 0]))
        elif row.samples:
            runner.tokens.append(row.sequence_id, 0)
            sequence.done.ids.append(-1)
            sequence.done = sequence.done._replace(faulty=True)
        if i in result.prompt_logprobs:
            start, scores = result.prompt_logprobs[i]
            sequence.done.prompt_logprobs.update(enumerate(scores.logprobs[:, 0].tolist(), start))


def params(**wishes):
    return SamplingParams(**{"max_tokens": 8, **wishes})
