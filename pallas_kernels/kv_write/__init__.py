"""KV write: a step's keys and values into their slots of the paged cache, quantised on the way where the cache is.

`reference` defines the op; `dispatch.choose` picks a backend.
"""

from pallas_kernels.kv_write.interface import KVWriteBackend

__all__ = ["KVWriteBackend"]
