"""Writes dashboard.json, which Grafana imports; panels are stated here, one line each.

python serving/deploy/grafana/generate.py
"""

import json
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, COLUMNS = 8, 8, 3


def rate(series: str, by: str = "") -> str:
    return f'sum{f" by ({by})" if by else ""} (rate({series}{{instance=~"$instance"}}[$__rate_interval]))'


def quantile(q: float, series: str) -> str:
    return f"histogram_quantile({q}, {rate(f'{series}_bucket', 'le')})"


def quantiles(series: str) -> dict[str, str]:
    return {f"p{round(100 * q)}": quantile(q, series) for q in (0.5, 0.9, 0.99)}


def now(series: str, selector: str = "") -> str:
    return f'{series}{{instance=~"$instance"{selector}}}'


# Title, unit, legend -> query. A legend with {{label}} is one line a label.
PANELS: tuple[tuple[str, str, dict[str, str]], ...] = (
    (
        "Output tokens a second",
        "short",
        {
            "output": rate("pagedjax_generation_tokens_total"),
            "of them forced": rate("pagedjax_jump_forward_tokens_total"),
        },
    ),
    ("Prompt tokens a second", "short", {"prompt": rate("pagedjax_prompt_tokens_total")}),
    ("Ended requests a second", "reqps", {"{{outcome}}": rate("pagedjax_requests_total", "outcome")}),
    ("Time to first token", "s", quantiles("pagedjax_time_to_first_token_seconds")),
    ("Between tokens", "s", quantiles("pagedjax_inter_token_latency_seconds")),
    ("Whole requests", "s", quantiles("pagedjax_request_latency_seconds")),
    ("Wait for the first step", "s", quantiles("pagedjax_request_wait_time_seconds")),
    (
        "Queues",
        "short",
        {
            "running {{instance}}": now("pagedjax_requests_running"),
            "waiting {{instance}}": now("pagedjax_requests_waiting"),
        },
    ),
    ("Blocks held", "percentunit", {"{{tier}} {{instance}}": now("pagedjax_kv_cache_usage_ratio")}),
    (
        "Prompt tokens from the prefix cache",
        "percentunit",
        {
            "hit rate": f"{rate('pagedjax_prefix_cache_hit_tokens_total')} / "
            f"{rate('pagedjax_prefix_cache_query_tokens_total')}"
        },
    ),
    (
        "Preemptions a second",
        "short",
        {"{{reason}}, {{method}}": rate("pagedjax_preemption_count_total", "reason, method")},
    ),
    ("Tokens computed again a second", "short", {"recomputed": rate("pagedjax_recomputed_tokens_total")}),
    ("Swapped bytes a second", "Bps", {"{{tier}} {{direction}}": rate("pagedjax_swap_bytes_total", "tier, direction")}),
    ("Step loop, by phase", "percentunit", {"{{phase}}": rate("pagedjax_step_time_seconds_total", "phase")}),
    ("Tokens in a step", "short", quantiles("pagedjax_step_tokens")),
    (
        "What should stay 0",
        "short",
        {
            "failed steps": rate("pagedjax_step_failures_total"),
            "compilations": rate("pagedjax_recompiles_total"),
            "failed swaps": rate("pagedjax_swap_failures_total"),
            "faulty rows": rate("pagedjax_faulty_rows_total"),
        },
    ),
)


def dashboard() -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${source}"}
    query = "label_values(pagedjax_requests_running, instance)"
    variables = [
        {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        {
            "name": "instance",
            "type": "query",
            "datasource": source,
            "query": {"query": query, "refId": "instance"},
            "includeAll": True,
            "multi": True,
            "refresh": 2,
            "current": {"text": "All", "value": "$__all"},
        },
    ]
    return {
        "title": "pagedjax",
        "uid": "pagedjax",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "panels": [panel(place, source, *stated) for place, stated in enumerate(PANELS)],
    }


def panel(place: int, source: dict[str, str], title: str, unit: str, lines: dict[str, str]) -> dict[str, Any]:
    row, column = divmod(place, COLUMNS)
    targets = [
        {"refId": chr(ord("A") + i), "expr": expression, "legendFormat": legend, "datasource": source}
        for i, (legend, expression) in enumerate(lines.items())
    ]
    return {
        "id": place + 1,
        "type": "timeseries",
        "title": title,
        "datasource": source,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "options": {"tooltip": {"mode": "multi", "sort": "desc"}, "legend": {"displayMode": "list"}},
        "targets": targets,
    }


if __name__ == "__main__":
    path = Path(__file__).with_name("dashboard.json")
    path.write_text(json.dumps(dashboard(), indent=1) + "\n")
