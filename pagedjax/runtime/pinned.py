"""KV blocks in the host's pinned memory: one array a staged batch, and a block is a row of one.

Chosen for GPUs by what XLA makes of it: an array that is put into `pinned_host` leaves as one asynchronous copy
(copy-start, copy-done) between the GPU's memory and memory that its DMA engine reaches, and the host computes nothing.
An arena of the process's own, registered with the driver, would need code against CUDA to copy into it; plain memory
goes through a pinned buffer of XLA's and costs a copy by the CPU each way. `scripts/gpu_check` times pinned and plain.

Rows are freed with their batch. What rows nobody needs any more, and padding, take up is given back when the pool
would outgrow its size: the emptiest batches are written anew, by the CPU, without them.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from pagedjax.core.errors import ConfigError
from pagedjax.runtime.kv_cache import GIB, free_host_bytes

MEMORY = "pinned_host"


class _Batch:
    """An array [size, words] in pinned memory, and which block lies in which of its rows."""

    def __init__(self, array: jax.Array, rows: dict[int, int]) -> None:
        self.array, self.rows = array, rows

    @property
    def num_unused(self) -> int:
        return int(self.array.shape[0]) - len(self.rows)


class PinnedPool:
    """A pool of `num_blocks` blocks for staging arrays of one device. Threads may not use it at once.

    Raises ConfigError if that much memory is not free.
    """

    def __init__(self, num_blocks: int, block_bytes: int, device: Any) -> None:
        free = free_host_bytes()
        if num_blocks * block_bytes > free:
            raise ConfigError(
                f"a swap space of {num_blocks * block_bytes / GIB:.3g} GiB takes more than the {free / GIB:.3g} GiB "
                "that are free; lower --swap-space"
            )
        self.num_blocks, self.block_bytes = num_blocks, block_bytes
        self._on_host = SingleDeviceSharding(device, memory_kind=MEMORY)
        self._on_device = SingleDeviceSharding(device, memory_kind=device.default_memory().kind)
        self._batch_of: dict[int, _Batch] = {}

    @property
    def held_bytes(self) -> int:
        """What the pool's arrays take, unused rows too."""
        return sum(batch.array.nbytes for batch in self._batches())

    def keep(self, staging: jax.Array, block_ids: Sequence[int]) -> None:
        """The leading rows of a staging array as these blocks. Waits for the copy."""
        self._add(jax.block_until_ready(jax.device_put(staging, self._on_host)), block_ids)

    def bring(self, block_ids: Sequence[int], size: int) -> jax.Array:
        """A staging array [size, words] on the device whose leading rows are these blocks, not waited for.

        Blocks that came in one array go back as it is; others are put together by the CPU first.
        """
        batch = self._batch_of[block_ids[0]]
        if batch.array.shape[0] == size and [batch.rows.get(i) for i in block_ids] == list(range(len(block_ids))):
            return jax.device_put(batch.array, self._on_device)
        return jax.device_put(self._gathered(block_ids, size), self._on_device)

    def _batches(self) -> list[_Batch]:
        return list({id(batch): batch for batch in self._batch_of.values()}.values())

    def _add(self, array: jax.Array, block_ids: Sequence[int]) -> None:
        self._forget(block_ids)
        batch = _Batch(array, {block_id: row for row, block_id in enumerate(block_ids)})
        self._batch_of.update(dict.fromkeys(block_ids, batch))
        most = self.num_blocks * self.block_bytes
        if self.held_bytes > most:
            self._compact(most)

    def _forget(self, block_ids: Sequence[int]) -> None:
        """Blocks that are about to be written: their rows are of no use any more."""
        for block_id in block_ids:
            old = self._batch_of.pop(block_id, None)
            if old is not None:
                del old.rows[block_id]

    def _compact(self, most_bytes: int) -> None:
        """Write the batches with the most unused rows anew until all take `most_bytes` at most."""
        excess = self.held_bytes - most_bytes
        for batch in sorted(self._batches(), key=lambda one: -one.num_unused):
            if excess <= 0:
                return
            ids, unused = list(batch.rows), batch.num_unused
            array = jax.block_until_ready(jax.device_put(self._gathered(ids, len(ids)), self._on_host))
            fresh = _Batch(array, {block_id: row for row, block_id in enumerate(ids)})
            self._batch_of.update(dict.fromkeys(ids, fresh))
            excess -= unused * self.block_bytes

    def _gathered(self, block_ids: Sequence[int], size: int) -> np.ndarray:
        """[size, words]: rows of any batches in the type of the first, zeros behind them."""
        first = self._batch_of[block_ids[0]].array
        values = np.zeros((size, self.block_bytes // first.dtype.itemsize), first.dtype)
        seen: dict[int, np.ndarray] = {}
        for row, block_id in enumerate(block_ids):
            batch = self._batch_of[block_id]
            if id(batch) not in seen:
                seen[id(batch)] = np.asarray(batch.array)
            values[row].view(np.uint8)[:] = seen[id(batch)][batch.rows[block_id]].view(np.uint8)
        return values
