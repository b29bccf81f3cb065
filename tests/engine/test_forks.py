"""Parallel sampling: the sequences of one request share its prompt's blocks, and what they give does not show it."""

from math import ceil

import pytest

from pagedjax.core.effects import CopyBlocks
from pagedjax.core.errors import RequestError
from pagedjax.core.events import Aborted
from pagedjax.core.invariants import check
from pagedjax.core.request import SamplingParams
from pagedjax.engine.outputs import add_update, empty_output
from tests.engine.fakes import EOS, make_engine, num_preemptions, run
from tests.engine.forcing import KINDS, run_forced, use

N, BLOCK_SIZE = 8, 4
RANDOM = {"temperature": 1.3, "seed": 11, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "logprobs": 2}
PROMPT = [5, 9, 2, 40, 17, 33, 8, 100, 3, 77]


def params(**fields) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 5, **fields})


def num_planned_tokens(engine) -> float:
    return engine.metrics.step_tokens._sum.get()


def note_copies(engine) -> list[tuple[int, int]]:
    """What will have been copied."""
    pairs, copy_blocks = [], engine.runner.copy_blocks

    def noting(effect: CopyBlocks) -> None:
        pairs.extend(effect.pairs)
        copy_blocks(effect)

    engine.runner.copy_blocks = noting
    return pairs


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize(("prompt_len", "max_tokens"), [(9, 5), (9, 10), (8, 6), (11, 1), (3, 4), (1, 30), (40, 9)])
def test_n_samples_hold_the_papers_number_of_blocks(prompt_len, max_tokens, enable_prefix_caching):
    engine = make_engine(max_num_seqs=N, max_num_batched_tokens=64, enable_prefix_caching=enable_prefix_caching)
    wish = params(n=N, max_tokens=max_tokens, ignore_eos=True)
    output, most = run(engine, [i % 40 for i in range(prompt_len)], wish)
    # The last sampled token is never computed.
    num_shared, total = prompt_len // BLOCK_SIZE, prompt_len + max_tokens - 1
    assert most <= num_shared + N * (ceil(total / BLOCK_SIZE) - num_shared)
    assert [len(c.token_ids) for c in output.outputs] == [max_tokens] * N


@pytest.mark.parametrize("prompt_len", [1, 8, 9, 14, 33])
def test_the_prompt_is_computed_once_and_its_tail_copied_for_all_but_one(prompt_len):
    engine = make_engine(max_num_seqs=N, enable_prefix_caching=False)
    copies = note_copies(engine)
    run(engine, [i % 40 for i in range(prompt_len)], params(n=N, max_tokens=6))
    # Each of the others runs the prompt's last token once more, for its logits.
    assert num_planned_tokens(engine) == prompt_len + (N - 1) + N * 5
    assert len(copies) == (N - 1 if prompt_len % BLOCK_SIZE else 0)
    assert len(set(copies)) == len(copies)


def test_a_tail_that_the_first_sample_fills_at_once_is_computed_by_each():
    engine = make_engine(max_num_seqs=N, enable_prefix_caching=False)
    copies = note_copies(engine)
    run(engine, list(range(11)), params(n=N, max_tokens=6))
    assert num_planned_tokens(engine) == 11 + (N - 1) * 3 + N * 5
    assert not copies


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize(("prompt", "expected"), [("abc", "d"), ("0123456789 ", "")])
def test_a_first_sample_that_ends_with_its_first_token_takes_nobody_along(prompt, expected, async_scheduling):
    engine = make_engine(async_scheduling=async_scheduling)
    output, _ = run(engine, prompt, params(n=6, max_tokens=1 if expected else 9))
    assert [c.text for c in output.outputs] == [expected] * 6
    assert expected or all(c.token_ids == [EOS] for c in output.outputs)


def test_more_samples_than_slots_all_come_to_run():
    output, _ = run(make_engine(), "abcdefghi", params(n=11))
    assert [c.text for c in output.outputs] == ["jklmn"] * 11


