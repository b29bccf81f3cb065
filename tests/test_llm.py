"""The offline door, over the counting device."""

import re
import signal
from array import array

import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax import llm as module
from pagedjax.core.errors import ConfigError, RequestError
from pagedjax.core.events import Arrived
from pagedjax.core.request import SamplingParams
from tests.engine.fakes import make_engine


def shown(value):
    """A value as its test is called, which must be the same in every process."""
    return re.sub(r" at 0x\w+", "", repr(value))


@pytest.fixture
def llm(monkeypatch):
    monkeypatch.setattr(module, "build_engine", lambda config, progress: make_engine())
    return module.LLM()


def params(**fields):
    return SamplingParams(**{"temperature": 0, "max_tokens": 3, **fields})


def texts(outputs):
    return [output.outputs[0].text for output in outputs]


@pytest.mark.parametrize(
    "prompt",
    [
        "abc",
        [0, 1, 2],
        (0, 1, 2),
        np.arange(3),
        np.arange(3, dtype=np.uint8),
        jnp.arange(3),
        list(np.arange(3)),
        list(jnp.arange(3)),
        array("i", [0, 1, 2]),
        range(3),
        {"prompt": "abc"},
        {"prompt_token_ids": [0, 1, 2]},
        {"prompt_token_ids": np.arange(3)},
    ],
    ids=repr,
)
def test_a_prompt_may_have_any_of_these_shapes_alone_or_among_others(llm, prompt):
    assert texts(llm.generate(prompt, params())) == ["def"]
    assert texts(llm.generate([prompt, "ABC"], params())) == ["def", "DEF"]


def test_prompts_and_their_parameters_may_come_from_any_iterable(llm):
    each = (params(max_tokens=n) for n in (1, 2))
    assert texts(llm.generate((prompt for prompt in ["abc", [0, 1]]), each, priority=np.array([1, 0]))) == ["d", "cd"]
    assert texts(llm.generate(np.array([[0, 1], [3, 4]]), params())) == ["cde", "fgh"]
    assert texts(llm.generate(np.array(["abc", "ABC"]), params())) == ["def", "DEF"]
    assert texts(llm.generate(iter([0, 1]), params())) == ["cde"]


@pytest.mark.parametrize("none", [[], (), iter(()), np.array([])], ids=shown)
def test_no_prompts_give_no_results(llm, none):
    assert llm.generate(none) == []
    assert llm.chat(none) == []


@pytest.mark.parametrize(
    "prompt",
    [
        *(None, 5, 0.5, True, object(), b"abc", bytearray(b"abc"), memoryview(b"abc"), "", {}, {"text": "abc"}),
        *([0.5], [None], [[]], [True], [0, "b"], ["b", 0], [[0, "b"]], [0, None], [b"abc"], ["abc", None]),
        *({"prompt": None}, {"prompt": 5}, {"prompt_token_ids": 5}, {"prompt": "a", "prompt_token_ids": [0]}),
        *(np.array(5), np.array([0.5]), np.array([[[1]]]), [-1], [64], [2**70]),
    ],
    ids=shown,
)
def test_what_is_no_prompt_is_refused(llm, prompt):
    with pytest.raises(RequestError):
        llm.generate(prompt)


@pytest.mark.parametrize(
    "options",
    [
        *({"sampling_params": wrong} for wrong in ({"n": 1}, "abc", 5, [], [None], [{}])),
        *({"priority": wrong} for wrong in (None, "0", 0.5, [], ["0"], 9)),
    ],
    ids=shown,
)
def test_what_is_no_parameter_is_refused(llm, options):
    with pytest.raises(RequestError) as refusal:
        llm.generate(["abc"], **options)
    assert refusal.value.param in options


@pytest.mark.parametrize(
    "messages",
    [*(None, 5, "hi", b"hi", {"role": "user", "content": "hi"}, ["hi"], [None], [5], [{"role": "user"}, "hi"], [[5]])],
    ids=shown,
)
def test_what_is_no_conversation_is_refused(llm, messages):
    with pytest.raises(RequestError) as refusal:
        llm.chat(messages)
    assert refusal.value.param == "messages"


def test_conversations_may_come_from_any_iterable(llm):
    hi, bye = ({"role": "user", "content": text} for text in ("abc", "ABC"))
    assert texts(llm.chat([hi], params())) == ["def"]
    assert texts(llm.chat(iter([hi]), params())) == ["def"]
    assert texts(llm.chat((iter([each]) for each in (hi, bye)), params())) == ["def", "DEF"]


def test_results_are_in_the_prompts_order_with_parameters_of_their_own(llm):
    outputs = llm.generate(["abc", "xyz", "ABC"], [params(max_tokens=n) for n in (9, 1, 2)], priority=[1, 0, 0])
    assert texts(outputs) == ["defghijkl", "A", "DE"]
    assert [output.prompt for output in outputs] == ["abc", "xyz", "ABC"]
    assert all(output.finished for output in outputs)


def test_parameters_for_another_number_of_prompts_are_refused(llm):
    with pytest.raises(RequestError, match="2 entries for 1"):
        llm.generate(["abc"], [params()] * 2)


def test_output_ends_with_the_context_whatever_max_tokens(llm):
    (output,) = llm.generate("a" * 60, params(max_tokens=500, min_tokens=100, ignore_eos=True))
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (4, "length")


def test_a_prompt_that_fills_the_context_is_refused_and_nothing_runs(llm):
    with pytest.raises(RequestError) as refusal:
        llm.generate(["abc", "a" * 64], params())
    assert refusal.value.code == "context_length_exceeded"
    assert not llm.engine.has_work


def test_unknown_options_are_named_with_the_known_ones():
    with pytest.raises(ConfigError, match="unknown option max_seqs; known are"):
        module.LLM(max_seqs=3)


@pytest.fixture
def interruptible():
    """Python's own Ctrl-C, whatever the tests were started under."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("part", ["dispatch", "collect"])
def test_after_an_interrupt_in_mid_step_the_next_call_is_answered(llm, interruptible, monkeypatch, part):
    runner, calls = llm.engine.runner, []
    original = getattr(runner, part)

    def interrupted(argument):
        calls.append(argument)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return original(argument)

    monkeypatch.setattr(runner, part, interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abc"] * 9, params(max_tokens=30))
    assert not llm.engine.state.running and not llm.engine.state.pool.counts
    assert texts(llm.generate("abc", params())) == ["def"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_third_interrupt_breaks_off_a_step_that_hangs(llm, interruptible, monkeypatch):
    def hanging(_plan):
        while True:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(llm.engine.runner, "dispatch", hanging)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("abc", params())


def test_each_prompt_may_have_a_tenant_and_must_not_be_preempted(llm, monkeypatch):
    heard, update = [], llm.engine._send

    def listen(event):
        heard.append(event)
        update(event)

    monkeypatch.setattr(llm.engine, "_send", listen)
    llm.generate(["abc", "ABC"], params(), tenant=["gold", "default"], preemptible=[False, True])
    llm.generate(["abc"], params(), tenant="gold")
    requests = [event.request for event in heard if isinstance(event, Arrived)]
    assert [request.tenant for request in requests] == ["gold", "default", "gold"]
    assert [request.preemptible for request in requests] == [False, True, True]


def test_weights_may_be_given_as_a_mapping():
    config = module.make_config("m", {"tenant_weights": {"gold": 3, "bronze": 1}})
    assert config.tenant_weights == "gold=3,bronze=1"
