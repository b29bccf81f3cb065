"""The engine's whole configuration as one frozen record, and `resolve`, which fills every "auto".

Every field is a flag of `pagedjax serve`, a keyword of `LLM(...)` and a TOML key. Names are vLLM's where it has one.
"""

import math
import os
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pagedjax.core.config import PreemptionMethod, PreemptionMode, PreemptionStrategy, SchedulerConfig, parse_weights
from pagedjax.core.errors import ConfigError
from pagedjax.core.presets import PRESETS, Preset
from pagedjax.models.config import ModelConfig
from pagedjax.runtime.config import RuntimeConfig
from pagedjax.weights.store import home_directory, served_model_name

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["auto", "none", "int8", "int4"]
KVCacheDtype = Literal["auto", "int8", "fp8", "fp8_e4m3"]
GPU_MEMORY_UTILIZATION = 0.9
# Where XLA reads how much of a GPU's memory its allocator takes, when it starts.
_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
# And how many GB of pinned memory it takes of the host's at most, and what that is otherwise.
_PINNED_LIMIT, _PINNED_GIB = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", 64
# What a cache's type is called by JAX.
KV_CACHE_DTYPES = {"int8": "int8", "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn"}


_QUANTIZATION = (
    "of products' weights; auto keeps AWQ's and GPTQ's 4 bits, and on CPUs, unless a dtype is set, a GGUF file's own "
    "with native kernels, or without them, from JAX 0.11 on, 8 bits a row in their place; none dequantises; int8 and "
    "int4 quantise by groups of 32, with native kernels (embeddings and head: bfloat16 beside int8, int8 beside int4); "
    "without them int8 does by rows, from JAX 0.11 on"
)


def _option(default: Any, group: str, text: str) -> Any:
    return field(default=default, metadata={"group": group, "help": text})


