"""Host memory that a CPU device takes as it is."""

import numpy as np

ALIGNMENT = 64  # bytes of a cache line


def aligned_bytes(num_bytes: int) -> np.ndarray:
    """Zeros, uint8, that start at a multiple of ALIGNMENT, as XLA:CPU wants them: another array it would copy."""
    room = np.zeros(num_bytes + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return room[start : start + num_bytes]
