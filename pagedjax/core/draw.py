"""A State as a picture for notebooks: the pool as a grid of cells, and each sequence with its block table."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagedjax.core.blocks import BlockPool
    from pagedjax.core.state import Sequence, State

CELL_PX = 14
CELLS_A_LINE = 48
MAX_CELLS = 1536
MAX_SEQUENCES = 64


def state_html(state: State) -> str:
    """HTML with inline SVG: a summary, the pool (one cell a block), the running sequences, the heads of the line."""
    pool = state.pool
    summary = (
        f"<b>{len(state.running)}</b> running, <b>{len(state.waiting)}</b> waiting, <b>{len(state.in_flight)}</b> "
        f"steps in flight; of {pool.num_blocks} blocks <b>{len(pool.counts)}</b> held, <b>{len(pool.idle)}</b> idle "
        f"but cached, <b>{len(pool.clean)}</b> clean"
    )
    rows = "".join(_sequence_row(s) for s in state.running[:MAX_SEQUENCES])
    rows += "".join(_sequence_row(s) for s in islice(_waiting(state), MAX_SEQUENCES))
    head = "<tr><th>sequence</th><th>phase</th><th>tokens</th><th>computed</th><th>cached</th><th>block table</th></tr>"
    table = f"<table style='font:12px monospace;border-collapse:collapse'>{head}{rows}</table>" if rows else ""
    return f"<div style='font:13px sans-serif'><p>{summary}</p>{_pool_svg(state)}{table}</div>"


def _waiting(state: State) -> Iterator[Sequence]:
    for key in sorted(state.waiting.lanes, key=lambda key: (key[1], key[0])):
        lane = state.waiting.lanes[key]
        yield from lane.parked
        yield from (lane.line[ticket] for ticket in sorted(lane.line))


def _pool_svg(state: State) -> str:
    owners = {block_id: s.sequence_id for s in state.running for block_id in s.blocks}
    num_cells = min(state.pool.num_blocks, MAX_CELLS)
    cells = "".join(_cell(state.pool, owners, block_id) for block_id in range(num_cells))
    height = -(-num_cells // CELLS_A_LINE) * CELL_PX
    more = state.pool.num_blocks - num_cells
    note = f"<p>and {more} blocks more</p>" if more else ""
    return f"<svg width='{CELLS_A_LINE * CELL_PX}' height='{height}' role='img'>{cells}</svg>{note}"


def _cell(pool: BlockPool, owners: dict[int, int], block_id: int) -> str:
    x, y = block_id % CELLS_A_LINE * CELL_PX, block_id // CELLS_A_LINE * CELL_PX
    count = pool.counts.get(block_id, 0)
    if count:
        fill, label = _colour(owners[block_id]), f"block {block_id}: held, {count} references"
    elif block_id in pool.idle_tickets:
        fill, label = "#bbb", f"block {block_id}: idle, cached"
    else:
        fill, label = "#f4f4f4", f"block {block_id}: clean"
    stroke = "#d00" if count > 1 else "#fff"
    size = CELL_PX - 2
    return (
        f"<rect x='{x + 1}' y='{y + 1}' width='{size}' height='{size}' rx='2' fill='{fill}' stroke='{stroke}'>"
        f"<title>{label}</title></rect>"
    )


def _sequence_row(sequence: Sequence) -> str:
    blocks = " ".join(map(str, sequence.blocks[:24])) + (" …" if len(sequence.blocks) > 24 else "")
    values = (
        f"<span style='color:{_colour(sequence.sequence_id)}'>&#9632;</span> {sequence.sequence_id}",
        escape(sequence.phase),
        f"{sequence.num_tokens}",
        f"{sequence.num_computed}" + ("+" if sequence.num_planned > sequence.num_computed else ""),
        f"{sequence.num_cached}",
        blocks,
    )
    return "<tr>" + "".join(f"<td style='padding:1px 8px;text-align:left'>{v}</td>" for v in values) + "</tr>"


def _colour(sequence_id: int) -> str:
    return f"hsl({sequence_id * 137 % 360},60%,62%)"
