"""Block copy: whole KV blocks out of the caches into one staging array, back into them, and from block to block.

A block is opaque bytes: whatever a cache's leaf holds behind axis 0, in any type. `reference` defines the op.
"""

from pallas_kernels.block_copy import loop, pallas_triton, reference
from pallas_kernels.block_copy.interface import CopyBackend, staging_for
from pallas_kernels.triton import GPUS, plt

__all__ = ["CopyBackend", "backend_for", "staging_for"]


def backend_for(platform: str) -> CopyBackend:
    """The one to use on `platform`: XLA:CPU runs loops at memory speed, and a GPU would wait for the host at each turn
    of one. A GPU moves all leaves in one kernel, as long as JAX has Pallas Triton."""
    if platform == "cpu":
        return loop.BACKEND
    return pallas_triton.BACKEND if platform in GPUS and plt is not None else reference.BACKEND
