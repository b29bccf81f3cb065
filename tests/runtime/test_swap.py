"""Transfers between staging arrays and pools: nothing is lost, doubled or left behind, whatever fails."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.core.errors import SchedulerError
from pagedjax.core.plan import Tier
from pagedjax.runtime.host import HostPool
from pagedjax.runtime.swap import Piece, Transfers, copy_sizes, split_sizes

NUM_BLOCKS, WORDS, SIZES = 8, 6, (1, 4)
ROW = jax.ShapeDtypeStruct((1, WORDS), jnp.uint16)
LONG_S = 30.0


class Gate:
    """A pool that holds up every read and write until it is opened, and may then fail."""

    def __init__(self):
        self.inner, self.is_open, self.error = HostPool(NUM_BLOCKS, 2 * WORDS), threading.Event(), None

    def write(self, block_id, block):
        self._pass()
        self.inner.write(block_id, block)

    def read(self, block_id, out):
        self._pass()
        self.inner.read(block_id, out)

    def _pass(self):
        assert self.is_open.wait(LONG_S)
        if self.error is not None:
            raise self.error


@pytest.fixture
def gate():
    return Gate()


@pytest.fixture
def transfers(gate):
    found = Transfers(
        {Tier.HOST: HostPool(NUM_BLOCKS, 2 * WORDS), Tier.DISK: gate}, ROW, SIZES, max_staging_bytes=20 * 2 * WORDS
    )
    yield found
    gate.is_open.set()
    found.close()


def staged(*values):
    """Pieces whose blocks are filled with these values."""
    pieces, left = [], list(values)
    for size, num_blocks in split_sizes(len(values), SIZES):
        rows = np.zeros((size, WORDS), np.uint16)
        rows[:num_blocks] = np.array(left[:num_blocks])[:, None]
        pieces.append(Piece(jnp.asarray(rows), num_blocks))
        del left[:num_blocks]
    return pieces


def fetched(transfers, transfer_id):
    """What a finished fetch brought, one value a block."""
    return [
        int(row[0]) for piece in transfers.take(transfer_id) for row in np.asarray(piece.staging)[: piece.num_blocks]
    ]


def ends(transfers, num_transfers=1):
    found = []
    while len(found) < num_transfers:
        some = transfers.poll(LONG_S)
        assert some
        found += some
    return found


def test_blocks_go_out_and_come_back_in_the_order_asked_for(transfers):
    transfers.swap_out(1, Tier.HOST, staged(10, 11, 12, 13, 14), (7, 0, 3, 5, 2))
    (out,) = ends(transfers)
    assert (out.transfer_id, out.ok, out.tier, out.is_fetch, out.num_bytes) == (1, True, Tier.HOST, False, 5 * 12)
    assert out.duration_s > 0
    transfers.fetch(2, Tier.HOST, (2, 5, 7))
    (back,) = ends(transfers)
    assert (back.transfer_id, back.ok, back.is_fetch, back.num_bytes) == (2, True, True, 3 * 12)
    assert fetched(transfers, 2) == [14, 13, 10]


def test_poll_waits_no_longer_than_asked_and_not_at_all_for_nothing(transfers, gate):
    assert transfers.poll(LONG_S) == []
    transfers.fetch(1, Tier.DISK, (0,))
    assert transfers.poll() == transfers.poll(0.01) == []
    assert len(transfers) == 1
    gate.is_open.set()
    assert [end.ok for end in ends(transfers)] == [True]
    assert len(transfers) == 0


def test_a_slow_disk_holds_up_no_other_tier(transfers):
    transfers.fetch(1, Tier.DISK, (0,))
    transfers.fetch(2, Tier.HOST, (0,))
    assert [end.transfer_id for end in ends(transfers)] == [2]


@pytest.mark.parametrize("is_fetch", [True, False])
@pytest.mark.parametrize("error", [OSError("the disk fell over"), MemoryError()])
def test_a_transfer_that_fails_says_so_and_the_next_one_goes_on(transfers, gate, error, is_fetch):
    gate.error = error
    gate.is_open.set()
    if is_fetch:
        transfers.fetch(1, Tier.DISK, (0, 1))
    else:
        transfers.swap_out(1, Tier.DISK, staged(1, 2), (0, 1))
    (end,) = ends(transfers)
    assert not end.ok and type(error).__name__ in end.error
    assert transfers.staging_bytes == 0
    gate.error = None
    transfers.swap_out(2, Tier.DISK, staged(3), (0,))
    transfers.fetch(3, Tier.DISK, (0,))
    assert [end.ok for end in ends(transfers, 2)] == [True, True]
    assert fetched(transfers, 3) == [3]


def test_a_gather_that_the_device_failed_fails_its_transfer(transfers):
    lost = jnp.zeros((1, WORDS), jnp.uint16)
    lost.delete()
    transfers.swap_out(1, Tier.HOST, [Piece(lost, 1)], (0,))
    assert [end.ok for end in ends(transfers)] == [False]


def test_staging_is_counted_until_it_is_taken_or_discarded(transfers, gate):
    transfers.swap_out(1, Tier.DISK, staged(1, 2, 3), (0, 1, 2))
    assert transfers.staging_bytes == 4 * 12  # padding too
    gate.is_open.set()
    ends(transfers)
    assert transfers.staging_bytes == 0
    for transfer_id in (2, 3):
        transfers.fetch(transfer_id, Tier.DISK, (0,))
    ends(transfers, 2)
    assert transfers.staging_bytes == 2 * 12
    transfers.discard(2)
    assert fetched(transfers, 3) == [1]
    assert transfers.staging_bytes == 0


def test_a_fetch_without_room_for_its_staging_waits_for_its_turn(transfers, gate):
    gate.is_open.set()
    transfers.fetch(1, Tier.HOST, tuple(range(8)))
    transfers.fetch(2, Tier.HOST, (0, 1, 2))
    transfers.fetch(3, Tier.DISK, (0,))
    assert [end.transfer_id for end in ends(transfers)] == [1]
    assert transfers.poll(0.05) == []
    assert transfers.staging_bytes == 8 * 12
    transfers.discard(1)
    # One tier may be faster than the other.
    assert sorted((end.transfer_id, end.ok) for end in ends(transfers, 2)) == [(2, True), (3, True)]


def test_a_fetch_that_never_fits_runs_alone(transfers):
    transfers.fetch(1, Tier.HOST, tuple(i % NUM_BLOCKS for i in range(16)))
    transfers.fetch(2, Tier.HOST, (0,))
    assert [(end.transfer_id, end.ok) for end in ends(transfers)] == [(1, True)]
    assert len(fetched(transfers, 1)) == 16
    assert [end.transfer_id for end in ends(transfers)] == [2]


def test_a_failed_fetch_lets_the_next_one_start(transfers, gate):
    gate.error = OSError("the disk fell over")
    gate.is_open.set()
    transfers.fetch(1, Tier.DISK, tuple(range(8)))
    transfers.fetch(2, Tier.HOST, tuple(range(8)))
    assert [(end.transfer_id, end.ok) for end in ends(transfers, 2)] == [(1, False), (2, True)]


def test_room_for_swap_outs_is_their_own(transfers):
    transfers.fetch(1, Tier.DISK, tuple(range(8)))
    assert transfers.has_room(8)
    transfers.swap_out(2, Tier.DISK, staged(*range(8)), tuple(range(8)))
    assert transfers.has_room(2) and not transfers.has_room(3)
    transfers.fail_swap_out(3, Tier.HOST, "no room for staging")
    (end,) = ends(transfers)
    assert (end.transfer_id, end.ok, end.error) == (3, False, "no room for staging")


def test_what_is_no_finished_fetch_cannot_be_taken(transfers):
    transfers.fetch(1, Tier.DISK, (0,))
    for transfer_id in (1, 2):
        with pytest.raises(SchedulerError, match=f"transfer {transfer_id} is no finished fetch"):
            transfers.take(transfer_id)
    with pytest.raises(SchedulerError, match="transfer 1 is under way"):
        transfers.fetch(1, Tier.HOST, (0,))


@pytest.mark.parametrize("sizes", [(1, 4, 16, 64, 256), (1, 4, 16), (1,)])
def test_pieces_hold_every_block_once_and_waste_less_than_half(sizes):
    for num_blocks in range(600):
        pieces = split_sizes(num_blocks, sizes)
        assert sum(used for _, used in pieces) == num_blocks
        assert all(size in sizes and size < 2 * used <= 2 * size for size, used in pieces)


def test_sizes_stop_where_an_array_would_be_mapped_anew_each_time_and_at_the_devices_blocks():
    assert copy_sizes(1000, 2000) == (1, 4, 16, 64, 256)
    assert copy_sizes(1000, 63) == (1, 4, 16)
    assert copy_sizes(737_280, 2000) == (1, 4, 16)
    assert copy_sizes(2**30, 2000) == (1,)
