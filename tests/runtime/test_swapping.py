"""Blocks from the runner's cache to lower tiers and back: the same bits, the same tokens, in the same memory."""

from functools import cache, partial
from itertools import count

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedjax.core.effects import CopyBlocks, Discard, Fetch, SwapOut
from pagedjax.core.errors import ConfigError, SchedulerError
from pagedjax.core.plan import Row, Scatter, StepPlan, Tier
from pagedjax.runtime import kv_cache
from pagedjax.runtime.disk import DiskPool, SwapFile
from pagedjax.runtime.host import HostPool
from pagedjax.runtime.pinned import PinnedPool
from pallas_kernels.ragged_attention import xla
from tests.runtime.tiny import CONFIG, SCHEDULER, Sequence, make_runner, params, plan_rows, take

NUM_DEVICE_BLOCKS, NUM_LOWER_BLOCKS = SCHEDULER.num_blocks, 40
QUANTISED = ("int8", "float8_e4m3fn")
DTYPES = ("float32", "bfloat16", "float16", *QUANTISED)  # of the cache
LONG_S = 30.0
transfer_ids = count(1)


class Rig:
    """A warm runner with both lower tiers."""

    def __init__(self, dtype, folder, host_pool=HostPool):
        self.block_bytes = kv_cache.block_bytes(CONFIG, xla.BACKEND, SCHEDULER.block_size, jnp.dtype(dtype))
        file = SwapFile(folder, NUM_LOWER_BLOCKS * self.block_bytes)
        self.pools = {
            Tier.HOST: host_pool(NUM_LOWER_BLOCKS, self.block_bytes),
            Tier.DISK: DiskPool(file, NUM_LOWER_BLOCKS, self.block_bytes),
        }
        computing = "float32" if dtype in QUANTISED else dtype
        self.runner = make_runner(dtype=jnp.dtype(computing), cache_dtype=jnp.dtype(dtype), pools=self.pools)
        self.runner.warm_up()

    def swap_out(self, tier, moves):
        transfer_id = next(transfer_ids)
        self.runner.swap_out(SwapOut(transfer_id, tier, tuple(moves)))
        self.wait_for(transfer_id)

    def fetch(self, tier, block_ids):
        transfer_id = next(transfer_ids)
        self.runner.fetch(Fetch(transfer_id, tier, tuple(block_ids)))
        self.wait_for(transfer_id)
        return transfer_id

    def wait_for(self, transfer_id):
        assert [(end.transfer_id, end.ok) for end in self.runner.poll_transfers(LONG_S)] == [(transfer_id, True)]

    def step(self, *scatters, block_id=NUM_DEVICE_BLOCKS - 1):
        """A step of one token in a block of its own."""
        sequence_id = next(transfer_ids) + 10**6
        self.runner.tokens.add(sequence_id, [1, 2], params(), seed=0)
        self.runner.step(StepPlan(0, (Row(sequence_id, 0, 1, (block_id,), False),), scatters))
        self.runner.release(sequence_id)
        self.runner.tokens.drop(sequence_id)


@pytest.fixture(scope="module")
def rig_of(tmp_path_factory):
    """The rig of a dtype, made once."""
    return cache(lambda dtype: Rig(dtype, tmp_path_factory.mktemp("swap")))


@pytest.fixture(params=DTYPES)
def rig(request, rig_of):
    return rig_of(request.param)


@pytest.fixture(scope="module")
def pinned_rig(tmp_path_factory):
    """As on a GPU: the host's blocks lie in pinned memory, of which this platform has a kind too."""
    pinned = partial(PinnedPool, device=jax.devices()[0])
    return Rig("bfloat16", tmp_path_factory.mktemp("swap"), host_pool=pinned)


@pytest.fixture
def plain_rig(rig_of):
    return rig_of("float32")


lower_blocks = st.permutations(range(NUM_LOWER_BLOCKS))
device_blocks = st.permutations(range(NUM_DEVICE_BLOCKS - 1))  # the last one is the step's


