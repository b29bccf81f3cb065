"""Token ids on the host."""

import pytest

from pagedjax.core.errors import SchedulerError
from pagedjax.core.request import SamplingParams
from pagedjax.runtime.tokens import TokenTable


def make_table(prompt=(3, 4), **params):
    table = TokenTable()
    table.add(1, prompt, SamplingParams(**params), seed=5, stop_token_ids=[9, 2, 9])
    return table


def test_accepted_tokens_follow_the_prompt_however_many_there_are():
    table = make_table()
    for token_id in range(90):
        table.append(1, token_id)
    assert table.tokens(1).tolist() == [3, 4, *range(90)]
    assert table.get(1).prompt_len == 2


def test_stop_ids_are_kept_once_each():
    assert make_table().get(1).stop_token_ids == (2, 9)


def test_tokens_are_a_copy():
    table = make_table()
    table.tokens(1)[0] = 77
    assert table.tokens(1).tolist() == [3, 4]


def test_a_dropped_sequence_is_gone_and_may_be_dropped_again():
    table = make_table()
    table.drop(1)
    table.drop(1)
    assert 1 not in table
    with pytest.raises(SchedulerError, match="sequence 1"):
        table.entries((1,))


def test_a_sequence_is_added_once():
    with pytest.raises(SchedulerError, match="already"):
        make_table().add(1, [1], SamplingParams(), seed=0)
