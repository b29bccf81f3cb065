"""Lower tiers' pools: what is kept comes back bit for bit, or the failure shows."""

import errno
import os
import stat

import numpy as np
import pytest

from pagedjax.core.errors import ConfigError
from pagedjax.core.plan import Tier
from pagedjax.runtime import disk, host
from pagedjax.runtime.config import RuntimeConfig
from pagedjax.runtime.disk import DiskPool, SwapFile
from pagedjax.runtime.host import HostPool
from pagedjax.runtime.pools import make_pools

NUM_BLOCKS, BLOCK_BYTES = 5, 1000


def make_block(seed):
    return np.random.default_rng(seed).integers(0, 256, BLOCK_BYTES, np.uint8)


def make_disk(folder, file=None):
    return DiskPool(file or SwapFile(folder, NUM_BLOCKS * BLOCK_BYTES), NUM_BLOCKS, BLOCK_BYTES)


def read(pool, block_id):
    out = np.empty(BLOCK_BYTES, np.uint8)
    pool.read(block_id, out)
    return out


class FaultyFile:
    """Bytes in memory; every so-many-th operation goes wrong, or a byte flips under way."""

    def __init__(self, *, write_error=None, read_error=None, flip=False):
        self.values = np.zeros(NUM_BLOCKS * BLOCK_BYTES, np.uint8)
        self.write_error, self.read_error, self.flip = write_error, read_error, flip

    def write(self, offset, values):
        if self.write_error:
            raise OSError(self.write_error, os.strerror(self.write_error))
        self.values[offset : offset + len(values)] = values

    def read(self, offset, out):
        if self.read_error:
            raise OSError(self.read_error, os.strerror(self.read_error))
        out[:] = self.values[offset : offset + len(out)]
        out[7] ^= self.flip


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_blocks_come_back_bit_for_bit_in_any_order(tier, tmp_path):
    pool = HostPool(NUM_BLOCKS, BLOCK_BYTES) if tier == "host" else make_disk(tmp_path)
    for block_id in (3, 0, 4, 3):
        pool.write(block_id, make_block(block_id))
    for block_id in (0, 4, 3):
        np.testing.assert_array_equal(read(pool, block_id), make_block(block_id))


def test_a_swap_file_has_no_name_is_private_and_has_all_its_bytes(tmp_path):
    file = SwapFile(tmp_path, 300_000)
    status = os.fstat(file.fileno())
    assert (status.st_nlink, stat.S_IMODE(status.st_mode), status.st_size) == (0, 0o600, 300_000)
    assert status.st_blocks * 512 >= 300_000
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_nameless_files_gets_one_that_loses_its_name(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "O_TMPFILE")
    file = SwapFile(tmp_path, 100)
    status = os.fstat(file.fileno())
    assert (status.st_nlink, stat.S_IMODE(status.st_mode)) == (0, 0o600)
    assert list(tmp_path.iterdir()) == []


def test_a_closed_swap_file_gives_its_descriptor_back(tmp_path):
    file = SwapFile(tmp_path, 100)
    fd = file.fileno()
    file.close()
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_block_that_was_never_written_is_no_block(tmp_path):
    with pytest.raises(OSError, match="block 2"):
        read(make_disk(tmp_path), 2)


def test_a_flipped_bit_is_found():
    pool = make_disk(None, FaultyFile(flip=True))
    pool.write(1, make_block(1))
    with pytest.raises(OSError, match=r"block 1 .* does not read back"):
        read(pool, 1)


def test_a_write_that_fails_loses_what_was_there_before():
    file = FaultyFile()
    pool = make_disk(None, file)
    pool.write(1, make_block(1))
    file.write_error = errno.ENOSPC
    with pytest.raises(OSError, match="No space"):
        pool.write(1, make_block(2))
    with pytest.raises(OSError, match="block 1"):
        read(pool, 1)


def test_a_file_that_ends_early_is_an_error(tmp_path):
    file = SwapFile(tmp_path, NUM_BLOCKS * BLOCK_BYTES)
    pool = make_disk(tmp_path, file)
    pool.write(4, make_block(4))
    os.ftruncate(file.fileno(), 4 * BLOCK_BYTES + 10)
    with pytest.raises(OSError, match="ends early"):
        read(pool, 4)


def test_short_writes_and_reads_go_on_where_they_stopped(tmp_path, monkeypatch):
    pool = make_disk(tmp_path)
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, values, offset: pwrite(fd, values[:300], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, outs, offset: preadv(fd, [outs[0][:300]], offset))
    pool.write(2, make_block(2))
    np.testing.assert_array_equal(read(pool, 2), make_block(2))


def test_a_disk_too_full_to_reserve_the_space_names_the_flags(tmp_path, monkeypatch):
    def full(fd, offset, num_bytes):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"1 GiB .* No space left .*--swap-space-disk .*--swap-dir"):
        SwapFile(tmp_path, disk.GIB)


def test_a_folder_that_is_not_there_names_the_flag(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere: No such file .*--swap-dir"):
        SwapFile(tmp_path / "nowhere", 100)


def test_more_host_memory_than_is_free_is_refused_with_the_numbers(monkeypatch):
    monkeypatch.setattr(host, "free_host_bytes", lambda: 2**30)
    with pytest.raises(ConfigError, match=r"1\.5 GiB .* 1 GiB .*--swap-space"):
        HostPool(3, 2**29)


def test_a_limit_of_the_process_is_refused_too(monkeypatch):
    monkeypatch.setattr(host, "free_host_bytes", lambda: 2**62)
    with pytest.raises(ConfigError, match=r"cannot be reserved.*--swap-space"):
        HostPool(2**30, 2**30)


def test_tiers_that_are_asked_for_get_as_many_blocks_as_fit(tmp_path):
    folder = tmp_path / "made" / "on demand"
    runtime = RuntimeConfig(swap_space=0.001, swap_space_disk=0.002, swap_dir=str(folder))
    pools = make_pools(runtime, BLOCK_BYTES)
    assert {tier: pool.num_blocks for tier, pool in pools.items()} == {Tier.HOST: 1073, Tier.DISK: 2147}
    assert list(folder.iterdir()) == []
    assert make_pools(RuntimeConfig(), BLOCK_BYTES) == {}


@pytest.mark.parametrize(
    ("fields", "flag"),
    [({"swap_space": 1e-7}, "--swap-space"), ({"swap_space_disk": 1e-7, "swap_dir": "."}, "--swap-space-disk")],
)
def test_space_that_holds_no_block_is_refused(fields, flag):
    with pytest.raises(ConfigError, match=f"hold no block of 1000 bytes; raise {flag}$"):
        make_pools(RuntimeConfig(**fields), BLOCK_BYTES)


@pytest.mark.parametrize("name", ["file/swap", "file", "a\0b"], ids=repr)
def test_a_folder_that_cannot_be_made_names_the_flag(tmp_path, name):
    (tmp_path / "file").write_text("")
    runtime = RuntimeConfig(swap_space_disk=0.001, swap_dir=str(tmp_path / name))
    with pytest.raises(ConfigError, match=r"--swap-dir"):
        make_pools(runtime, BLOCK_BYTES)
