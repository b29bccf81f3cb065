"""Structured output: whatever else is in the batch, each output has its shape, and nobody else's is changed."""

import json
import random
import re
import threading
from dataclasses import replace

import jsonschema
import numpy as np
import pytest

from pagedjax.core.errors import RequestError
from pagedjax.core.request import SamplingParams
from pagedjax.core.structure import MAX_GRAMMAR_BYTES, StructuredOutputsParams
from pagedjax.engine import grammar
from pagedjax.engine.grammar import Grammars, GrammarState
from tests.engine.fakes import TinyTokenizer
from tests.engine.forcing import KINDS, run_forced, use

SHAPES = {
    "regex": ({"regex": "[a-f]{3,9} [0-9]+x"}, "[a-f]{3,9} [0-9]+x"),
    "choice": ({"choice": ["yes", "no", "yesterday 7"]}, "yes|no|yesterday 7"),
    "lark": ({"grammar": 'start: "A" WORD "Z"\nWORD: /[a-z]{2,6}/'}, "A[a-z]{2,6}Z"),
    "gbnf": ({"grammar": 'root ::= "a" [0-9] [0-9] ("b" | "cd")'}, "a[0-9][0-9](b|cd)"),
}
PROMPTS = [[5, 9, 2, 40, 17, 33, 8, 100, 3], [7], [250, 251, 252, 253, 254], [60, 61, 60, 61, 60, 61, 60]]
RANDOM = {"temperature": 1.5, "seed": 5, "max_tokens": 24}


def shaped(shape, **options):
    return SamplingParams(structured_outputs=StructuredOutputsParams(**shape), **{**RANDOM, **options})


def prepared(engine, params):
    """A request for each prompt, with its own parameters."""
    return [engine.prepare(p, w, request_id=str(i)) for i, (p, w) in enumerate(zip(PROMPTS, params))]


def texts(engine, params, **options):
    found = run_forced(engine, prepared(engine, params), **{"every": 0, **options})
    return [engine.tokenizer.decode(ids) for ids in found]


def is_begun(pattern, text):
    """Whether the text is all of such an output, or the beginning of one that max_tokens cut off."""
    return re.fullmatch(pattern, text) or len(text) == RANDOM["max_tokens"]


@pytest.fixture
def engine(tiny_engine):
    use(tiny_engine, "recompute", num_blocks=64)
    return tiny_engine


@pytest.mark.parametrize("name", SHAPES)
def test_an_output_has_its_shape(engine, name):
    shape, pattern = SHAPES[name]
    for seed in range(6):
        found = texts(engine, [shaped(shape, seed=seed)] * 4)
        assert all(is_begun(pattern, text) for text in found), found


def test_rows_with_and_without_a_shape_do_not_change_each_other(engine):
    free = SamplingParams(**RANDOM)
    alone = texts(engine, [free] * 4)
    recompiles = engine.runner.recompiles
    mixed = texts(engine, [free, shaped(SHAPES["regex"][0]), free, shaped(SHAPES["lark"][0])])
    assert (mixed[0], mixed[2]) == (alone[0], alone[2])
    assert is_begun(SHAPES["regex"][1], mixed[1]) and re.fullmatch(SHAPES["lark"][1], mixed[3])
    assert engine.runner.recompiles == recompiles


def test_each_row_alone_gives_what_it_gives_beside_others(engine):
    params = [shaped(SHAPES[name][0]) for name in SHAPES]
    together = texts(engine, params)
    alone = [run_forced(engine, [request], every=0)[0] for request in prepared(engine, params)]
    assert [engine.tokenizer.decode(ids) for ids in alone] == together


@pytest.mark.parametrize("kind", KINDS)
def test_preemption_does_not_show(tiny_engine, kind):
    params = [shaped({"regex": "([a-e][0-9]){2,40}"}, max_tokens=24, seed=i, repetition_penalty=1.3) for i in range(4)]
    use(tiny_engine, kind, num_blocks=64)
    expected = texts(tiny_engine, params)
    use(tiny_engine, kind, num_blocks=14)
    assert texts(tiny_engine, params, every=2) == expected


def test_one_step_ahead_gives_what_one_at_a_time_gives(engine):
    params = [shaped(SHAPES["regex"][0], seed=3), SamplingParams(**RANDOM), shaped(SHAPES["gbnf"][0], seed=4)]
    ahead = texts(engine, params)
    whole = engine.state
    engine.state = whole._replace(config=replace(whole.config, async_scheduling=False))
    assert texts(engine, params) == ahead
    engine.state = whole


def test_every_sample_of_a_request_has_the_shape_and_its_own_way(engine):
    shape, pattern = SHAPES["regex"]
    (request,) = prepared(engine, [shaped(shape, n=4)])
    found = [engine.tokenizer.decode(ids) for ids in run_forced(engine, [request], every=3)]
    assert len(set(found)) > 1 and all(is_begun(pattern, text) for text in found)


