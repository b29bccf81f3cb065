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
RULE_TESTS = RULES.with_name("alerts_test.yml")


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


def test_promtool_accepts_the_rules_and_their_tests():
    """Without promtool: the tests are at least about rules and series that there are, and expect what rules say."""
    if shutil.which("promtool"):
        for what, path in (("check", RULES), ("test", RULE_TESTS)):
            done = subprocess.run(
                ["promtool", what, "rules", path.name], cwd=path.parent, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr
    assert_tests_are_about_what_there_is(yaml.safe_load(RULE_TESTS.read_text())["tests"])


def assert_tests_are_about_what_there_is(tests):
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    rules = {rule["alert"]: rule for rule in group["rules"]}
    names = exported()
    assert len(tests) >= 5 and any(alert["exp_alerts"] == [] for test in tests for alert in test["alert_rule_test"])
    for test in tests:
        series = {re.match(r"\w+", one["series"])[0] for one in test["input_series"]}
        assert series <= names.keys(), test["name"]
        for alert in test["alert_rule_test"]:
            rule = rules[alert["alertname"]]
            used = set(re.findall(r"pagedjax_\w+", rule["expr"]))
            assert used <= series, test["name"]
            for expected in alert["exp_alerts"]:
                assert expected["exp_labels"].items() >= rule["labels"].items()
                assert expected["exp_annotations"]["description"] == rule["annotations"]["description"]