@given(st.integers(1, 30), lower_blocks, device_blocks, st.sampled_from(list(Tier)[1:]), st.integers(0, 2**32 - 1))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bits_survive_the_way_through_the_cache(rig, num_blocks, lower, device, tier, seed):
    """Random bytes, so NaN of every kind: lower tier, staging, cache, staging, the other lower tier."""
    other = Tier.DISK if tier is Tier.HOST else Tier.HOST
    values = np.random.default_rng(seed).integers(0, 256, (num_blocks, rig.block_bytes), np.uint8)
    for block_id, block in zip(lower, values):
        rig.pools[tier].write(block_id, block)
    transfer_id = rig.fetch(tier, lower[:num_blocks])
    rig.step(Scatter(transfer_id, tuple(enumerate(device[:num_blocks]))))
    rig.swap_out(other, zip(device[:num_blocks], lower[::-1]))
    found = np.zeros_like(values)
    for block_id, out in zip(lower[::-1], found):
        rig.pools[other].read(block_id, out)
    np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize("num_blocks", [1, 5, 16])
def test_blocks_come_back_from_pinned_memory_whole_in_part_and_in_any_order(pinned_rig, num_blocks):
    values = np.random.default_rng(num_blocks).integers(0, 256, (num_blocks, pinned_rig.block_bytes), np.uint8)
    pinned_rig.runner.reset()
    for block_id, block in enumerate(values):
        pinned_rig.pools[Tier.DISK].write(block_id, block)
    fetched = pinned_rig.fetch(Tier.DISK, range(num_blocks))
    pinned_rig.step(Scatter(fetched, tuple((i, i) for i in range(num_blocks))))
    pinned_rig.swap_out(Tier.HOST, ((i, i) for i in range(num_blocks)))
    for chosen in (range(num_blocks), range(num_blocks)[::-1], range(num_blocks)[1::2] or (0,)):
        pairs = tuple((place, 20 + i) for place, i in enumerate(chosen))
        pinned_rig.step(Scatter(pinned_rig.fetch(Tier.HOST, chosen), pairs))
        found = stored(pinned_rig, [20 + i for i in chosen])
        np.testing.assert_array_equal(found, values[list(chosen)])


def test_only_the_pairs_asked_for_are_scattered(plain_rig):
    marks = [np.full(plain_rig.block_bytes, mark, np.uint8) for mark in range(6)]
    for block_id, mark in enumerate(marks):
        plain_rig.pools[Tier.HOST].write(block_id, mark)
    plain_rig.step(Scatter(plain_rig.fetch(Tier.HOST, range(6)), tuple(enumerate(range(6)))))
    transfer_id = plain_rig.fetch(Tier.HOST, (5, 4, 3))
    plain_rig.step(Scatter(transfer_id, ((2, 0), (0, 1))))
    assert device_marks(plain_rig, 6) == [3, 5, 2, 3, 4, 5]


def test_blocks_are_copied_within_the_cache(plain_rig):
    for block_id in range(4):
        plain_rig.pools[Tier.HOST].write(block_id, np.full(plain_rig.block_bytes, block_id, np.uint8))
    plain_rig.step(Scatter(plain_rig.fetch(Tier.HOST, range(4)), tuple(enumerate(range(4)))))
    plain_rig.runner.copy_blocks(CopyBlocks(((1, 4), (1, 0), (3, 2))))
    assert device_marks(plain_rig, 5) == [1, 1, 3, 3, 1]


def device_marks(rig, num_blocks):
    """The byte that each of the leading device blocks is filled with."""
    found = stored(rig, range(num_blocks))
    assert (found == found[:, :1]).all()
    return found[:, 0].tolist()


