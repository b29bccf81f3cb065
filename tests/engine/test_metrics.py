"""Every series that tells of preemption, swapping and tenants moves when what it counts happens in the engine."""

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from pagedjax.core.errors import RequestError
from pagedjax.core.request import SamplingParams
from pagedjax.engine.bulk_histogram import BulkHistogram
from pagedjax.engine.tenant_metrics import MAX_LABELS, OTHER
from tests.engine.fakes import make_engine

LONG = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


def value(engine, name, **labels):
    """0 for a series that is not there yet."""
    return engine.metrics.registry.get_sample_value(name, labels) or 0.0


def total(engine, name):
    """Over all labels."""
    samples = [s for family in engine.metrics.registry.collect() for s in family.samples if s.name == name]
    return sum(sample.value for sample in samples)


def test_every_outcome_of_requests_is_there_before_the_first():
    engine = make_engine()
    outcomes = ("stop", "length", "abort", "timeout", "refused", "error")
    name = "pagedjax_requests_total"
    assert [engine.metrics.registry.get_sample_value(name, {"outcome": one}) for one in outcomes] == [0.0] * 6


def crowded(**options):
    limits = {"num_gpu_blocks_override": 12, "num_host_blocks": 40, "preemption_method": "swap", "time_slice": 0}
    return make_engine(**{**limits, "min_execution_chunk": 0, "tenant_weights": "gold=3,bronze=1", **options})


def run_both_tenants(engine):
    """More than the device holds, and then somebody of a better rank."""
    for i in range(4):
        engine.add(engine.prepare([i, 2, 3, 4, 5], LONG, request_id=f"b{i}", tenant="bronze", priority=2))
    for _ in range(6):
        engine.step()
    engine.add(engine.prepare([9, 8, 7], LONG, request_id="g", tenant="gold", priority=-2))
    while not engine.is_idle:
        engine.step()
    return engine


@pytest.fixture(scope="module")
def swapped():
    return run_both_tenants(crowded())


@pytest.fixture(scope="module")
def recomputed():
    return run_both_tenants(crowded(num_host_blocks=0, preemption_method="recompute"))


def test_preemptions_are_counted_by_reason_and_method(swapped, recomputed):
    for engine, method in ((swapped, "swap"), (recomputed, "recompute")):
        assert value(engine, "pagedjax_preemption_count_total", reason="memory", method=method) > 0
        assert value(engine, "pagedjax_preemption_count_total", reason="priority", method=method) > 0


@pytest.mark.parametrize(
    "name",
    [
        "pagedjax_state_save_time_seconds",
        "pagedjax_context_switch_time_seconds",
        "pagedjax_request_wait_time_seconds",
    ],
)
def test_times_are_observed(swapped, name):
    assert value(swapped, f"{name}_count") > 0
    assert value(swapped, f"{name}_sum") > 0


def test_bytes_are_counted_both_ways(swapped, recomputed):
    for direction in ("in", "out"):
        assert value(swapped, "pagedjax_swap_bytes_total", tier="host", direction=direction) > 0
    assert total(recomputed, "pagedjax_swap_bytes_total") == 0


def test_tokens_that_are_lost_are_counted(swapped, recomputed):
    assert value(recomputed, "pagedjax_recomputed_tokens_total") > 0
    assert value(swapped, "pagedjax_recomputed_tokens_total") == 0


def test_blocks_that_were_copied_and_those_that_had_a_copy_are_told_apart(swapped):
    for copy in ("dirty", "clean"):
        assert value(swapped, "pagedjax_parked_blocks_total", copy=copy) > 0


def test_blocks_in_use_are_told_by_tier():
    engine = crowded()
    for i in range(4):
        engine.add(engine.prepare([i, 2, 3, 4, 5], LONG, request_id=str(i)))
    most = {"device": 0.0, "host": 0.0}
    while not engine.is_idle:
        engine.step()
        for tier in most:
            usage = value(engine, "pagedjax_kv_cache_usage_ratio", tier=tier)
            assert (
                usage == value(engine, "pagedjax_kv_blocks", tier=tier, state="held") / {"device": 12, "host": 40}[tier]
            )
            most[tier] = max(most[tier], usage)
    assert most["device"] > 0.8 and most["host"] > 0
    assert value(engine, "pagedjax_kv_cache_usage_ratio", tier="device") == 0


