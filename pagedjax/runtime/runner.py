"""Run plans on the device: dispatch a step without waiting for the one before, collect its tokens later.

A step is a few programs in the device's order: the forward over the packed batch (the cache is donated and updated in
place), the head on the rows that sample, the sampler, and, only when a row asks, penalties and log-probabilities.
Sampled ids stay on the device in `last_ids`, one a slot, where the next step reads them; the host sees them in
`collect`. Nothing here ever reads the cache: a live view of it would make the next donated step copy it whole. Blocks
that leave it or return do so through staging arrays (`copies`, `swap`).
"""

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from pagedjax.core.config import SchedulerConfig
from pagedjax.core.effects import CopyBlocks, Discard, Fetch, SwapOut
from pagedjax.core.errors import ConfigError
from pagedjax.core.plan import StepPlan, Tier
from pagedjax.models.config import ModelConfig
from pagedjax.models.stack import init_caches
from pagedjax.runtime import batch as batches
from pagedjax.runtime import compiles, copies, kv_cache, programs, sampler, swap
from pagedjax.runtime.batch import DeviceBatch
from pagedjax.runtime.config import RuntimeConfig, shapes_for
from pagedjax.runtime.programs import Programs, Progress
from pagedjax.runtime.results import PooledRow, StepHandle, StepResult, bring
from pagedjax.runtime.slots import SlotTable
from pagedjax.runtime.swap import AnyPool, Completion, Transfers
from pagedjax.runtime.tokens import TokenTable
from pallas_kernels import block_copy
from pallas_kernels.ragged_attention import AttentionBackend

_MEASURED_BLOCKS, _NUM_MEASUREMENTS = 16, 3
_MEASURING_S = 60.0


class Costs(NamedTuple):
    """Microseconds, as SchedulerConfig wants them."""

    swap_us_per_block: int
    recompute_us_per_token: int


