"""Recorded traces as the simulator's requests."""

from collections.abc import Iterable

from pagedjax.bench.traces import MOONCAKE_BLOCK_LEN, Arrival
from pagedjax.core.errors import ConfigError
from pagedjax.simulator.workload import SimRequest


def sim_requests(
    arrivals: Iterable[Arrival], *, block_size: int, max_model_len: int, time_scale: float = 1.0
) -> tuple[SimRequest, ...]:
    """The arrivals that fit `max_model_len`, with their times multiplied by `time_scale`.

    Where the trace names its blocks by hash id, equal ids become equal names, so prefixes are shared as they were.
    """
    if MOONCAKE_BLOCK_LEN % block_size:
        raise ConfigError(f"block_size {block_size} must divide the {MOONCAKE_BLOCK_LEN} tokens of a recorded block")
    return tuple(
        SimRequest(
            arrival_us=round(arrival.time_s * time_scale * 1e6),
            prompt_len=arrival.input_len,
            output_len=arrival.output_len,
            block_names=_names(arrival, block_size),
        )
        for arrival in arrivals
        if arrival.input_len + arrival.output_len <= max_model_len
    )


def _names(arrival: Arrival, block_size: int) -> tuple[bytes, ...] | None:
    if arrival.hash_ids is None:
        return None
    names = [
        b"%24d%8d" % (hash_id, index)
        for hash_id in arrival.hash_ids
        for index in range(MOONCAKE_BLOCK_LEN // block_size)
    ]
    return tuple(names[: arrival.input_len // block_size])
