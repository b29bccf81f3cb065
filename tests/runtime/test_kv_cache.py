"""The cache's size, and the messages about it."""

import os

import jax
import jax.numpy as jnp
import pytest

from pagedjax.core.config import SchedulerConfig
from pagedjax.core.errors import ConfigError
from pagedjax.models.stack import init_caches
from pagedjax.runtime import kv_cache
from pagedjax.runtime.config import RuntimeConfig
from pagedjax.runtime.device_memory import DeviceMemory
from pallas_kernels.block_copy import staging_for
from pallas_kernels.dispatch import CANDIDATES
from pallas_kernels.ragged_attention import xla
from tests.runtime.tiny import CONFIG

SCHEDULER = SchedulerConfig(block_size=16, max_model_len=1024, max_num_seqs=4)
MIB = 2**20


def test_block_bytes_are_what_is_allocated():
    caches = init_caches(CONFIG, xla.BACKEND, num_blocks=10, block_size=16, dtype=jnp.float32)
    allocated = sum(leaf.nbytes for leaf in jax.tree.leaves(caches))
    assert allocated == 10 * kv_cache.block_bytes(CONFIG, xla.BACKEND, 16, jnp.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("backend", [c.backend for c in CANDIDATES["ragged_attention"]], ids=lambda b: b.name)
def test_block_bytes_are_what_is_staged_of_a_block(backend, dtype):
    caches = jax.eval_shape(lambda: init_caches(CONFIG, backend, num_blocks=3, block_size=16, dtype=jnp.dtype(dtype)))
    row = staging_for(caches, 1)
    assert row.size * row.dtype.itemsize == kv_cache.block_bytes(CONFIG, backend, 16, jnp.dtype(dtype))


def test_memory_that_is_asked_for_is_used():
    runtime = RuntimeConfig(kv_cache_memory=0.5)
    assert kv_cache.choose_num_blocks(runtime, SCHEDULER, MIB) == 512


def test_an_automatic_size_stops_at_what_can_be_used(monkeypatch):
    monkeypatch.setattr(kv_cache, "free_host_bytes", lambda: 2**40)
    assert kv_cache.choose_num_blocks(RuntimeConfig(), SCHEDULER, 1024) == 4 * 64


def test_an_automatic_size_leaves_most_of_the_memory(monkeypatch):
    monkeypatch.setattr(kv_cache, "free_host_bytes", lambda: 500 * MIB)
    assert kv_cache.choose_num_blocks(RuntimeConfig(), SCHEDULER, MIB) == 192


def test_an_automatic_size_stays_when_a_little_memory_more_or_less_is_free(monkeypatch):
    found = set()
    for free in range(490, 540, 3):
        monkeypatch.setattr(kv_cache, "free_host_bytes", lambda free=free: free * MIB)
        found.add(kv_cache.choose_num_blocks(RuntimeConfig(), SCHEDULER, MIB))
    assert found == {192}


def test_an_automatic_size_spares_what_else_the_device_must_hold(monkeypatch):
    monkeypatch.setattr(kv_cache, "free_host_bytes", lambda: 500 * MIB)
    assert kv_cache.choose_num_blocks(RuntimeConfig(), SCHEDULER, MIB, spared_bytes=60 * MIB) == 128
    asked = RuntimeConfig(kv_cache_memory=0.5 / 8)
    assert kv_cache.choose_num_blocks(asked, SCHEDULER, MIB, spared_bytes=60 * MIB) == 64


DEVICE = DeviceMemory(limit=1000 * MIB, used=300 * MIB, activations=100 * MIB)


def test_on_an_accelerator_the_cache_gets_what_model_and_activations_leave():
    scheduler = SchedulerConfig(block_size=16, max_model_len=1024, max_num_seqs=64)
    found = kv_cache.choose_num_blocks(RuntimeConfig(), scheduler, MIB, device=DEVICE)
    assert 580 <= found <= 588  # of 600, but for gaps between the allocator's pieces
    spared = kv_cache.choose_num_blocks(RuntimeConfig(), scheduler, MIB, device=DEVICE, spared_bytes=200 * MIB)
    assert 380 <= spared <= 388


def test_an_accelerator_that_is_too_small_is_refused_with_the_account_and_the_flags():
    small = DEVICE._replace(limit=450 * MIB)
    with pytest.raises(ConfigError) as refused:
        kv_cache.choose_num_blocks(RuntimeConfig(), SCHEDULER, MIB, device=small)
    for part in (
        *("0.0625 GiB are needed", "0.0479 GiB are available", "of 0.439 GiB the model takes 0.293 GiB"),
        *("activations 0.0977 GiB", "--gpu-memory-utilization", "--max-model-len", "--max-num-batched-tokens"),
    ):
        assert part in str(refused.value)


def test_a_size_that_was_set_must_fit_beside_the_model():
    with pytest.raises(ConfigError, match=r"takes 0\.587 GiB, and 0\.586 GiB .*the model takes .*--num-gpu-blocks"):
        kv_cache.choose_num_blocks(RuntimeConfig(num_gpu_blocks_override=601), SCHEDULER, MIB, device=DEVICE)


def test_rounding_never_costs_the_one_sequence_that_fits(monkeypatch):
    monkeypatch.setattr(kv_cache, "free_host_bytes", lambda: 179 * MIB)
    scheduler = SchedulerConfig(block_size=16, max_model_len=71 * 16, max_num_seqs=4)
    assert kv_cache.choose_num_blocks(RuntimeConfig(), scheduler, MIB) == 71


def test_an_override_is_taken_as_it_is():
    assert kv_cache.choose_num_blocks(RuntimeConfig(num_gpu_blocks_override=3), SCHEDULER, MIB) == 3


@pytest.mark.parametrize("asked", [{"num_gpu_blocks_override": 501}, {"kv_cache_memory": 501 / 1024}])
def test_more_than_is_free_is_refused_with_the_numbers_and_the_flags(asked, monkeypatch):
    monkeypatch.setattr(kv_cache, "free_host_bytes", lambda: 500 * MIB)
    with pytest.raises(ConfigError, match=r"0\.489 GiB, and 0\.488 GiB .*; lower --kv-cache-memory or --num-gpu"):
        kv_cache.choose_num_blocks(RuntimeConfig(**asked), SCHEDULER, MIB)


def test_too_little_memory_names_the_numbers_and_the_flags():
    with pytest.raises(ConfigError) as refused:
        kv_cache.choose_num_blocks(RuntimeConfig(kv_cache_memory=0.03125), SCHEDULER, MIB)
    for part in ("1024", "0.0625 GiB are needed", "0.0312 GiB are available", "--kv-cache-memory", "--max-model-len"):
        assert part in str(refused.value)


def test_free_memory_is_the_least_of_the_machines_and_the_containers(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable:    3000 kB\nHugePages_Total:       0\n")
    assert kv_cache.free_host_bytes(meminfo, tmp_path) == 3000 * 1024
    write_container(tmp_path, limit="max", used=1000, idle_files=0)
    assert kv_cache.free_host_bytes(meminfo, tmp_path) == 3000 * 1024
    write_container(tmp_path, limit=5000, used=1000, idle_files=0)
    assert kv_cache.free_host_bytes(meminfo, tmp_path) == 4000


def test_files_that_a_container_has_read_do_not_count_as_used(tmp_path):
    write_container(tmp_path, limit=5000, used=4900, idle_files=4500)
    assert kv_cache.free_host_bytes(cgroup=tmp_path) == 4600


def write_container(folder, *, limit, used, idle_files):
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 7\ninactive_file {idle_files}\nactive_file 9\n")


def test_a_system_that_does_not_tell_its_free_memory_tells_how_much_there_is(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 3, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert kv_cache.free_host_bytes(tmp_path / "none", tmp_path) == 3 * 4096


def test_unreadable_memory_asks_for_the_flag(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "sysconf")
    with pytest.raises(ConfigError, match="--kv-cache-memory"):
        kv_cache.free_host_bytes(tmp_path / "none", tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kv_cache_memory": 0},
        {"kv_cache_memory": float("inf")},
        {"num_gpu_blocks_override": 0},
        {"kv_cache_memory": 1.0, "num_gpu_blocks_override": 8},
        {"swap_space": -1},
        {"swap_space_disk": float("nan")},
        {"swap_dir": "/tmp"},
        {"num_compile_threads": 0},
    ],
)
def test_sizes_below_one_and_two_sizes_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        RuntimeConfig(**wrong)