def _preset(text: str) -> Any:
    return field(default=None, metadata={"group": "preemption", "help": text, "none": "from the preset"})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What to serve and within which limits. None means automatic: `resolve` fills it.

    Raises ConfigError, naming the flag, for a value out of range.
    """

    model: str = _option("smollm2-135m", "model", "a bundled name, a GGUF file, a model directory or a hub id")
    served_model_name: str | None = _option(None, "model", "the name in the API; from the model's path if not given")
    dtype: Dtype = _option("auto", "model", "of weights, activations and KV cache; auto is bfloat16 where it is fast")
    quantization: Quantization = _option("auto", "model", _QUANTIZATION)
    max_model_len: int | None = _option(None, "model", "longest context in tokens, output included")
    seed: int = _option(0, "model", "makes sampling without a seed of its own repeatable")

    block_size: int = _option(16, "memory", "tokens in a KV block, a power of two")
    kv_cache_memory: float | None = _option(None, "memory", "GiB for the KV cache")
    kv_cache_dtype: KVCacheDtype = _option(
        "auto", "memory", "of keys and values in the cache; int8 and fp8 (fp8_e4m3) keep a scale per token and head"
    )
    gpu_memory_utilization: float | None = _option(
        None, "memory", "share of a GPU's memory for weights, activations and KV cache together; 0.9 if not given"
    )
    num_gpu_blocks_override: int | None = _option(None, "memory", "number of KV blocks, instead of a size in GiB")
    swap_space: float = _option(0.0, "memory", "GiB of host memory for the blocks of preempted sequences")
    swap_space_disk: float = _option(0.0, "memory", "GiB on disk for those that the host has no room for")
    swap_dir: str | None = _option(None, "memory", "where the disk's part lies, a file that leaves no trace")
    enable_prefix_caching: bool = _option(True, "memory", "share blocks between prompts with equal beginnings")

    max_num_seqs: int = _option(64, "scheduling", "most sequences that run at once")
    max_num_batched_tokens: int | None = _option(None, "scheduling", "most tokens in one step")
    enable_chunked_prefill: bool = _option(True, "scheduling", "split long prompts over several steps")
    async_scheduling: bool = _option(True, "scheduling", "plan a step while the one before it runs")
    max_queued_requests: int = _option(1024, "scheduling", "most requests that wait; more are refused (429)")
    max_queued_tokens: int = _option(2_000_000, "scheduling", "most prompt tokens that wait; more are refused (429)")
    queue_timeout_s: float = _option(
        0.0, "scheduling", "seconds that a request may wait for its first step before it is ended (504); 0 is no limit"
    )

    preset: Preset = _option("mixed", "preemption", "the kind of traffic, which decides what is not set here")
    enable_preemption: bool | None = _preset("interrupt running requests for others")
    preemption_mode: PreemptionMode | None = _preset("admit on the prompt (aggressive) or on the expected length")
    preemption_strategy: PreemptionStrategy | None = _preset("by priority alone, or with regard to tenants' shares")
    preemption_method: PreemptionMethod = _option(
        "auto", "preemption", "what becomes of a victim's blocks; auto takes the faster"
    )
    time_slice: int | None = _preset("ms that a request runs before it must yield to a better rank")
    min_execution_chunk: int | None = _preset("tokens that a request computes before it must yield to a better rank")
    max_wait_s: float | None = _preset("seconds after which a waiting request goes before all others")
    fairness_threshold: float | None = _preset("how far from its fair share a tenant may be, as a part of it")
    tenant_weights: str = _option("", "preemption", "shares of named tenants: gold=3,silver=2,bronze=1; others have 1")

    attention_backend: str | None = _option(None, "device", "name of the attention backend; see pagedjax info")
    enforce_eager: bool = _option(
        False, "device", "on GPUs, launch each kernel by itself, not a step's as one command buffer (CUDA graph)"
    )
    compilation_cache_dir: str | None = _option(None, "device", "where compiled programs are kept between starts")
    record: str | None = _option(None, "device", "file to which every event of the scheduler goes; see pagedjax replay")

    def __post_init__(self) -> None:
        _check_types(self)
        refuse_empty(self)
        _ = self.runtime
        if self.dtype not in get_args(Dtype):
            raise ConfigError(f"dtype {self.dtype!r} is not one of {', '.join(get_args(Dtype))}; set --dtype")
        if self.quantization not in get_args(Quantization):
            known = ", ".join(get_args(Quantization))
            raise ConfigError(f"quantization {self.quantization!r} is not one of {known}; set --quantization")
        if self.kv_cache_dtype not in get_args(KVCacheDtype):
            known = ", ".join(get_args(KVCacheDtype))
            raise ConfigError(f"kv_cache_dtype {self.kv_cache_dtype!r} is not one of {known}; set --kv-cache-dtype")
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization must be above 0 and at most 1, not {self.gpu_memory_utilization}; "
                "set --gpu-memory-utilization"
            )
        if self.preset not in get_args(Preset):
            raise ConfigError(f"preset {self.preset!r} is not one of {', '.join(get_args(Preset))}; set --preset")
        # The limits that are still automatic cannot be checked yet; stand-ins that fit the others are.
        model_len = _or(self.max_model_len, 1)
        tokens = _or(self.max_num_batched_tokens, max(self.max_num_seqs, model_len))
        self._scheduler(num_blocks=1, max_model_len=model_len, max_num_batched_tokens=tokens)
        has_tiers = self.swap_space > 0 or self.swap_space_disk > 0
        if self.preemption_method == "swap" and not has_tiers:
            raise ConfigError("preemption_method swap has nowhere to swap to; set --swap-space or --swap-space-disk")
        if self.preemption_method == "recompute" and has_tiers:
            raise ConfigError("preemption_method recompute swaps nothing; drop --swap-space and --swap-space-disk")
        if not 0 <= self.queue_timeout_s < float("inf"):
            raise ConfigError(f"queue_timeout_s must be 0 or more, not {self.queue_timeout_s}; set --queue-timeout-s")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must lie in 0..2^63 - 1, not {self.seed}; set --seed")

    @property
    def name(self) -> str:
        """The model's name in the API."""
        return self.served_model_name or served_model_name(self.model)

    @property
    def policy(self) -> dict[str, Any]:
        """The preset's settings, but for those that are set here."""
        preset = PRESETS[self.preset]
        chosen = {name: getattr(self, name) for name in preset}
        return {**preset, **{name: value for name, value in chosen.items() if value is not None}}

    @property
    def runtime(self) -> RuntimeConfig:
        return RuntimeConfig(
            kv_cache_memory=self.kv_cache_memory,
            num_gpu_blocks_override=self.num_gpu_blocks_override,
            swap_space=self.swap_space,
            swap_space_disk=self.swap_space_disk,
            swap_dir=self.swap_dir,
            compilation_cache_dir=self.compilation_cache_dir,
            num_compile_threads=os.cpu_count() or 1,
            enforce_eager=self.enforce_eager,
        )

    def scheduler(self, num_blocks: int) -> SchedulerConfig:
        """The scheduler's part of a resolved configuration."""
        if self.max_model_len is None or self.max_num_batched_tokens is None:
            raise ConfigError("the configuration is not resolved")
        return self._scheduler(
            num_blocks=num_blocks,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )

    def _scheduler(self, *, num_blocks: int, max_model_len: int, max_num_batched_tokens: int) -> SchedulerConfig:
        return SchedulerConfig(
            block_size=self.block_size,
            num_blocks=num_blocks,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            enable_prefix_caching=self.enable_prefix_caching,
            enable_chunked_prefill=self.enable_chunked_prefill,
            async_scheduling=self.async_scheduling,
            preemption_method=self.preemption_method,
            max_queued_requests=self.max_queued_requests,
            max_queued_tokens=self.max_queued_tokens,
            tenant_weights=parse_weights(self.tenant_weights),
            **self.policy,
        )