def test_a_block_may_be_overwritten_as_soon_as_its_gather_is_enqueued(plain_rig):
    plain_rig.step(block_id=7)
    before, after = np.zeros((2, plain_rig.block_bytes), np.uint8)
    for i in range(20):
        plain_rig.pools[Tier.HOST].write(0, np.full(plain_rig.block_bytes, i, np.uint8))
        plain_rig.step(Scatter(plain_rig.fetch(Tier.HOST, (0,)), ((0, 7),)))
        first = next(transfer_ids)
        plain_rig.runner.swap_out(SwapOut(first, Tier.HOST, ((7, 1),)))
        plain_rig.step(block_id=7)  # writes to it
        plain_rig.wait_for(first)
        plain_rig.swap_out(Tier.HOST, ((7, 2),))
        plain_rig.pools[Tier.HOST].read(1, before)
        plain_rig.pools[Tier.HOST].read(2, after)
        assert (before == i).all() and not (after == i).all()


def test_the_cache_stays_where_it_is_and_staging_goes(rig):
    pointers = rig.runner.cache_pointers()
    for num_blocks in (1, 5, 23):
        moves = [(i, i) for i in range(num_blocks)]
        rig.swap_out(Tier.HOST, moves)
        rig.runner.copy_blocks(CopyBlocks(((0, 30), (1, 31))))
        rig.step(Scatter(rig.fetch(Tier.HOST, range(num_blocks)), tuple(moves)))
        rig.runner.discard(Discard(rig.fetch(Tier.HOST, (0,))))
    assert rig.runner.cache_pointers() == pointers
    assert rig.runner.staging_bytes == 0


def test_nothing_compiles_for_swaps_after_warm_up(plain_rig):
    before = plain_rig.runner.recompiles
    for num_blocks in range(1, 30, 4):
        plain_rig.swap_out(Tier.HOST, ((i, i) for i in range(num_blocks)))
        plain_rig.step(Scatter(plain_rig.fetch(Tier.HOST, range(num_blocks)), tuple((i, i) for i in range(num_blocks))))
        plain_rig.runner.copy_blocks(CopyBlocks(tuple((i, i + 30) for i in range(num_blocks))))
    assert plain_rig.runner.recompiles == before


def test_costs_are_measured_without_a_trace(plain_rig):
    plain_rig.runner.reset()
    plain_rig.step(block_id=0)
    marks, pointers = stored(plain_rig, (0, 1)), plain_rig.runner.cache_pointers()
    costs = plain_rig.runner.measure_costs()
    assert costs.swap_us_per_block >= 1 and costs.recompute_us_per_token >= 1
    np.testing.assert_array_equal(stored(plain_rig, (0, 1)), marks)
    assert plain_rig.runner.cache_pointers() == pointers
    assert plain_rig.runner.staging_bytes == 0


def stored(rig, block_ids):
    """What device blocks hold."""
    rig.swap_out(Tier.DISK, zip(block_ids, block_ids))
    found = np.zeros((len(block_ids), rig.block_bytes), np.uint8)
    for block_id, out in zip(block_ids, found):
        rig.pools[Tier.DISK].read(block_id, out)
    return found


def test_a_tier_that_does_not_work_is_found_out_at_the_start(plain_rig, monkeypatch):
    def broken(block_id, block):
        raise OSError("the disk fell over")

    monkeypatch.setattr(plain_rig.pools[Tier.HOST], "write", broken)
    with pytest.raises(ConfigError, match=r"host tier does not work: OSError: the disk fell over"):
        plain_rig.runner.measure_costs()


