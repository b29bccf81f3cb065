"""The configuration record: what it refuses, and what `resolve` fills in."""

import dataclasses
import os

import pytest

from pagedjax.core.errors import ConfigError
from pagedjax.core.presets import PRESETS
from pagedjax.engine.config import EngineConfig, claim_memory, resolve
from tests.runtime.tiny import CONFIG


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({"block_size": 12}, "--block-size"),
        ({"max_num_seqs": 0}, "--max-num-seqs"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "--max-num-batched-tokens"),
        ({"max_model_len": -1}, "--max-model-len"),
        ({"max_model_len": 0}, "--max-model-len"),
        ({"max_num_batched_tokens": 0}, "--max-num-batched-tokens"),
        ({"dtype": "int8"}, "--dtype"),
        ({"quantization": "fp8"}, "--quantization"),
        ({"kv_cache_memory": 0.0}, "--kv-cache-memory"),
        ({"kv_cache_dtype": "fp4"}, "--kv-cache-dtype"),
        ({"gpu_memory_utilization": 0.0}, "--gpu-memory-utilization"),
        ({"gpu_memory_utilization": 1.1}, "--gpu-memory-utilization"),
        ({"num_gpu_blocks_override": 0}, "--num-gpu-blocks-override"),
        ({"swap_space": -0.5}, "--swap-space"),
        ({"swap_space_disk": float("inf")}, "--swap-space-disk"),
        ({"swap_dir": "/tmp"}, "--swap-space-disk"),
        ({"preemption_method": "swap"}, "--swap-space"),
        ({"preemption_method": "recompute", "swap_space": 1.0}, "--swap-space"),
        ({"preemption_method": "drop"}, "--preemption-method"),
        ({"seed": -1}, "--seed"),
        ({"max_queued_requests": 0}, "--max-queued-requests"),
        ({"record": ""}, "record is empty; drop --record"),
        ({"served_model_name": " "}, "--served-model-name"),
        ({"swap_space_disk": 1.0, "swap_dir": ""}, "--swap-dir"),
        ({"compilation_cache_dir": ""}, "--compilation-cache-dir"),
        ({"attention_backend": ""}, "--attention-backend"),
        ({"tenant_weights": ", ,"}, "--tenant-weights"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_flag(fields, flag):
    with pytest.raises(ConfigError, match=flag):
        EngineConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"max_num_seqs": "8"}, "max_num_seqs must be an integer, not '8'; set --max-num-seqs"),
        ({"max_num_seqs": True}, "an integer"),
        ({"swap_space": "much"}, "a number"),
        ({"enable_prefix_caching": 1}, "true or false"),
        ({"model": None}, "model must be a string"),
        ({"dtype": 3}, "dtype must be a string"),
    ],
)
def test_a_value_of_another_type_is_refused_with_its_flag(fields, reason):
    with pytest.raises(ConfigError, match=reason):
        EngineConfig(**fields)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_resolve_leaves_nothing_automatic_but_the_pools_size(platform):
    resolved = resolve(EngineConfig(), CONFIG, platform=platform)
    automatic = {f.name for f in dataclasses.fields(resolved) if getattr(resolved, f.name) in (None, "auto")}
    assert automatic <= {
        "record",
        "served_model_name",
        "quantization",
        "kv_cache_memory",
        "kv_cache_dtype",
        "gpu_memory_utilization",
        "num_gpu_blocks_override",
        "attention_backend",
        "swap_dir",
        "preemption_method",
    }
    assert resolved.max_model_len == CONFIG.max_position_embeddings


def test_a_disks_part_goes_to_the_models_folder_unless_told(monkeypatch):
    monkeypatch.setenv("PAGEDJAX_HOME", "/there")
    assert resolve(EngineConfig(swap_space_disk=1.0), CONFIG, platform="cpu").swap_dir == "/there/swap"
    chosen = EngineConfig(swap_space_disk=1.0, swap_dir="/elsewhere")
    assert resolve(chosen, CONFIG, platform="cpu").swap_dir == "/elsewhere"


def test_resolve_keeps_what_was_chosen():
    limits = {"max_model_len": 32, "max_num_batched_tokens": 64}
    chosen = EngineConfig(dtype="float16", compilation_cache_dir="here", **limits, **PRESETS["batch"])
    assert resolve(chosen, CONFIG, platform="cpu") == chosen


@pytest.mark.parametrize("fields", [{"enforce_eager": True}, {"gpu_memory_utilization": 0.5}])
def test_what_is_about_gpus_is_refused_without_one(fields):
    resolve(EngineConfig(**fields), CONFIG, platform="gpu")
    with pytest.raises(ConfigError, match=r"this machine has no GPU; (drop --enforce-eager|set --kv-cache-memory)"):
        resolve(EngineConfig(**fields), CONFIG, platform="cpu")


@pytest.mark.parametrize(
    ("said", "wish", "share"), [(None, None, 1.0), (None, 0.5, 1.0), ("0.75", 0.5, 2 / 3), ("0.5", 0.9, 1.0)]
)
def test_the_allocator_takes_the_share_unless_the_environment_says_another(said, wish, share, monkeypatch):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, "")
    if said is not None:
        monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", said)
    assert claim_memory(wish) == pytest.approx(share)
    assert os.environ["XLA_CLIENT_MEM_FRACTION"] == ("" if said else str(wish or 0.9))


@pytest.mark.parametrize(("swap_space", "limit"), [(0.0, None), (32.0, None), (40.5, "81")])
def test_a_large_swap_space_raises_the_limit_of_pinned_memory(swap_space, limit, monkeypatch):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.9")
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "")
    monkeypatch.delenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB")
    claim_memory(None, swap_space)
    assert os.environ.get("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB") == limit


def test_a_share_in_the_environment_that_is_no_number_is_refused(monkeypatch):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "much")
    with pytest.raises(ConfigError, match="XLA_CLIENT_MEM_FRACTION=much"):
        claim_memory(None)


def test_a_context_longer_than_the_models_is_refused():
    with pytest.raises(ConfigError, match="--max-model-len"):
        resolve(EngineConfig(max_model_len=10**6), CONFIG, platform="cpu")


def test_without_chunked_prefill_a_step_holds_the_longest_prompt():
    resolved = resolve(EngineConfig(enable_chunked_prefill=False), CONFIG, platform="cpu")
    assert resolved.max_num_batched_tokens >= resolved.max_model_len


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"PAGEDJAX_HOME": "/there"}, "/there/compiled"),
        ({"PAGEDJAX_HOME": "", "XDG_CACHE_HOME": "/cache"}, "/cache/pagedjax/compiled"),
        ({"PAGEDJAX_HOME": "~/mine", "HOME": "/me"}, "/me/mine/compiled"),
        ({"PAGEDJAX_HOME": "", "XDG_CACHE_HOME": "", "HOME": "/me"}, "/me/.cache/pagedjax/compiled"),
    ],
)
def test_compiled_programs_lie_beside_the_models(environment, folder, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert resolve(EngineConfig(), CONFIG, platform="cpu").compilation_cache_dir == folder