def test_each_tenant_has_its_own_series(swapped):
    served = {name: value(swapped, "pagedjax_tenant_service_tokens_total", tenant=name) for name in ("gold", "bronze")}
    assert served == {"gold": 3 + 2 * 30, "bronze": 4 * (5 + 2 * 30)}
    waits = {name: value(swapped, "pagedjax_tenant_wait_time_seconds_count", tenant=name) for name in served}
    assert waits == {"gold": 1, "bronze": 4}


def test_who_runs_and_who_waits_is_told_by_tenant():
    engine = make_engine(max_num_seqs=2)
    for i in range(5):
        engine.add(engine.prepare("abc", LONG, request_id=str(i), tenant="gold" if i else "bronze"))
    engine.step()
    assert value(engine, "pagedjax_tenant_requests_running", tenant="gold") == 1
    assert value(engine, "pagedjax_tenant_requests_running", tenant="bronze") == 1
    assert value(engine, "pagedjax_tenant_requests_waiting", tenant="gold") == 3
    engine.abort_all()
    assert value(engine, "pagedjax_tenant_requests_running", tenant="gold") == 0


def test_refusals_are_told_by_tenant():
    engine = make_engine(max_queued_requests=1)
    engine.add(engine.prepare("abc", LONG, request_id="a", tenant="gold"))
    late = engine.prepare("abc", LONG, request_id="b", tenant="bronze")
    with pytest.raises(RequestError):
        engine.check([late])
    with pytest.raises(RequestError):
        engine.add(late)
    assert value(engine, "pagedjax_tenant_requests_refused_total", tenant="bronze") == 2


def test_names_that_callers_think_of_do_not_make_labels_without_end():
    engine = make_engine()
    short = SamplingParams(temperature=0, max_tokens=1)
    for i in range(MAX_LABELS + 20):
        engine.add(engine.prepare("abc", short, request_id=str(i), tenant=f"t{i}"))
    while engine.has_work:
        engine.step()
    for name in ("pagedjax_tenant_service_tokens_total", "pagedjax_tenant_wait_time_seconds_count"):
        samples = [s for family in engine.metrics.registry.collect() for s in family.samples if s.name == name]
        assert len(samples) == MAX_LABELS + 1
        assert total(engine, name) == (MAX_LABELS + 20) * (5 if "service" in name else 1)
    assert value(engine, "pagedjax_tenant_wait_time_seconds_count", tenant=OTHER) == 20


def test_a_counter_of_service_never_falls():
    engine = make_engine()
    engine.add(engine.prepare("0123456789", SamplingParams(temperature=0, max_tokens=40), request_id="r"))
    seen = []
    while engine.has_work:
        engine.step()
        seen.append(value(engine, "pagedjax_tenant_service_tokens_total", tenant="default"))
    assert seen == sorted(seen) and seen[-1] > 0


def test_names_are_prometheus_own(swapped):
    for family in swapped.metrics.registry.collect():
        if family.name.startswith("process_"):
            continue
        assert family.name.startswith("pagedjax_")
        if family.type == "histogram":
            assert family.name.endswith(("_seconds", "_tokens"))
        assert "_time" not in family.name or family.name.endswith("_seconds")


@pytest.mark.parametrize("seen", [[], [0.005], [0.001, 0.005, 0.0050001, 0.04, 7.0, 7.0]])
def test_a_histogram_in_bulk_shows_what_the_clients_own_shows(seen, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1_790_000_000.5)
    bounds = (0.005, 0.04, 2.0)
    registry, other = CollectorRegistry(), CollectorRegistry()
    expected = Histogram("seconds", "Some.", buckets=bounds, registry=registry)
    found = BulkHistogram("seconds", "Some.", bounds)
    other.register(found)
    for value in set(seen):
        found.observe(value, seen.count(value))
    for value in seen:
        expected.observe(value)
    shown = generate_latest(registry).decode().splitlines()
    assert "seconds_created 1.7900000005e+09" in shown
    assert generate_latest(other).decode().splitlines() == shown
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        Counter("seconds_count", "Others.", registry=other)


def test_every_token_but_the_first_is_a_gap_between_tokens():
    engine = make_engine()
    for i in range(3):
        engine.add(engine.prepare([i, 2, 3], LONG, request_id=str(i)))
    while engine.has_work:
        engine.step()
    assert value(engine, "pagedjax_inter_token_latency_seconds_count") == 3 * 29