def test_samples_that_come_to_run_after_the_first_one_has_ended_share_with_others():
    engine = make_engine(max_num_seqs=3, enable_prefix_caching=False)
    output, _ = run(engine, "abcdefghij", params(n=9, max_tokens=6))
    assert [c.text for c in output.outputs] == ["klmnop"] * 9
    # Each of the others computes the tail's two tokens anew, at most.
    assert num_planned_tokens(engine) <= 10 + 8 * 2 + 9 * 5


@pytest.mark.parametrize("num_steps", range(5))
def test_an_abort_frees_the_samples_that_run_and_those_that_wait(num_steps):
    engine = make_engine(max_num_seqs=2, max_num_batched_tokens=4)
    engine.add(engine.prepare("abcdefghi", params(n=5, max_tokens=30), request_id="r"))
    for _ in range(num_steps):
        engine.step()
    engine.abort("r")
    while engine.has_work:
        assert engine.step() == []
    check(engine.state)
    assert not engine.state.pool.counts and not engine.state.waiting.places and not engine.runner.slots


@pytest.mark.parametrize("num_steps", range(6))
def test_samples_whose_first_one_is_gone_go_on_without_it(num_steps):
    engine = make_engine(max_num_seqs=2, max_num_batched_tokens=4)
    request = engine.prepare("abcdefghi", params(n=5), request_id="r")
    output = empty_output(request)
    engine.add(request)
    updates = [update for _ in range(num_steps) for update in engine.step()]
    engine._send(Aborted(0, engine.state.now_us))
    while engine.has_work:
        updates += engine.step()
        check(engine.state)
    for update in updates:
        add_update(output, update)
    assert [c.text for c in output.outputs[1:]] == ["jklmn"] * 4


def test_a_full_queue_refuses_all_samples_though_the_first_one_was_in_line():
    engine = make_engine(max_queued_requests=2)
    with pytest.raises(RequestError) as refusal:
        engine.add(engine.prepare("abc", params(n=3), request_id="r"))
    assert refusal.value.code == "queue_full"
    assert not engine.has_work and not engine.state.waiting.places and not engine.runner.tokens


def test_samples_of_a_step_that_failed_are_computed_anew():
    engine = make_engine()
    engine.runner.fail_at_plan = 2
    output, _ = run(engine, "abcdefghi", params(n=4))
    assert [c.text for c in output.outputs] == ["jklmn"] * 4


@pytest.mark.parametrize("num_tokens", [8, 9, 10], ids=lambda n: f"prompt of {n}")
def test_samples_are_those_of_requests_with_their_seeds(tiny_engine, num_tokens):
    prompt, wish, recompiles = PROMPT[:num_tokens], {**RANDOM, "max_tokens": 12}, tiny_engine.runner.recompiles
    use(tiny_engine, "recompute", num_blocks=64)
    together, _ = run(tiny_engine, prompt, SamplingParams(n=4, **wish))
    for i, sample in enumerate(together.outputs):
        use(tiny_engine, "recompute", num_blocks=64)
        alone = run(tiny_engine, prompt, SamplingParams(**{**wish, "seed": 11 + i}))[0].outputs[0]
        assert sample.token_ids == alone.token_ids
        assert sample.cumulative_logprob == pytest.approx(alone.cumulative_logprob, abs=1e-3)
        assert [list(entry) for entry in sample.logprobs] == [list(entry) for entry in alone.logprobs]
    assert len({tuple(sample.token_ids) for sample in together.outputs}) == 4
    assert tiny_engine.runner.recompiles == recompiles


def test_prompt_logprobs_are_those_of_one_sample_and_the_prompt_is_still_shared(tiny_engine):
    use(tiny_engine, "recompute", num_blocks=64)
    alone, _ = run(tiny_engine, PROMPT, SamplingParams(**RANDOM, prompt_logprobs=1, max_tokens=6))
    before = num_planned_tokens(tiny_engine)
    together, most = run(tiny_engine, PROMPT, SamplingParams(**RANDOM, prompt_logprobs=1, max_tokens=6, n=4))
    assert num_planned_tokens(tiny_engine) - before == len(PROMPT) + 3 + 4 * 5
    assert most <= 2 + 4 * 2
    assert [first_logprob(entry) for entry in together.prompt_logprobs] == pytest.approx(
        [first_logprob(entry) for entry in alone.prompt_logprobs], abs=1e-4
    )
    assert together.outputs[0].token_ids == alone.outputs[0].token_ids


