"""The scheduler on a virtual clock: production's own `update`, a cost model in the device's place."""

from pagedjax.simulator.cost import CPU_XLA, H200_LIKE, PRESETS, CostModel, Link
from pagedjax.simulator.executor import simulate
from pagedjax.simulator.report import Limits, SimReport
from pagedjax.simulator.workload import SimRequest

__all__ = ["CPU_XLA", "H200_LIKE", "PRESETS", "CostModel", "Limits", "Link", "SimReport", "SimRequest", "simulate"]