def test_a_cache_that_is_lost_leaves_the_lower_tiers(plain_rig):
    mark = np.full(plain_rig.block_bytes, 9, np.uint8)
    plain_rig.pools[Tier.HOST].write(3, mark)
    transfer_id = plain_rig.fetch(Tier.HOST, (3,))
    plain_rig.runner.reset()
    plain_rig.step(Scatter(transfer_id, ((0, 0),)))
    assert device_marks(plain_rig, 1) == [9]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda rig: rig.runner.swap_out(SwapOut(next(transfer_ids), Tier.HOST, ((NUM_DEVICE_BLOCKS, 0),))),
        lambda rig: rig.runner.copy_blocks(CopyBlocks(((0, -1),))),
        lambda rig: rig.step(Scatter(rig.fetch(Tier.HOST, (0,)), ((0, NUM_DEVICE_BLOCKS),))),
        lambda rig: rig.step(Scatter(rig.fetch(Tier.HOST, (0,)), ((1, 0),))),
    ],
)
def test_blocks_that_are_not_there_are_refused(plain_rig, wrong):
    with pytest.raises(SchedulerError, match=r"not all in 0\.\.63|asked for"):
        wrong(plain_rig)
    plain_rig.runner.reset()
    assert plain_rig.runner.staging_bytes == 0


def test_without_pools_there_is_nothing_to_swap_to():
    runner = make_runner()
    with pytest.raises(SchedulerError, match="host tier"):
        runner.fetch(Fetch(1, Tier.HOST, (0,)))


@pytest.mark.parametrize("dtype", QUANTISED)
def test_blocks_of_a_quantised_cache_travel_with_their_scales(rig_of, dtype):
    rig, prompt = rig_of(dtype), [5, 9, 2, 40, 17, 33, 8, 100, 3]
    caches = rig.runner._caches
    assert all(leaf is not None for cache in caches for leaf in cache)
    assert rig.block_bytes == sum(leaf.nbytes for cache in caches for leaf in cache) // NUM_DEVICE_BLOCKS
    expected = run(rig, prompt, {"temperature": 0}, swap_to=None)
    assert run(rig, prompt, {"temperature": 0}, swap_to=Tier.HOST) == expected


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
@pytest.mark.parametrize("wish", [{"temperature": 0}, {"temperature": 1.5, "seed": 4, "frequency_penalty": 0.7}])
def test_a_sequence_swapped_out_and_into_other_blocks_goes_on_as_if_never_stopped(plain_rig, tier, wish):
    prompt = [5, 9, 2, 40, 17, 33, 8, 100, 3]
    assert run(plain_rig, prompt, wish, swap_to=tier) == run(plain_rig, prompt, wish, swap_to=None)


def run(rig, prompt, wish, swap_to):
    """12 tokens; after each fourth one the blocks move to a lower tier, others are written over, and they return to
    other blocks of the device."""
    runner, sequence = rig.runner, Sequence(prompt, params(max_tokens=12, **wish), seed=4)
    sequence.blocks = tuple(range(8))
    runner.tokens.add(sequence.sequence_id, prompt, sequence.params, seed=4, stop_token_ids=[0])
    scatters = ()
    while rows := plan_rows([sequence], 16):
        take(runner, [sequence], rows, runner.dispatch(StepPlan(0, tuple(rows), scatters)))
        scatters = ()
        if swap_to is not None and len(sequence.done.ids) % 4 == 0:
            held = -(-sequence.num_computed // SCHEDULER.block_size)
            rig.swap_out(swap_to, zip(sequence.blocks, range(held)))
            runner.release(sequence.sequence_id)
            overwrite(rig, sequence.blocks[:held])
            sequence.blocks = tuple(block_id + 8 for block_id in sequence.blocks)
            pairs = tuple(enumerate(sequence.blocks[:held]))
            scatters = (Scatter(rig.fetch(swap_to, range(held)), pairs),)
    runner.release(sequence.sequence_id)
    runner.tokens.drop(sequence.sequence_id)
    return sequence.done.ids


def overwrite(rig, block_ids):
    rig.pools[Tier.HOST].write(NUM_LOWER_BLOCKS - 1, np.full(rig.block_bytes, 255, np.uint8))
    for block_id in block_ids:
        rig.step(Scatter(rig.fetch(Tier.HOST, (NUM_LOWER_BLOCKS - 1,)), ((0, block_id),)))
