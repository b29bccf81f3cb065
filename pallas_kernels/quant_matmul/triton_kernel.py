"""The kernel of `pallas_triton` in Triton's own language, for `jax_triton`. Imported only where Triton is installed."""

import triton
import triton.language as tl


@triton.jit
def quant_matmul(
    x_ptr,  # [NUM_TOKENS, NUM_IN]
    quants_ptr,  # [NUM_IN / 2, NUM_OUT] uint8
    scales_ptr,  # [groups, NUM_OUT]
    zeros_ptr,  # [groups, NUM_OUT] uint8
    out_ptr,  # [SPLITS, NUM_TOKENS, NUM_OUT] float32
    NUM_TOKENS: tl.constexpr,
    NUM_IN: tl.constexpr,
    NUM_OUT: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    PAIRED: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """See `pallas_triton`, step by step the same."""
    HALF: tl.constexpr = TILE_K // 2
    rows = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    columns = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    split = tl.program_id(2)
    places = tl.arange(0, HALF)
    low_inputs = places // PAIRED * 2 * PAIRED + places % PAIRED
    real = rows < NUM_TOKENS
    inside = columns < NUM_OUT

    share: tl.constexpr = NUM_IN // TILE_K // SPLITS
    sums = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    for step in range(share):
        i = split * share + step
        group = i * TILE_K // GROUP_SIZE
        zeros = tl.load(zeros_ptr + group * NUM_OUT + columns, mask=inside, other=0).to(tl.int32)
        scales = tl.load(scales_ptr + group * NUM_OUT + columns, mask=inside, other=0.0).to(tl.float32)
        where = (i * HALF + places)[:, None] * NUM_OUT + columns[None, :]
        pairs = tl.load(quants_ptr + where, mask=inside[None, :], other=0).to(tl.int32)  # [HALF, TILE_N]
        first = rows[:, None] * NUM_IN + (i * TILE_K + low_inputs)[None, :]
        low = tl.load(x_ptr + first, mask=real[:, None], other=0.0)  # [TILE_M, HALF]
        high = tl.load(x_ptr + first + PAIRED, mask=real[:, None], other=0.0)
        partial_sums = tl.dot(low, ((pairs & 15) - zeros[None, :]).to(low.dtype))
        partial_sums += tl.dot(high, ((pairs >> 4) - zeros[None, :]).to(low.dtype))
        sums += partial_sums * scales[None, :]
    where = (split * NUM_TOKENS + rows)[:, None] * NUM_OUT + columns[None, :]
    tl.store(out_ptr + where, sums, mask=real[:, None] & inside[None, :])
