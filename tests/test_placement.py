"""Where `pagedjax serve` puts the engine."""

import pytest

from pagedjax.cli import placement


@pytest.mark.parametrize(
    ("choice", "num_cores", "expected"),
    [("auto", 1, False), ("auto", 2, True), ("on", 1, True), ("off", 64, False)],
)
def test_the_engine_has_its_own_process_by_wish_or_where_there_is_a_core_for_it(
    monkeypatch, choice, num_cores, expected
):
    monkeypatch.setattr(placement, "num_cores", lambda: num_cores)
    assert placement.has_own_process(choice) is expected


def test_there_is_a_core_to_run_this_on():
    assert placement.num_cores() >= 1
