"""Named settings of the preemption policy, for the kinds of traffic that there are.

*interactive*: people wait for their next token; ageing is quick, tenants are kept closer together, and a victim has run
longer than it takes to begin again (where memory is short, slices of 20 ms cost 12 % of the device's time and those of
120 ms 2 %, while first tokens come as soon: `docs/simulator.md`). *batch*: throughput counts; nobody is admitted
without room for its expected length, and what runs is seldom interrupted. *mixed*: people before batches, the defaults.
*long-context*: a prompt of thousands of tokens is dear to compute, and is not interrupted before it is done.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

Preset = Literal["interactive", "batch", "mixed", "long-context"]

# SchedulerConfig's fields of these names.
PRESETS: Mapping[Preset, Mapping[str, Any]] = MappingProxyType(
    {
        "interactive": {
            "enable_preemption": True,
            "preemption_mode": "aggressive",
            "preemption_strategy": "tenant_aware",
            "time_slice": 120,
            "min_execution_chunk": 8,
            "max_wait_s": 10.0,
            "fairness_threshold": 0.1,
        },
        "batch": {
            "enable_preemption": True,
            "preemption_mode": "conservative",
            "preemption_strategy": "tenant_aware",
            "time_slice": 500,
            "min_execution_chunk": 256,
            "max_wait_s": 600.0,
            "fairness_threshold": 0.3,
        },
        "mixed": {
            "enable_preemption": True,
            "preemption_mode": "aggressive",
            "preemption_strategy": "tenant_aware",
            "time_slice": 50,
            "min_execution_chunk": 16,
            "max_wait_s": 60.0,
            "fairness_threshold": 0.2,
        },
        "long-context": {
            "enable_preemption": True,
            "preemption_mode": "conservative",
            "preemption_strategy": "tenant_aware",
            "time_slice": 250,
            "min_execution_chunk": 8192,
            "max_wait_s": 120.0,
            "fairness_threshold": 0.3,
        },
    }
)
