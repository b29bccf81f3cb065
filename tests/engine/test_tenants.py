"""The policy's settings and the tenants, from the engine's side."""

import pytest

from pagedjax.core.errors import ConfigError, RequestError
from pagedjax.core.presets import PRESETS
from pagedjax.core.request import SamplingParams
from pagedjax.engine.config import EngineConfig, resolve
from tests.engine.fakes import make_engine
from tests.runtime.tiny import CONFIG


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_decides_what_is_not_set(preset):
    scheduler = resolve(EngineConfig(preset=preset), CONFIG, platform="cpu").scheduler(num_blocks=8)
    assert {name: getattr(scheduler, name) for name in PRESETS[preset]} == PRESETS[preset]


def test_what_is_set_wins_over_the_preset():
    config = EngineConfig(preset="batch", time_slice=0, enable_preemption=False, tenant_weights="gold=3,bronze=1")
    scheduler = resolve(config, CONFIG, platform="cpu").scheduler(num_blocks=8)
    assert (scheduler.time_slice, scheduler.enable_preemption) == (0, False)
    assert scheduler.preemption_mode == PRESETS["batch"]["preemption_mode"]
    assert scheduler.tenant_weights == (("bronze", 1), ("gold", 3))


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({"preset": "quick"}, "--preset"),
        ({"time_slice": -5}, "--time-slice"),
        ({"preemption_mode": "bold"}, "--preemption-mode"),
        ({"max_wait_s": -1.0}, "--max-wait-s"),
        ({"fairness_threshold": 2.0}, "--fairness-threshold"),
        ({"tenant_weights": "gold"}, "--tenant-weights"),
    ],
    ids=str,
)
def test_an_impossible_setting_is_refused_with_its_flag(fields, flag):
    with pytest.raises(ConfigError, match=flag):
        EngineConfig(**fields)


def prepared(tenant, **options):
    return make_engine().prepare(
        list(range(32)), SamplingParams(max_tokens=4), request_id="r", tenant=tenant, **options
    )


def test_the_scheduler_hears_of_the_tenant_and_of_what_must_not_be_preempted():
    request = prepared("gold", preemptible=False).for_scheduler(7)
    assert (request.tenant, request.preemptible) == ("gold", False)
    request = prepared("default").for_scheduler(7)
    assert (request.tenant, request.preemptible) == ("default", True)


def test_tenants_share_no_prefix():
    names = [set(prepared(tenant).block_hashes) for tenant in ("default", "gold", "silver")]
    assert names[0] and not (names[0] & names[1] or names[1] & names[2] or names[0] & names[2])
    assert prepared("gold").block_hashes == prepared("gold").block_hashes


def test_generated_blocks_of_tenants_are_not_shared_either():
    """Their names go on from the tenant's root, where the prompt has no full block too."""
    engine = make_engine()
    for tenant in ("gold", "silver"):
        engine.add(engine.prepare("a", SamplingParams(max_tokens=40), request_id=tenant, tenant=tenant))
    while engine.has_work:
        engine.step()
    size = engine.state.config.block_size
    num_full = (1 + 40 - 1) // size
    assert len(engine.state.pool.cached) == 2 * num_full > 0


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "a\n", 'a"', "grün", 5, None])
def test_a_name_that_is_none_is_refused(name):
    with pytest.raises(RequestError) as refused:
        prepared(name)
    assert refused.value.param == "tenant"


def test_who_sends_another_salt_finds_nothing_of_a_prompt():
    engine, cached = make_engine(), []
    for number, salt in enumerate(("", "mine", "mine", "other")):
        params = SamplingParams(max_tokens=8)
        request = engine.prepare("abcdefghijkl", params, request_id=str(number), cache_salt=salt)
        engine.add(request)
        while engine.has_work:
            cached += [update.num_cached_tokens for update in engine.step() if update.delta.finish_reason]
    assert cached == [0, 0, 8, 0]
