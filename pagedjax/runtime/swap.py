"""Transfers of KV blocks between the device and lower tiers.

Only staging arrays travel: the runner gathers blocks of the cache into some (in the device's order, so that the blocks
are free for any step enqueued later) and scatters others into the cache. Here one worker thread a tier moves their
bytes to and from the tier's pool, so a slow disk holds up nobody else. The engine's thread never waits but in `poll`.
"""

import math
import queue
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from pagedjax.core.config import SchedulerConfig, num_blocks_for
from pagedjax.core.errors import SchedulerError
from pagedjax.core.plan import Tier
from pagedjax.runtime.pinned import PinnedPool
from pallas_kernels.aligned import aligned_bytes

COPY_SIZES = (1, 4, 16, 64, 256)
# On a host, beyond it the C library maps and clears fresh memory for every array: 64 blocks of 737 KB took 27 ms, 32
# took 3. A GPU copies large arrays at the speed of its link.
_MAX_HOST_ARRAY_BYTES = 32 * 2**20 - 4096
_MAX_DEVICE_ARRAY_BYTES = 256 * 2**20
_LEAST_STAGING_BYTES = 64 * 2**20


class Pool(Protocol):
    """A lower tier's blocks, [block_bytes] uint8. Both raise OSError for one that cannot be kept or was not."""

    @property
    def num_blocks(self) -> int: ...

    def write(self, block_id: int, block: np.ndarray) -> None: ...

    def read(self, block_id: int, out: np.ndarray) -> None: ...


# PinnedPool takes and gives staging arrays instead.
AnyPool = Pool | PinnedPool


class Piece(NamedTuple):
    """A staging array [size, words] on the device, of whose rows the first `num_blocks` are real."""

    staging: jax.Array
    num_blocks: int


class Completion(NamedTuple):
    """A transfer that ended. `error` says what went wrong, None if nothing did; `duration_s` runs from its start."""

    transfer_id: int
    tier: Tier
    is_fetch: bool
    num_bytes: int
    duration_s: float
    error: str | None

    @property
    def ok(self) -> bool:
        return self.error is None


class _Transfer(NamedTuple):
    """One on its way. `staging_bytes` count padding too."""

    transfer_id: int
    tier: Tier
    is_fetch: bool
    block_ids: tuple[int, ...]
    staging_bytes: int
    started_s: float


