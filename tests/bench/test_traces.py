"""Trace files: both formats are read, and what cannot be read is refused with the line."""

import pytest

from pagedjax.bench.traces import Arrival, read_trace
from pagedjax.core.errors import ConfigError

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.6805900,396,109
2023-11-16 18:15:51.1805900,879,55
"""
MOONCAKE = """{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}

{"timestamp": 1500, "input_length": 512, "output_length": 9, "hash_ids": [0]}
"""


def write(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_an_azure_trace_starts_at_its_first_request(tmp_path):
    arrivals = read_trace(write(tmp_path, "a.csv", AZURE))
    assert [arrival.time_s for arrival in arrivals] == pytest.approx([0.0, 4.0, 4.5], abs=1e-5)
    assert [(arrival.input_len, arrival.output_len) for arrival in arrivals] == [(374, 44), (396, 109), (879, 55)]
    assert all(arrival.hash_ids is None for arrival in arrivals)


def test_a_mooncake_trace_keeps_its_hash_ids(tmp_path):
    assert read_trace(write(tmp_path, "m.jsonl", MOONCAKE)) == (
        Arrival(0.0, 600, 5, (0, 1)),
        Arrival(1.5, 512, 9, (0,)),
    )


def test_the_limit_takes_the_first_requests(tmp_path):
    assert len(read_trace(write(tmp_path, "a.csv", AZURE), limit=2)) == 2


def test_arrivals_come_in_order_of_time(tmp_path):
    lines = AZURE.splitlines()
    path = write(tmp_path, "a.csv", "\n".join([lines[0], lines[3], lines[1], lines[2]]))
    assert [arrival.input_len for arrival in read_trace(path)] == [374, 396, 879]


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("a.csv", "TIMESTAMP,ContextTokens\n", "line 1: column GeneratedTokens is missing"),
        ("a.csv", AZURE + "yesterday,1,2\n", "line 5: "),
        ("a.csv", AZURE + "2023-11-16 18:15:46,1\n", "line 5: "),
        ("a.csv", AZURE + "2023-11-16 18:15:46,0,2\n", "line 5: lengths must be at least 1"),
        ("a.csv", AZURE.splitlines()[0], "holds no requests"),
        ("m.jsonl", "{", "line 1: "),
        ("m.jsonl", "[1]", "line 1: "),
        ("m.jsonl", '{"timestamp": 0}', "line 1: key 'hash_ids' is missing"),
        ("m.jsonl", MOONCAKE.replace("[0, 1]", "[0]"), "line 1: 1 hash_ids for 600 tokens"),
        ("m.txt", MOONCAKE, "unknown format '.txt'"),
    ],
)
def test_what_is_not_a_trace_is_refused_with_the_line(tmp_path, name, text, complaint):
    with pytest.raises(ConfigError) as refusal:
        read_trace(write(tmp_path, name, text))
    assert complaint in str(refusal.value)


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.csv: No such file"):
        read_trace(tmp_path / "none.csv")