class Runner:
    """Owns the device's state: the cache, the last ids and the penalty state. One thread uses it.

    `scheduler.num_blocks` blocks of `cache_dtype` (by default `dtype`) are allocated. `tokens` is the table to which
    the engine adds sequences before their first plan and accepted tokens after each collected step. `pools` are the
    lower tiers, whose blocks have `kv_cache.block_bytes` bytes. Nothing compiles after `warm_up`: what it did not
    prepare is refused with SchedulerError.
    """

    def __init__(
        self,
        model: nnx.Module,
        config: ModelConfig,
        scheduler: SchedulerConfig,
        runtime: RuntimeConfig,
        *,
        backend: AttentionBackend,
        dtype: Any,
        cache_dtype: Any = None,
        pools: Mapping[Tier, AnyPool] = MappingProxyType({}),
    ) -> None:
        if runtime.compilation_cache_dir is not None:
            compiles.use_persistent_cache(runtime.compilation_cache_dir)
        compiles.num_compiles()
        self.tokens = TokenTable()
        self.shapes = shapes_for(scheduler)
        self.programs = Programs()
        self._config, self._scheduler, self._runtime = config, scheduler, runtime
        self._backend, self._dtype, self._cache_dtype = backend, dtype, cache_dtype or dtype
        self._platform = jax.default_backend()
        # A GPU's programs may have been compiled elsewhere, from shapes alone.
        hidden, embeds = jax.ShapeDtypeStruct((1, config.hidden_size), dtype), self._platform == "cpu"
        self._parts = programs.split_model(model, hidden, embeds=embeds)
        # A sequence leaves `State.running` and gives up its slot in one update, before any other is planned.
        self._num_slots = scheduler.max_num_seqs
        self._warm_compiles: int | None = None
        self._copies = block_copy.backend_for(self._platform)
        self.reset()
        row = block_copy.staging_for(self._caches, 1)
        block_bytes = row.size * row.dtype.itemsize
        self._copy_sizes = swap.copy_sizes(block_bytes, scheduler.num_blocks, self._platform)
        most = swap.max_staging_bytes(scheduler, block_bytes)
        self._transfers = Transfers(pools, row, self._copy_sizes, most)
        self._pools = pools

    def reset(self) -> None:
        """Start with an empty cache and free slots, as after a step that failed and took the donated cache with it.
        The token table, the lower tiers and what is on its way to or from them stay."""
        scheduler = self._scheduler
        self._caches: Any = None  # freed before the next is allocated
        self._caches = init_caches(
            self._config,
            self._backend,
            num_blocks=scheduler.num_blocks,
            block_size=scheduler.block_size,
            dtype=self._cache_dtype,
        )
        self._last_ids = jax.device_put(np.zeros(self._num_slots + 1, np.int32))
        self._penalties: jax.Array | None = None
        self._slots = SlotTable(self._num_slots, self.shapes.table_width, scheduler.num_blocks)
        self._biases: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile every program. `progress(done, total, label)` is called after each, in this thread."""
        todo = programs.jobs(
            self._parts,
            self.shapes,
            self._caches,
            self._num_slots,
            self._config,
            self._dtype,
            decodes=self._backend.prefers_decode_programs,
        )
        todo += copies.jobs(self._caches, self._copies, self._copy_sizes, swaps=bool(self._pools))
        runtime = self._runtime
        self.programs.compile(todo, runtime.num_compile_threads, progress, options=runtime.compiler_options)
        self._warm_compiles = compiles.num_compiles()

    def measure_costs(self) -> Costs:
        """What it costs to move a block to or from the nearest lower tier and to compute a token, in a large step.

        To be called between `warm_up` and the first plan: it writes to the tier.
        """
        tier = next(iter(self._pools))
        num_blocks = min(_MEASURED_BLOCKS, self._pools[tier].num_blocks, self._scheduler.num_blocks)
        swap_s = min(self._time_swap(tier, num_blocks) for _ in range(_NUM_MEASUREMENTS)) / (2 * num_blocks)
        size = self.shapes.token_sizes[-1]
        step_s = min(self._time_step(size) for _ in range(_NUM_MEASUREMENTS)) / size
        return Costs(max(round(swap_s * 1e6), 1), max(round(step_s * 1e6), 1))

    @property
    def recompiles(self) -> int:
        """Programs that the process compiled since warm-up; anything but 0 is a bug that costs a request seconds."""
        return 0 if self._warm_compiles is None else compiles.num_compiles() - self._warm_compiles

    @property
    def num_step_programs(self) -> int:
        return len(self.programs.sizes("step")) + len(self.programs.sizes("decode"))

    def cache_pointers(self) -> tuple[int, ...]:
        """Addresses of the cache's buffers. Waits for the steps in flight; for tests and notebooks."""
        return kv_cache.pointers(self._caches)

    def dispatch(self, plan: StepPlan, *, defers_sampling: bool = False) -> StepHandle:
        """Enqueue a step and return at once: its fetched blocks go into the cache, then its rows run. Plans must come
        in order.

        With `defers_sampling` only the forward pass runs; `sample` must follow before the next plan. Raises
        SchedulerError, before anything reaches the device, for a plan that cannot be right.
        """
        fetched = [self._transfers.take(scatter.transfer_id) for scatter in plan.scatters]
        self._take_slots(plan)
        batch = batches.build(plan, self.tokens, self._slots, self.shapes, self._scheduler.block_size)
        kind = "decode" if batch.is_decode and self._backend.prefers_decode_programs else "step"
        forward = self.programs[kind, batch.num_tokens]
        for scatter, pieces in zip(plan.scatters, fetched):
            self._caches = copies.scatter(self.programs, self._caches, pieces, scatter.pairs)
        hidden, picked, self._caches = forward(self._parts.forward_leaves, self._caches, self._last_ids, batch.packed)
        samples = bool(batch.sampling_rows) and not defers_sampling
        ids, scores = self._sample(batch, picked) if samples else (None, None)
        prompt_scores = self._score_prompts(plan, batch, hidden)
        pooled = self._pool(plan, batch, hidden, picked) if self.tokens.pooling_ids else ()
        return StepHandle(plan.plan_id, len(plan.rows), batch, picked, ids, scores, prompt_scores, pooled)

    def sample(self, handle: StepHandle, masks: Mapping[int, np.ndarray]) -> StepHandle:
        """Enqueue the sampling of a step that was dispatched without. `masks` has for those of the plan's rows that may
        not sample every token the bits of those they may, int32 [1, words], lowest first; what it has no bit for is
        forbidden."""
        ids, scores = self._sample(handle.batch, handle.picked, masks)
        return handle._replace(ids=ids, scores=scores)

    def collect(self, handle: StepHandle) -> StepResult:
        """Wait for a step and bring its ids to the host. Raises what the device raised."""
        return bring(handle)

    def step(self, plan: StepPlan) -> StepResult:
        """Dispatch and collect at once, to look at single steps."""
        return self.collect(self.dispatch(plan))

    def release(self, sequence_id: int) -> None:
        """Give up a sequence's slot, once it is preempted or done and no step in flight contains it."""
        slot = self._slots.release(sequence_id)
        if slot is not None:
            self._biases.pop(slot, None)

    def copy_blocks(self, effect: CopyBlocks) -> None:
        """Enqueue copies within the cache, in the device's order."""
        self._caches = copies.copy(self.programs, self._caches, effect.pairs)

    def swap_out(self, effect: SwapOut) -> None:
        """Enqueue a gather of the blocks, which later steps may overwrite, and start their transfer."""
        block_ids, targets = zip(*effect.moves)
        if not self._transfers.has_room(len(block_ids)):
            self._transfers.fail_swap_out(effect.transfer_id, effect.tier, "no room for staging")
            return
        try:
            pieces = copies.gather(self.programs, self._caches, block_ids, self._copy_sizes)
        except jax.errors.JaxRuntimeError as error:  # no memory for staging; the cache is not touched
            self._transfers.fail_swap_out(effect.transfer_id, effect.tier, str(error))
            return
        self._transfers.swap_out(effect.transfer_id, effect.tier, pieces, targets)

    def fetch(self, effect: Fetch) -> None:
        """Start bringing blocks of a lower tier to staging on the device."""
        self._transfers.fetch(effect.transfer_id, effect.tier, effect.block_ids)

    def discard(self, effect: Discard) -> None:
        """Free the staging of a finished fetch."""
        self._transfers.discard(effect.transfer_id)

    def poll_transfers(self, timeout_s: float = 0.0) -> list[Completion]:
        """The transfers that have ended. While none has but some are under way, waits at most `timeout_s` for one."""
        return self._transfers.poll(timeout_s)

    @property
    def staging_bytes(self) -> int:
        """Bytes of blocks under way between the cache and lower tiers."""
        return self._transfers.staging_bytes

    def _time_swap(self, tier: Tier, num_blocks: int) -> float:
        """Seconds for blocks to go out and come back."""
        block_ids = tuple(range(num_blocks))
        pairs = tuple(zip(block_ids, block_ids))
        started = time.perf_counter()
        for effect in (SwapOut(-1, tier, pairs), Fetch(-2, tier, block_ids)):
            (self.swap_out if isinstance(effect, SwapOut) else self.fetch)(effect)
            for ended in self.poll_transfers(_MEASURING_S):
                if ended.error is not None:
                    raise ConfigError(f"the {tier} tier does not work: {ended.error}; set --swap-space or --swap-dir")
        self._caches = copies.scatter(self.programs, self._caches, self._transfers.take(-2), pairs)
        jax.block_until_ready(self._caches)
        return time.perf_counter() - started

    def _time_step(self, size: int) -> float:
        """Seconds for the forward of a step of `size` tokens without context; padding, so that nothing is written."""
        inputs = np.zeros(batches.packed_size(self.shapes, size), np.int32)
        batches.split(inputs, self.shapes, size).slots[:] = -1
        started = time.perf_counter()
        *_, self._caches = self.programs["step", size](self._parts.forward_leaves, self._caches, self._last_ids, inputs)
        jax.block_until_ready(self._caches)
        return time.perf_counter() - started

    def _take_slots(self, plan: StepPlan) -> None:
        sequence_ids = tuple(row.sequence_id for row in plan.rows)
        for sequence_id in self._slots.without_slot(sequence_ids):
            entry = self.tokens.get(sequence_id)
            slot = self._slots.assign(sequence_id, entry)
            if self._slots.is_adjusted[slot]:
                self._write_penalties(sequence_id, slot)
        self._slots.patch_tables(self._slots.slots(sequence_ids), tuple(row.blocks for row in plan.rows))

    def _write_penalties(self, sequence_id: int, slot: int) -> None:
        entry, vocab_size = self.tokens.get(sequence_id), self._config.vocab_size
        if self._penalties is None:
            self._penalties = jax.device_put(np.zeros((self._num_slots + 1, vocab_size), np.int32))
        prompt, output = entry.ids[: entry.prompt_len], entry.ids[entry.prompt_len : entry.length]
        row = sampler.penalty_state(prompt, output, entry.stop_token_ids, vocab_size)
        self._penalties = self.programs["write", 1](self._penalties, np.int32(slot), row)
        if entry.params.logit_bias:
            self._biases[slot] = sampler.bias_entries(entry.params, vocab_size)

    def _sample(
        self, batch: DeviceBatch, picked: jax.Array, masks: Mapping[int, np.ndarray] = MappingProxyType({})
    ) -> tuple[jax.Array, jax.Array | None]:
        size = batch.row_size
        self._slots.note_sampled(batch.sampling_slots, batch.next_positions)
        if self._parts.argmax is not None and not masks and self._slots.wants_more.isdisjoint(batch.sampling_slots):
            inputs = self._parts.head_leaves, picked, self._last_ids, batch.fields[:size]
            ids, self._last_ids = self.programs["argmax", size](*inputs)
            return ids, None
        slots = np.array(batch.sampling_slots)
        logits = self.programs["head", size](self._parts.head_leaves, picked)
        is_adjusted = self._slots.is_adjusted[slots]
        adjusted = self._adjust(logits, batch) if is_adjusted.any() else logits
        if masks:
            adjusted = self.programs["restrict", size](adjusted, self._allowed(batch, masks))
        fields = batch.fields[:size]
        if self._slots.is_random[slots].any():
            uniform = self.programs["uniforms", len(batch.fields)](batch.fields)
            ids, self._last_ids = self.programs["sample", size](adjusted, self._last_ids, fields, uniform)
        else:
            ids, self._last_ids = self.programs["greedy", size](adjusted, self._last_ids, fields)
        if is_adjusted.any():
            self._count(slots[is_adjusted], len(batch.fields))
        scores = self.programs["score", size](logits, ids) if self._slots.wants_logprobs[slots].any() else None
        return ids, scores

    def _allowed(self, batch: DeviceBatch, masks: Mapping[int, np.ndarray]) -> np.ndarray:
        """The bits of all rows that sample: int32 [row_size, words]."""
        allowed = np.full((batch.row_size, sampler.num_mask_words(self._config.vocab_size)), -1, np.int32)
        for row, place in enumerate(batch.sampling_rows):
            if place in masks:
                words = masks[place][0, : allowed.shape[1]]
                allowed[row, : len(words)], allowed[row, len(words) :] = words, 0
        return allowed

    def _adjust(self, logits: jax.Array, batch: DeviceBatch) -> jax.Array:
        ids = np.full((batch.row_size, sampler.MAX_LOGIT_BIAS), self._config.vocab_size, np.int32)
        values = np.zeros(ids.shape, np.float32)
        for row, slot in enumerate(batch.sampling_slots):
            if slot in self._biases:
                ids[row], values[row] = self._biases[slot]
        return self.programs["adjust", batch.row_size](
            logits, self._penalties, batch.fields[: batch.row_size], ids, values
        )

    def _count(self, slots: np.ndarray, size: int) -> None:
        padded = np.full(size, self._num_slots, np.int32)
        padded[: len(slots)] = slots
        self._penalties = self.programs["count", size](self._penalties, self._last_ids, padded)

    def _pool(self, plan: StepPlan, batch: DeviceBatch, hidden: jax.Array, picked: jax.Array) -> tuple[PooledRow, ...]:
        """What the rows give that want hidden states. Tokens that are computed again count once."""
        found, nowhere = [], self.shapes.num_rows(batch.num_tokens)
        row_of_token, start, adding = np.full(batch.num_tokens, nowhere, np.int32), 0, []
        for place, row in enumerate(plan.rows):
            entry = self.tokens.get(row.sequence_id)
            if entry.pooling == "last" and row.samples:
                found.append(PooledRow(place, picked, batch.sampling_rows.index(place)))
            elif entry.pooling == "mean":
                num_known = max(0, entry.num_pooled - row.start)
                row_of_token[start + num_known : start + row.length] = place
                entry.num_pooled = max(entry.num_pooled, row.start + row.length)
                adding.append(place)
            start += row.length
        if adding:
            sums = self.programs["add_rows", batch.num_tokens](hidden, row_of_token)
            found += [PooledRow(place, sums, place) for place in adding]
        return tuple(found)

    def _score_prompts(self, plan: StepPlan, batch: DeviceBatch, hidden: jax.Array) -> tuple[jax.Array, ...]:
        if not batch.prompt_scoring:
            return ()
        sources = np.concatenate([part.sources for part in batch.prompt_scoring])
        targets = np.concatenate([part.targets for part in batch.prompt_scoring])
        for part in batch.prompt_scoring:
            entry = self.tokens.get(plan.rows[part.row].sequence_id)
            entry.num_scored = part.start + len(part.targets)
        size = self.shapes.score_size
        pick, head = self.programs["pick", batch.num_tokens], self.programs["head", size]
        found = []
        for first in range(0, len(sources), size):
            index, ids = np.zeros(self.shapes.num_picked, np.int32), np.zeros(size, np.int32)
            chunk = slice(first, min(first + size, len(sources)))
            index[: chunk.stop - first], ids[: chunk.stop - first] = sources[chunk], targets[chunk]
            logits = head(self._parts.head_leaves, pick(hidden, index))
            found.append(self.programs["score", size](logits, ids))
        return tuple(found)
