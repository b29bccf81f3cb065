"""Paged attention's split walk in Triton's own language, for `jax_triton`. Imported only where Triton is installed."""

import triton
import triton.language as tl


@triton.jit
def paged_attention(
    q_ptr,  # [ROWS, KV_HEADS * GROUP, HEAD_DIM]
    k_ptr,  # [NUM_BLOCKS, NUM_LAYERS, KV_HEADS, BLOCK_SIZE, HEAD_DIM]
    v_ptr,
    k_scale_ptr,  # [NUM_BLOCKS, NUM_LAYERS, KV_HEADS, BLOCK_SIZE] float32, unless QUANTISED is false: anything
    v_scale_ptr,
    table_ptr,  # [ROWS, MAX_BLOCKS]
    lens_ptr,  # [ROWS]
    layer_ptr,  # [1]
    out_ptr,  # [SPLITS, ROWS, heads, HEAD_DIM] float32, normalised
    log_ptr,  # [SPLITS, ROWS, heads] float32, the base-2 logarithm of the piece's weight
    ROWS: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    NUM_LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    QUANTISED: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,  # 0: none
    WINDOW: tl.constexpr,  # 0: none
    PRECISION: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_KV: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    MASKED: tl.constexpr = -1e30
    LOG2_E: tl.constexpr = 1.4426950408889634
    head = tl.program_id(0)
    row = tl.program_id(1)
    split = tl.program_id(2)
    end = tl.load(lens_ptr + row)
    first = tl.maximum(end - WINDOW, 0) if WINDOW > 0 else end * 0
    share = tl.cdiv(tl.cdiv(end - first, SPLITS), TILE_KV) * TILE_KV
    start = first + split * share
    stop = tl.minimum(start + share, end)
    layer = tl.load(layer_ptr)

    index = tl.arange(0, TILE_Q)
    columns = tl.arange(0, COLUMNS)
    mine = index < GROUP
    real = columns < HEAD_DIM
    heads = head * GROUP + index
    q_at = (row * KV_HEADS * GROUP + heads)[:, None] * HEAD_DIM + columns[None, :]
    q = tl.load(q_ptr + q_at, mask=mine[:, None] & real[None, :], other=0.0)  # [TILE_Q, COLUMNS]

    peak = tl.full((TILE_Q,), MASKED, dtype=tl.float32)
    total = tl.zeros((TILE_Q,), dtype=tl.float32)
    out = tl.zeros((TILE_Q, COLUMNS), dtype=tl.float32)
    for i in range(tl.cdiv(tl.maximum(stop - start, 0), TILE_KV)):
        keys = start + i * TILE_KV + tl.arange(0, TILE_KV)
        live = keys < stop
        blocks = tl.load(table_ptr + row * MAX_BLOCKS + keys // BLOCK_SIZE, mask=live, other=0)
        blocks = tl.minimum(tl.maximum(blocks, 0), NUM_BLOCKS - 1)
        # A cache may hold more than 2**31 numbers.
        slots = ((blocks.to(tl.int64) * NUM_LAYERS + layer) * KV_HEADS + head) * BLOCK_SIZE + keys % BLOCK_SIZE
        at = slots[:, None] * HEAD_DIM + columns[None, :]
        inside = live[:, None] & real[None, :]
        k = tl.load(k_ptr + at, mask=inside, other=0.0).to(q.dtype)  # [TILE_KV, COLUMNS]
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * SCALE  # [TILE_Q, TILE_KV]
        if QUANTISED:
            scores *= tl.load(k_scale_ptr + slots, mask=live, other=0.0)[None, :]
        if SOFTCAP > 0:
            # tanh by exp2, of a negative number, so that it can't overflow.
            decay = tl.exp2(tl.abs(scores) * (-2 * LOG2_E / SOFTCAP))
            capped = (1 - decay) / (1 + decay) * SOFTCAP
            scores = tl.where(scores < 0, -capped, capped)
        scores = tl.where(live[None, :], scores * LOG2_E, MASKED)
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_peak[:, None])
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(weights, axis=1)
        v = tl.load(v_ptr + at, mask=inside, other=0.0)
        if QUANTISED:
            # They may be too small for float16; every quantised number is exact in bfloat16.
            weights *= tl.load(v_scale_ptr + slots, mask=live, other=0.0)[None, :]
            wide = tl.bfloat16 if q.dtype == tl.float16 else q.dtype
            out = out * decay[:, None] + tl.dot(weights.to(wide), v.to(wide), input_precision=PRECISION)
        else:
            out = out * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        peak = new_peak

    empty = total == 0
    out = out / tl.where(empty, 1.0, total)[:, None]
    log = tl.where(empty, MASKED, peak + tl.log2(tl.where(empty, 1.0, total)))
    part = (split * ROWS + row) * KV_HEADS * GROUP + heads
    tl.store(out_ptr + part[:, None] * HEAD_DIM + columns[None, :], out, mask=mine[:, None] & real[None, :])
    tl.store(log_ptr + part, log, mask=mine)
