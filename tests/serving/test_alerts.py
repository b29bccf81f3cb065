"""The alert rules: sound YAML of the shape that Prometheus takes, about series and labels that there are."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client import generate_latest

from pagedjax.engine.metrics import EngineMetrics
from tests.engine.fakes import make_engine
from tests.serving.exported import exported

RULES = Path(__file__).parents[2] / "serving" / "deploy" / "prometheus" / "alerts.yml"


@pytest.fixture(scope="module")
def rules():
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    assert group.keys() == {"name", "rules"}
    return group["rules"]


def test_every_rule_has_what_it_takes(rules):
    assert len({rule["alert"] for rule in rules}) == len(rules) > 5
    assert "HighPreemptionRate" in {rule["alert"] for rule in rules}
    for rule in rules:
        assert rule.keys() - {"for"} == {"alert", "expr", "labels", "annotations"}
        assert rule["labels"].keys() == {"severity"} and rule["annotations"].keys() == {"summary", "description"}
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "5m"))
        assert rule["expr"].count("(") == rule["expr"].count(")")


def test_rules_are_about_series_that_there_are(rules):
    names = exported()
    for rule in rules:
        used = re.findall(r"pagedjax_\w+", rule["expr"])
        assert used and set(used) <= names.keys(), rule["alert"]


def test_rates_are_of_counters_and_quantiles_of_histograms(rules):
    names = exported()
    for rule in rules:
        for function, name in re.findall(r"(rate|increase)\((pagedjax_\w+)", rule["expr"]):
            assert names[name] == ("histogram" if name.endswith("_bucket") else "counter"), (rule["alert"], function)
        assert ("histogram_quantile" in rule["expr"]) == ("_bucket" in rule["expr"])


def test_flags_named_in_rules_exist():
    from pagedjax.cli.flags import field_types, flag_name
    from pagedjax.engine.config import EngineConfig

    flags = {flag_name(name) for name in field_types(EngineConfig)}
    assert set(re.findall(r"--[a-z][a-z-]+", RULES.read_text())) <= flags


def test_labels_in_selectors_and_texts_are_the_series_own():
    metrics = EngineMetrics(lambda: None)
    assert metrics.swap_failures._labelnames == ("tier", "direction")
    page = generate_latest(make_engine(num_host_blocks=4).metrics.registry).decode()
    assert 'pagedjax_kv_cache_usage_ratio{tier="host"}' in page


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_rules():
    done = subprocess.run(["promtool", "check", "rules", str(RULES)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