def finished(engine, params):
    """(text, finish reason, stop reason, log-probabilities) of one request."""
    engine.add(engine.prepare(PROMPTS[0], params, request_id="one"))
    deltas = []
    while engine.has_work:
        deltas += [update.delta for update in engine.step()]
    logprobs = [entry for delta in deltas for entry in delta.logprobs or ()]
    return "".join(d.text for d in deltas), deltas[-1].finish_reason, deltas[-1].stop_reason, logprobs


def test_an_output_ends_where_nothing_may_follow(engine):
    assert finished(engine, shaped({"choice": ["abc"]}, min_tokens=20))[:3] == ("abc", "stop", None)


def test_a_stop_string_ends_it_before(engine):
    text, reason, stop, _ = finished(engine, shaped({"regex": "a{5}b{9}"}, stop=["ab"]))
    assert (text, reason, stop) == ("aaaa", "stop", "ab")


def test_log_probabilities_are_the_models_own(engine):
    *_, logprobs = finished(engine, shaped({"regex": "[xyz]{8}"}, logprobs=0))
    ranks = [entry.rank for found in logprobs for entry in found.values()]
    assert len(ranks) == 8 and max(ranks) > 3


def test_a_step_that_fails_costs_no_token(engine):
    params = shaped({"regex": "([a-e][0-9]){9}"})
    expected = finished(engine, params)
    collect, failures = engine.runner.collect, iter([RuntimeError("the device fell over")])

    def failing(handle):
        for failure in failures:
            raise failure
        return collect(handle)

    engine.runner.collect = failing
    try:
        assert finished(engine, params) == expected
    finally:
        engine.runner.collect = collect


@pytest.mark.parametrize("method", ["fill", "accept"])
@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_fault_of_a_grammar_ends_its_request_alone(engine, monkeypatch, method, after):
    free, calls, whole = SamplingParams(**RANDOM), [], getattr(GrammarState, method)
    expected = texts(engine, [free])

    def faulty(self, *arguments):
        calls.append(method)
        if len(calls) > after:
            raise self._params.refusal("too complex")
        return whole(self, *arguments)

    monkeypatch.setattr(GrammarState, method, faulty)
    for request in prepared(engine, [free, shaped({"regex": "[a-z]{20}"})]):
        engine.add(request)
    updates = []
    while engine.has_work:
        updates += engine.step()
    (error,) = [update.error for update in updates if update.error is not None]
    assert isinstance(error, RequestError) and error.param == "structured_outputs"
    free_text = "".join(u.delta.text for u in updates if u.request_id == "0")
    assert [free_text] == expected
    assert not engine.state.running and not engine.state.pool.counts


@pytest.mark.parametrize(
    ("shape", "complaint"),
    [
        ({"regex": "(a"}, "unclosed group"),
        ({"grammar": 'start: "a" | foo'}, "unknown name"),
        ({"grammar": "start: start"}, "no output"),
        ({"json": {"type": "frob"}}, "frob"),
        ({"json": {"uniqueItems": True, "type": "array"}}, "uniqueItems"),
        ({"json": {"allOf": [{"type": "string"}, {"type": "number"}]}}, "Unsatisfiable"),
        ({"json": {"$ref": "http://127.0.0.1:9/schema"}}, "127.0.0.1"),
        ({"json": "{"}, "EOF"),
        ({"regex": "é"}, "no output"),
    ],
)
def test_an_unsound_grammar_is_refused_with_the_reason(engine, shape, complaint):
    with pytest.raises(RequestError, match=complaint) as refusal:
        engine.prepare([1], shaped({**shape, "param": "response_format"}), request_id="one")
    assert (refusal.value.param, refusal.value.code) == ("response_format", "invalid_grammar")


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"regex": "a", "choice": ["b"]},
        {"regex": 5},
        {"choice": "ab"},
        {"choice": []},
        {"choice": ["a", 5]},
        {"choice": [""]},
        {"json": object()},
        {"json": {"a": float("nan")}, "regex": "b"},
        {"regex": "a", "whitespace_pattern": " "},
        {"regex": "a" * (MAX_GRAMMAR_BYTES + 1)},
    ],
)
def test_what_says_no_one_shape_is_refused(shape):
    with pytest.raises(RequestError, match="structured_outputs"):
        StructuredOutputsParams(**shape)


