"""What a server exports, for tests of the files that name its series."""

import re

from prometheus_client import generate_latest

from serving.telemetry.metrics import HttpMetrics
from tests.engine.fakes import make_engine


def exported() -> dict[str, str]:
    """Every series name with its kind, counters and histograms with their suffixes."""
    engine, http = make_engine(num_host_blocks=4), HttpMetrics()
    http.watch(lambda: "ok", lambda: 0.0)
    page = b"".join(generate_latest(metrics.registry) for metrics in (engine.metrics, http)).decode()
    names = {}
    for name, kind in re.findall(r"^# TYPE (pagedjax_\w+) (\w+)$", page, re.MULTILINE):
        names |= dict.fromkeys([name, f"{name}_bucket"] if kind == "histogram" else [name], kind)
    return names