def resolve(config: EngineConfig, model: ModelConfig, *, platform: str) -> EngineConfig:
    """The configuration with every automatic field filled, for `model` on `platform` ("cpu" or "gpu").

    But for what the checkpoint's files decide: how weights are quantised (`engine.quantisation`).

    Raises ConfigError for limits that the model does not have.
    """
    max_model_len = _or(config.max_model_len, model.max_position_embeddings)
    if max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len {max_model_len} is more than the model's {model.max_position_embeddings} positions; "
            "lower --max-model-len"
        )
    if platform == "cpu":
        _refuse_for_gpus(config)
    enough_tokens = _max_num_batched_tokens(config, max_model_len, platform)
    swap_dir = config.swap_dir or (str(home_directory() / "swap") if config.swap_space_disk else None)
    return replace(
        config,
        swap_dir=swap_dir,
        dtype=_dtype(config.dtype, platform),
        max_model_len=max_model_len,
        max_num_batched_tokens=_or(config.max_num_batched_tokens, enough_tokens),
        compilation_cache_dir=config.compilation_cache_dir or str(home_directory() / "compiled"),
        **config.policy,
    )


def claim_memory(utilization: float | None, swap_space: float = 0.0) -> float:
    """Let JAX's allocator take that share of a GPU's memory, unless the environment says another or JAX has started;
    gives the part of what the allocator has that makes up the share. And let it take `swap_space` GiB of the host's."""
    if swap_space > _PINNED_GIB / 2:  # blocks on their way are there twice
        os.environ.setdefault(_PINNED_LIMIT, str(math.ceil(2 * swap_space)))
    share = GPU_MEMORY_UTILIZATION if utilization is None else utilization
    said = next(filter(None, map(os.environ.get, _FRACTIONS)), None)
    if said is None:
        os.environ[_FRACTIONS[0]] = str(share)
        return 1.0
    try:
        return min(share / float(said), 1.0)
    except (ValueError, ZeroDivisionError):
        name = next(name for name in _FRACTIONS if os.environ.get(name))
        raise ConfigError(f"{name}={said} is no share of a GPU's memory; unset it") from None


_HINTS = get_type_hints(EngineConfig)
_KINDS: dict[type, tuple[type, str]] = {
    bool: (bool, "true or false"),
    int: (Integral, "an integer"),
    float: (Real, "a number"),
    str: (str, "a string"),
}


def _check_types(config: EngineConfig) -> None:
    """Raises ConfigError, naming the flag, for a value of another type than its field's."""
    for name, hint in _HINTS.items():
        value = getattr(config, name)
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if value is None and NoneType in kinds:
            continue
        kind = str if get_origin(kinds[0]) is Literal else kinds[0]
        allowed, words = _KINDS[kind]
        if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
            raise ConfigError(f"{name} must be {words}, not {value!r}; set {_flag(name)}")


def refuse_empty(config: Any) -> None:
    """Raises ConfigError for an empty text in a dataclass whose fields are flags, where None stands for "not given": it
    says nothing."""
    for one in fields(config):
        value = getattr(config, one.name)
        if one.default is None and isinstance(value, str) and not value.strip():
            raise ConfigError(f"{one.name} is empty; drop {_flag(one.name)} or give it a value")


def _flag(name: str) -> str:
    return "MODEL" if name == "model" else f"--{name.replace('_', '-')}"


def _refuse_for_gpus(config: EngineConfig) -> None:
    """Raise ConfigError for what says nothing on a CPU."""
    if config.enforce_eager:
        raise ConfigError("enforce_eager goes without CUDA graphs, and this machine has no GPU; drop --enforce-eager")
    if config.gpu_memory_utilization is not None:
        raise ConfigError(
            "gpu_memory_utilization is a share of a GPU's memory, and this machine has no GPU; set --kv-cache-memory"
        )


def _or(value: int | None, automatic: int) -> int:
    return automatic if value is None else value


def _max_num_batched_tokens(config: EngineConfig, max_model_len: int, platform: str) -> int:
    """Enough to keep the device busy, few enough that decodes beside a prompt do not wait long."""
    enough = 256 if platform == "cpu" else 2048
    return max(enough, config.max_num_seqs, 0 if config.enable_chunked_prefill else max_model_len)


def _dtype(dtype: Dtype, platform: str) -> Dtype:
    if dtype != "auto":
        return dtype
    return "bfloat16" if platform != "cpu" or cpu_has_bf16() else "float32"


def cpu_has_bf16() -> bool:
    """Whether this processor multiplies bfloat16 natively (AVX-512 BF16, AMX or Arm BF16)."""
    return not cpu_flags().isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})


def cpu_flags() -> set[str]:
    """What Linux says that this processor can do; empty elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    return {word for line in text.splitlines() if line.startswith(("flags", "Features")) for word in line.split()}