HOSTILE = {
    "nested groups": {"regex": "(" * 5000 + "a" + ")" * 5000},
    "repeated repeats": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    "exponential automaton": {"regex": "(a|b)*a(a|b){200}"},
    "deep schema": {"json": '{"type":"object","properties":{"a":' * 1200 + "true" + "}}" * 1200},
    "product of choices": {
        "json": {"allOf": [{"anyOf": [{"required": [f"p{i}{j}"]} for j in range(4)]} for i in range(9)]}
    },
    "deep rules": {"grammar": "start: " + "(" * 9000 + '"a"' + ")" * 9000},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused_or_harmless(name):
    grammars = Grammars(TinyTokenizer())
    try:
        state = grammars.compile(StructuredOutputsParams(**HOSTILE[name]))
        mask = np.zeros((1, grammars.num_words), np.int32)
        for _ in range(40):
            state.fill(mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            if state.accept(int(allowed[0])):
                break
    except RequestError as refusal:
        assert refusal.code == "invalid_grammar"  # noqa: PT017  (either outcome is right)


def test_equal_grammars_are_compiled_once_and_not_for_ever(monkeypatch):
    monkeypatch.setattr("pagedjax.engine.grammar.MAX_CACHED", 2)
    grammars = Grammars(TinyTokenizer())
    for text in ("a", "b", "a", "c", "d"):
        grammars.compile(StructuredOutputsParams(regex=text))
    assert [key[1] for key in grammars._cached] == ["c", "d"]
    assert grammars._num_cached_bytes == 2


# ---- the real model --------------------------------------------------------------------------------------------------


def random_schema(rng, depth=2):
    kinds = ["string", "integer", "boolean", "null", "enum", "const", "pattern", "number"]
    kind = rng.choice(kinds + ["object", "array", "anyOf"] * 2 if depth else kinds)
    match kind:
        case "object":
            names = rng.sample(["name", "age", "a b", "é", "tags", "x"], rng.randint(1, 3))
            properties = {name: random_schema(rng, depth - 1) for name in names}
            return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
        case "array":
            return {
                "type": "array",
                "items": random_schema(rng, depth - 1),
                "minItems": 1,
                "maxItems": rng.randint(1, 3),
            }
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
        case "string":
            return {"type": "string", "maxLength": rng.randint(1, 12)}
        case "pattern":
            return {"type": "string", "pattern": "^[A-Z][a-z]{1,5}$"}
        case "integer":
            return {"type": "integer", "minimum": -5, "maximum": rng.randint(6, 500)}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": 10, "multipleOf": 0.5}
        case "enum":
            return {"enum": ["red", 5, None, 'a"b\\c']}
        case "const":
            return {"const": {"k": [1, "z"]}}
        case _:
            return {"type": kind}


PATTERNS = ["[a-f0-9]{8}", "(yes|no)( and (yes|no))?", r"\d{4}-\d{2}-\d{2}", r"[A-Z][a-z]+ [A-Z][a-z]{1,4}", "é{2,3}ß?"]


def test_random_schemas_and_patterns_hold_at_temperature_1_on_the_real_model(golden_llm):
    rng = random.Random(0)
    schemas = [random_schema(rng) for _ in range(10)] + [{"type": "object"}]
    shapes = [{"json": schema} for schema in schemas] + [{"regex": pattern} for pattern in PATTERNS]
    shapes += [{"json_object": True}, {"choice": ["<|im_end|>", "a\nb"]}]
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=64, structured_outputs=StructuredOutputsParams(**shape))
        for i, shape in enumerate(shapes)
    ]
    recompiles = golden_llm.engine.runner.recompiles
    outputs = [o.outputs[0] for o in golden_llm.generate(["Give me some JSON:"] * len(shapes), params, use_tqdm=False)]
    for shape, output in zip(shapes, outputs):
        assert output.finish_reason == "stop" or shape in ({"json": {"type": "object"}}, {"json_object": True})
        if output.finish_reason == "stop":
            assert_fits(shape, output.text)
    assert golden_llm.engine.runner.recompiles == recompiles


def assert_fits(shape, text):
    if "json" in shape:
        jsonschema.validate(json.loads(text), shape["json"])
    elif "regex" in shape:
        assert re.fullmatch(shape["regex"], text)
    elif "choice" in shape:
        assert text in shape["choice"]
    else:
        assert isinstance(json.loads(text), dict)


def test_compiling_that_takes_too_long_is_refused_and_so_is_more_while_it_goes_on(monkeypatch):
    gate, wish = threading.Event(), StructuredOutputsParams(regex="[a-f]+")
    monkeypatch.setattr(grammar, "COMPILE_TIMEOUT_S", 0.01)
    monkeypatch.setattr(grammar, "_matcher", lambda *_: gate.wait(30))
    grammars, refusals = Grammars(TinyTokenizer()), []
    for _ in range(grammar.MAX_LATE_COMPILES + 1):
        with pytest.raises(RequestError) as refusal:
            grammars.compile(wish)
        refusals.append(refusal.value.message)
    assert all("more than 0.01 s" in message for message in refusals[:-1])
    assert "earlier ones are still being compiled" in refusals[-1]
    gate.set()
    monkeypatch.undo()
    while grammars._num_late:
        gate.wait(0.001)
    assert grammars.compile(wish)
