"""The GPUs that are compiled for, told to XLA by their hardware facts, and what a compiling process needs around it."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple


class Target(NamedTuple):
    """A GPU as NVIDIA's datasheets and tuning guides give it. `ptxas_arch` is the name that ptxas takes."""

    name: str
    ptxas_arch: str
    capability: tuple[int, int]
    num_multiprocessors: int
    shared_bytes_per_block: int  # what a kernel may ask for
    shared_bytes_per_multiprocessor: int
    l2_bytes: int
    memory_bytes: int
    memory_bytes_per_s: int
    clock_ghz: float


TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        "h200": Target(
            name="NVIDIA H200",
            ptxas_arch="sm_90a",
            capability=(9, 0),
            num_multiprocessors=132,
            shared_bytes_per_block=232_448,
            shared_bytes_per_multiprocessor=233_472,
            l2_bytes=52_428_800,
            memory_bytes=150_754_820_096,
            memory_bytes_per_s=4_800_000_000_000,
            clock_ghz=1.98,
        ),
        "a100": Target(
            name="NVIDIA A100-SXM4-80GB",
            ptxas_arch="sm_80",
            capability=(8, 0),
            num_multiprocessors=108,
            shared_bytes_per_block=166_912,
            shared_bytes_per_multiprocessor=167_936,
            l2_bytes=41_943_040,
            memory_bytes=85_899_345_920,
            memory_bytes_per_s=2_039_000_000_000,
            clock_ghz=1.41,
        ),
    }
)


def target_config(target: Target) -> str:
    """XLA's GpuTargetConfigProto as text."""
    major, minor = target.capability
    # The "a" of sm_90a: wgmma and the like, which no later GPU has.
    feature = "feature_extension: ACCELERATED_FEATURES" if target.ptxas_arch.endswith("a") else ""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {target.shared_bytes_per_multiprocessor}
  shared_memory_per_block_optin: {target.shared_bytes_per_block}
  threads_per_core_limit: 2048
  core_count: {target.num_multiprocessors}
  fpus_per_core: {128 if target.ptxas_arch == "sm_90a" else 64}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {target.memory_bytes_per_s}
  l2_cache_size: {target.l2_bytes}
  clock_rate_ghz: {target.clock_ghz}
  device_memory_size: {target.memory_bytes}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {major} minor: {minor} {feature} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 13 minor: 0 }}
device_description_str: "{target.name}"
"""


def cuda_directory() -> Path | None:
    """Where pip has put ptxas and libdevice, or None where they are not installed."""
    spec = importlib.util.find_spec("nvidia")
    for base in spec.submodule_search_locations or () if spec else ():
        directory = Path(base) / "cu13"
        if (directory / "bin" / "ptxas").exists() and any(directory.glob("nvvm/libdevice/*.bc")):
            return directory
    return None


def missing() -> str | None:
    """What the gate lacks here, in words, or None."""
    if importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        return "jax-cuda13-plugin and jax-cuda13-pjrt are not installed"
    if cuda_directory() is None:
        return "nvidia-cuda-nvcc and nvidia-nvvm are not installed"
    return None


def environment(directory: Path, dump: Path) -> dict[str, str]:
    """Variables of a process that compiles with `directory`'s CUDA and leaves PTX and thunks in `dump`."""
    flags = (
        f"--xla_gpu_cuda_data_dir={directory}",
        # Trying GEMM variants needs a GPU.
        "--xla_gpu_autotune_level=0",
        f"--xla_dump_to={dump}",
        "--xla_dump_emitter_re=ptx",
    )
    # Mosaic prints its PTX and what ptxas says of it to file descriptor 1.
    mosaic = {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1"}
    triton = {"JAX_TRITON_DUMP_DIR": str(jax_triton_dump(dump))}
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags), **mosaic, **triton}


def jax_triton_dump(dump: Path) -> Path:
    """Where jax-triton leaves a directory for each kernel that it compiles."""
    return dump.with_name(f"{dump.name}-jax-triton")