@pytest.mark.parametrize("logprobs", [None, 2])
def test_the_best_of_many_samples_are_those_with_the_highest_logprob_per_token(tiny_engine, logprobs):
    wish = {**RANDOM, "max_tokens": 12, "stop_token_ids": list(range(0, 300, 7))}
    use(tiny_engine, "recompute", num_blocks=64)
    every = run(tiny_engine, PROMPT, SamplingParams(n=6, **wish))[0].outputs
    ranked = sorted(every, key=lambda one: -one.cumulative_logprob / len(one.token_ids))
    # Neither the first ones nor those with the highest log-probability in all, which are the shortest.
    assert [one.index for one in ranked[:2]] != [0, 1]
    assert ranked[0] is not max(every, key=lambda one: one.cumulative_logprob)
    use(tiny_engine, "recompute", num_blocks=64)
    found = run(tiny_engine, PROMPT, SamplingParams(n=2, best_of=6, **{**wish, "logprobs": logprobs}))[0].outputs
    assert [(c.index, c.token_ids) for c in found] == [(i, c.token_ids) for i, c in enumerate(ranked[:2])]
    assert [(c.text, c.finish_reason, c.stop_reason) for c in found] == [
        (c.text, c.finish_reason, c.stop_reason) for c in ranked[:2]
    ]
    assert [c.logprobs for c in found] == ([c.logprobs for c in ranked[:2]] if logprobs else [None, None])


@pytest.mark.parametrize("n", [1, 3])
def test_the_best_come_out_together_once_all_samples_have_ended(tiny_engine, n):
    use(tiny_engine, "recompute", num_blocks=64)
    tiny_engine.add(tiny_engine.prepare(PROMPT, SamplingParams(n=n, best_of=4, **RANDOM), request_id="r"))
    steps = []
    while tiny_engine.has_work:
        steps.append(tiny_engine.step())
    (last,) = [updates for updates in steps if updates]
    assert [(u.delta.index, u.delta.finish_reason) for u in last] == [(i, "length") for i in range(n)]


def test_a_queue_must_take_all_samples_of_which_the_best_are_wanted():
    engine = make_engine(max_queued_requests=3)
    with pytest.raises(RequestError, match="1 prompt with best_of=4"):
        engine.check([engine.prepare("abc", params(best_of=4), request_id="r")])


def first_logprob(entry) -> float:
    return 0.0 if entry is None else next(iter(entry.values())).logprob


@pytest.mark.parametrize("num_blocks", [64, 10])
def test_a_preempted_sample_goes_on_as_if_nothing_had_been(tiny_engine, num_blocks):
    wish = SamplingParams(**RANDOM, n=4, max_tokens=16)

    def request():
        return tiny_engine.prepare(PROMPT, wish, request_id="r")

    use(tiny_engine, "recompute", num_blocks=64)
    expected = run_forced(tiny_engine, [request()], every=0)
    before = num_preemptions(tiny_engine)
    for seed in range(3):
        use(tiny_engine, "recompute", num_blocks=num_blocks)
        assert run_forced(tiny_engine, [request()], every=3, seed=seed) == expected
    assert num_preemptions(tiny_engine) - before > 5


@pytest.mark.parametrize("kind", KINDS)
def test_swapped_samples_read_what_they_wrote(kind):
    engine = make_engine(num_gpu_blocks_override=64)
    requests = [engine.prepare("abcdefghi", params(n=3, max_tokens=20), request_id=name) for name in "xy"]
    expected = run_forced(engine, requests, every=0)
    use(engine, kind, num_blocks=12)
    assert run_forced(engine, requests, every=2) == expected
    assert num_preemptions(engine) > 5
