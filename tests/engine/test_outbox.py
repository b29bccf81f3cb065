"""What gathers on its way to the engine's process."""

import asyncio

from pagedjax.engine.outbox import MAX_GATHERED, MAX_WAIT_S, QUIET_TURNS, Outbox


def sent(*turns_between, turn_s=0.0):
    """What is sent when messages 0, 1, 2, … are put with so many turns of the loop between them, `turn_s` long each."""

    async def main():
        batches, now_s = [], 0.0
        outbox = Outbox(batches.append, lambda: now_s)
        for message, num_turns in enumerate((*turns_between, 2 * QUIET_TURNS)):
            outbox.put(message)
            for _ in range(num_turns):
                now_s += turn_s
                await asyncio.sleep(0)
        return batches

    return asyncio.run(main())


def test_what_comes_alone_is_sent_after_a_few_turns():
    assert sent(QUIET_TURNS + 1) == [[0], [1]]


def test_what_comes_together_is_sent_together():
    assert sent(0, 1, QUIET_TURNS - 1) == [[0, 1, 2, 3]]


def test_nothing_waits_for_more_than_a_few_others():
    assert sent(*[1] * (MAX_GATHERED + 1)) == [list(range(MAX_GATHERED)), [MAX_GATHERED, MAX_GATHERED + 1]]


def test_nothing_waits_for_turns_that_take_long():
    assert sent(1, 1, turn_s=MAX_WAIT_S) == [[0], [1], [2]]
    assert sent(1, 1, 1, turn_s=MAX_WAIT_S / 2) == [[0, 1], [2, 3]]
