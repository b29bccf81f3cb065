"""What the routes that tell what was refuse, and how they show a life."""

import pytest

from pagedjax.engine.lives import LifeStory, Moment


def life(request_id):
    moments = (
        Moment(5000, 17, "queued", {}),
        Moment(5000, 18, "queued", {}),
        Moment(6500, 17, "prefill", {"step": 3, "start": 0, "tokens": 8}),
    )
    return LifeStory(request_id, "gold", 1, 8, 20, 1.79e9, False, 0, moments)


def test_times_are_since_the_arrival_and_sequences_numbered_from_0(client, engine):
    engine.stories["cmpl-abc"] = [life("cmpl-abc")]
    (shown,) = client.get("/debug/requests/abc").json()["prompts"]
    assert (shown["state"], shown["tenant"], shown["arrived"]) == ("open", "gold", 1.79e9)
    assert [(event["at_ms"], event["sequence"]) for event in shown["events"]] == [(0, 0), (0, 1), (1.5, 0)]
    assert shown["events"][2] == {"at_ms": 1.5, "event": "prefill", "sequence": 0, "step": 3, "start": 0, "tokens": 8}


def test_a_request_that_nobody_knows_is_404(client):
    answer = client.get("/debug/requests/cmpl-none")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "not_found"


@pytest.mark.parametrize("since", ["x", "", "1.5", "9" * 40, "²"])
def test_steps_since_what_is_no_number_are_refused(client, since):
    answer = client.get("/debug/steps", params={"since": since})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "since"