def copy_sizes(block_bytes: int, num_blocks: int, platform: str = "cpu") -> tuple[int, ...]:
    """The numbers of blocks for which copy programs are made, where a device of `platform` has `num_blocks`."""
    most_bytes = _MAX_HOST_ARRAY_BYTES if platform == "cpu" else _MAX_DEVICE_ARRAY_BYTES
    most = min(num_blocks, most_bytes // block_bytes)
    return tuple(size for size in COPY_SIZES if size == 1 or size <= most)


def split_sizes(num_blocks: int, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """(size, blocks in it) of the pieces that `num_blocks` blocks are moved in; more than half of each is used."""
    pieces = []
    while num_blocks:
        above = next((size for size in sizes if size >= num_blocks), None)
        size = above if above is not None and 2 * num_blocks > above else max(s for s in sizes if s <= num_blocks)
        pieces.append((size, min(size, num_blocks)))
        num_blocks -= pieces[-1][1]
    return pieces


def max_staging_bytes(scheduler: SchedulerConfig, block_bytes: int) -> int:
    """The most that staging takes, in and out: room for two of the longest sequences each way, and for padding."""
    num_blocks = num_blocks_for(scheduler.max_model_len, scheduler.block_size)
    return 2 * max(4 * num_blocks * block_bytes, _LEAST_STAGING_BYTES)


class Transfers:
    """What is on its way. One thread, the engine's, calls it.

    `row` is the shape [1, words] of one staged block. Each way, at most half of `max_staging_bytes` is staged at once
    (or one transfer): a fetch waits for its turn, and a swap-out, whose blocks are about to be overwritten, fails at
    once. What it would have saved can be computed again.
    """

    def __init__(
        self, pools: Mapping[Tier, AnyPool], row: jax.ShapeDtypeStruct, sizes: Sequence[int], max_staging_bytes: int
    ) -> None:
        self._pools, self._row, self._sizes = pools, row, tuple(sizes)
        self._max_each_way = max_staging_bytes // 2
        self._workers = {tier: ThreadPoolExecutor(1, thread_name_prefix=f"swap-{tier}") for tier in pools}
        self._ended: _Ended = queue.SimpleQueue()
        self._live: dict[int, _Transfer] = {}
        self._delayed: deque[_Transfer] = deque()
        self._fetched: dict[int, list[Piece]] = {}
        self._staged_out = self._staged_in = 0

    def __len__(self) -> int:
        """Transfers whose end has not been polled."""
        return len(self._live)

    @property
    def staging_bytes(self) -> int:
        """Bytes of the staging arrays that are on their way or wait to be taken."""
        return self._staged_out + self._staged_in

    def has_room(self, num_blocks: int) -> bool:
        """Whether so many blocks may be swapped out now."""
        return self._fits(self._staged_out, self._staged(num_blocks))

    def swap_out(self, transfer_id: int, tier: Tier, pieces: list[Piece], block_ids: tuple[int, ...]) -> None:
        """Bring gathered blocks, in order, to blocks `block_ids` of a tier."""
        transfer = self._begin(transfer_id, tier, False, block_ids)
        self._staged_out += transfer.staging_bytes
        self._workers[tier].submit(_write, transfer, pieces, self._pools[tier], self._ended)

    def fail_swap_out(self, transfer_id: int, tier: Tier, error: str) -> None:
        """End one whose blocks could not be gathered."""
        self._ended.put((self._begin(transfer_id, tier, False, ()), [], error))

    def fetch(self, transfer_id: int, tier: Tier, block_ids: tuple[int, ...]) -> None:
        """Bring blocks of a tier to staging arrays, where they stay until `take` or `discard`."""
        self._delayed.append(self._begin(transfer_id, tier, True, block_ids))
        self._start_fetches()

    def poll(self, timeout_s: float = 0.0) -> list[Completion]:
        """The transfers that have ended since the last call. While there is none but some are on their way, waits for
        one, at most `timeout_s`."""
        found = []
        deadline = time.perf_counter() + timeout_s
        while self._live:
            left_s = 0.0 if found else max(deadline - time.perf_counter(), 0.0)
            try:
                ended = self._ended.get(block=left_s > 0, timeout=left_s or None)
            except queue.Empty:
                break
            found.append(self._end(*ended))
        return found

    def take(self, transfer_id: int) -> list[Piece]:
        """The staging arrays of a finished fetch, which are the caller's now."""
        pieces = self._fetched.pop(transfer_id, None)
        if pieces is None:
            raise SchedulerError(f"transfer {transfer_id} is no finished fetch")
        self._staged_in -= sum(piece.staging.nbytes for piece in pieces)
        self._start_fetches()
        return pieces

    def discard(self, transfer_id: int) -> None:
        """Free the staging of a finished fetch that nobody wants any more."""
        self.take(transfer_id)

    def close(self) -> None:
        """Wait for the transfers that have begun; the others never end."""
        for worker in self._workers.values():
            worker.shutdown(cancel_futures=True)

    def _begin(self, transfer_id: int, tier: Tier, is_fetch: bool, block_ids: tuple[int, ...]) -> _Transfer:
        if transfer_id in self._live or transfer_id in self._fetched:
            raise SchedulerError(f"transfer {transfer_id} is under way already")
        if tier not in self._pools:
            raise SchedulerError(f"transfer {transfer_id} asks for the {tier} tier, which is not there")
        staged = self._staged(len(block_ids))
        transfer = _Transfer(transfer_id, tier, is_fetch, block_ids, staged, time.perf_counter())
        self._live[transfer_id] = transfer
        return transfer

    def _start_fetches(self) -> None:
        while self._delayed and self._fits(self._staged_in, self._delayed[0].staging_bytes):
            transfer = self._delayed.popleft()
            self._staged_in += transfer.staging_bytes
            shapes = [(size, self._row.shape[1]) for size, _ in split_sizes(len(transfer.block_ids), self._sizes)]
            pool = self._pools[transfer.tier]
            self._workers[transfer.tier].submit(_read, transfer, shapes, self._row.dtype, pool, self._ended)

    def _end(self, transfer: _Transfer, pieces: list[Piece], error: str | None) -> Completion:
        del self._live[transfer.transfer_id]
        if not transfer.is_fetch:
            self._staged_out -= transfer.staging_bytes
        elif error is None:
            self._fetched[transfer.transfer_id] = pieces
        else:
            self._staged_in -= transfer.staging_bytes
            self._start_fetches()
        num_bytes = len(transfer.block_ids) * self._row_bytes
        duration_s = time.perf_counter() - transfer.started_s
        return Completion(transfer.transfer_id, transfer.tier, transfer.is_fetch, num_bytes, duration_s, error)

    def _fits(self, staged: int, more: int) -> bool:
        return not staged or staged + more <= self._max_each_way

    @property
    def _row_bytes(self) -> int:
        return self._row.size * self._row.dtype.itemsize

    def _staged(self, num_blocks: int) -> int:
        return _staged_blocks(num_blocks, self._sizes) * self._row_bytes


def _staged_blocks(num_blocks: int, sizes: Sequence[int]) -> int:
    return sum(size for size, _ in split_sizes(num_blocks, sizes))


# --- in the workers' threads ------------------------------------------------------------------------------------------

_Ended = queue.SimpleQueue[tuple[_Transfer, list[Piece], str | None]]


def _write(transfer: _Transfer, pieces: list[Piece], pool: AnyPool, ended: _Ended) -> None:
    """Staging arrays to a pool."""
    error = None
    try:
        left = transfer.block_ids
        for staging, num_blocks in pieces:
            if isinstance(pool, PinnedPool):
                pool.keep(staging, left[:num_blocks])
            else:
                for row, block_id in zip(np.asarray(staging).view(np.uint8), left[:num_blocks]):
                    pool.write(block_id, row)
            left = left[num_blocks:]
    except Exception as problem:  # the device's, the disk's: any of them means that the copy is not there
        error = _describe(problem)
    ended.put((transfer, [], error))


def _read(transfer: _Transfer, shapes: list[tuple[int, int]], word: Any, pool: AnyPool, ended: _Ended) -> None:
    """Blocks of a pool to fresh staging arrays."""
    pieces: list[Piece] = []
    error = None
    try:
        left = transfer.block_ids
        for shape in shapes:
            mine, left = left[: shape[0]], left[shape[0] :]
            is_pinned = isinstance(pool, PinnedPool)
            staging = pool.bring(mine, shape[0]) if is_pinned else _brought(mine, shape, word, pool)
            pieces.append(Piece(staging, len(mine)))
        jax.block_until_ready([piece.staging for piece in pieces])
    except Exception as problem:
        pieces, error = [], _describe(problem)
    ended.put((transfer, pieces, error))


def _brought(block_ids: tuple[int, ...], shape: tuple[int, int], word: Any, pool: Pool) -> jax.Array:
    # Fresh each time and never written again: a CPU device keeps it as it is.
    values = aligned_bytes(math.prod(shape) * np.dtype(word).itemsize).view(word).reshape(shape)
    for row, block_id in zip(values.view(np.uint8), block_ids):
        pool.read(block_id, row)
    return jax.device_put(values)


def _describe(problem: Exception) -> str:
    return f"{type(problem).__name__}: {problem}"
