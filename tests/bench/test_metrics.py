"""Metrics on timelines made by hand."""

import pytest

from pagedjax.bench.metrics import (
    Chunk,
    RequestRecord,
    Slo,
    Status,
    chunk_token_counts,
    meets,
    serve_figures,
    spread,
    summarise,
    timeline,
    token_gaps_s,
)


def make_record(*times_s, start_s=0.0, end_s=None, output_len=None, num_tokens=None, **fields) -> RequestRecord:
    """A request whose chunks of five characters came at `times_s`."""
    return RequestRecord(
        **{
            "due_s": start_s,
            "start_s": start_s,
            "end_s": times_s[-1] if end_s is None else end_s,
            "chunks": tuple(Chunk(time_s, 5, num_tokens) for time_s in times_s),
            "prompt_len": 10,
            "output_len": len(times_s) if output_len is None else output_len,
        }
        | fields
    )


def test_percentiles_interpolate_between_ranks():
    summary = summarise([0.0, 10.0, 20.0, 30.0])
    assert (summary.p50, summary.p90, summary.max) == pytest.approx((15.0, 27.0, 30.0))
    assert summarise([7.0]).p99 == 7.0


def test_a_summary_of_nothing_is_nothing():
    assert summarise([]) is None


def test_a_summary_has_mean_percentiles_and_maximum():
    summary = summarise(range(101))
    assert summary == (50.0, 50.0, 90.0, 99.0, 100)


def test_ttft_tpot_and_e2e_of_a_steady_stream():
    record = make_record(1.5, 1.6, 1.7, 1.8, start_s=1.0, end_s=2.0)
    assert record.ttft_s == pytest.approx(0.5)
    assert record.tpot_s == pytest.approx(0.1)
    assert record.e2e_s == pytest.approx(1.0)
    assert token_gaps_s(record) == pytest.approx([0.1, 0.1, 0.1])


def test_a_single_token_has_neither_tpot_nor_gap():
    record = make_record(0.5)
    assert record.tpot_s is None
    assert token_gaps_s(record) == []


def test_tokens_of_one_chunk_share_its_gap_evenly():
    chunks = (Chunk(1.0, 5, 1), Chunk(1.3, 15, 3), Chunk(1.5, 5, 1))
    assert token_gaps_s(make_record(1.0, chunks=chunks, output_len=5)) == pytest.approx([0.1, 0.1, 0.1, 0.2])


def test_unknown_tokens_go_to_the_longest_chunks():
    chunks = (Chunk(1.0, 4), Chunk(1.4, 16), Chunk(1.5, 4))
    record = make_record(1.0, chunks=chunks, output_len=6)
    assert chunk_token_counts(record) == [1, 4, 1]
    assert token_gaps_s(record) == pytest.approx([0.1] * 5)


@pytest.mark.parametrize(
    ("num_tokens", "text_lens", "counts"),
    [
        (3, [5, 5, 5], [1, 1, 1]),
        (2, [5, 5, 5], [1, 1, 1]),
        (6, [5, 5, 20], [1, 1, 4]),
        (9, [4, 4, 4], [3, 3, 3]),
        (4, [7], [4]),
        (3, [0, 0], [1, 1]),
        (5, [], []),
    ],
)
def test_spreading_gives_every_chunk_one_token_and_loses_none(num_tokens, text_lens, counts):
    assert spread(num_tokens, text_lens) == counts


def test_figures_count_finished_requests_only():
    records = [
        make_record(0.5, 1.0, end_s=1.0, cached_len=4),
        make_record(1.0, 2.0, end_s=2.0, cached_len=6),
        make_record(0.1, end_s=0.2, status=Status.FAILED, error="HTTP 500: no"),
        make_record(0.1, end_s=0.2, status=Status.INTERRUPTED),
    ]
    figures = serve_figures(records, wall_s=4.0)
    assert (figures.num_ok, figures.num_failed, figures.num_interrupted) == (2, 1, 1)
    assert figures.errors == (("HTTP 500: no", 1),)
    assert (figures.input_tokens, figures.output_tokens, figures.cached_tokens) == (20, 4, 10)
    assert figures.requests_per_s == pytest.approx(0.5)
    assert figures.output_tokens_per_s == pytest.approx(1.0)
    assert figures.total_tokens_per_s == pytest.approx(6.0)
    assert figures.ttft_ms.mean == pytest.approx(750.0)
    assert figures.itl_ms.max == pytest.approx(1000.0)
    assert figures.goodput_requests_per_s is None


def test_a_run_in_which_all_fails_still_has_figures():
    record = make_record(status=Status.FAILED, error="refused", end_s=0.1, chunks=())
    figures = serve_figures([record], wall_s=1.0)
    assert figures.ttft_ms is None
    assert figures.cached_tokens is None
    assert figures.requests_per_s == 0.0


def test_goodput_counts_requests_that_keep_every_bound():
    quick, slow = make_record(0.1, 0.2), make_record(0.9, 1.0)
    figures = serve_figures([quick, slow], wall_s=2.0, slo=Slo(ttft=500, itl=150))
    assert figures.goodput_requests_per_s == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("slo", "kept"),
    [
        (Slo(), True),
        (Slo(ttft=125), True),
        (Slo(ttft=124), False),
        (Slo(tpot=250), True),
        (Slo(tpot=249), False),
        (Slo(itl=373), True),
        (Slo(itl=372), False),
        (Slo(e2e=750), True),
        (Slo(e2e=749), False),
    ],
)
def test_each_bound_is_checked(slo, kept):
    assert meets(make_record(0.25, 0.375, 0.75, start_s=0.125, end_s=0.875), slo) is kept


def test_the_timeline_follows_requests_from_sending_to_end():
    records = [make_record(1.0, 2.0, end_s=3.0), make_record(start_s=0.5, end_s=4.0, chunks=())]
    assert timeline(records) == [(0.0, 1, 0), (0.5, 2, 0), (1.0, 2, 1), (3.0, 1, 0), (4.0, 0, 0)]
    assert serve_figures(records[:1], wall_s=3.0).max_running == 1


def test_a_request_held_back_shows_as_send_delay():
    figures = serve_figures([make_record(2.0, start_s=1.5, due_s=1.0)], wall_s=2.0)
    assert figures.send_delay_ms.max == pytest.approx(500.0)
