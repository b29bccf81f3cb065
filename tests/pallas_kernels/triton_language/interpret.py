"""Run kernels in Triton's language by its own interpreter, on numpy arrays and without torch."""

import os

# Read by Triton when a kernel is defined.
os.environ["TRITON_INTERPRET"] = "1"

import numpy as np


class Buffer:
    """A numpy array with as much of torch's interface as the interpreter asks for. It is used in place."""

    def __init__(self, array: np.ndarray) -> None:
        assert array.flags.c_contiguous
        self.array, self.dtype, self.device = array, array.dtype.name, "cpu"

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def copy_(self, other):
        return self

    def numel(self):
        return self.array.size

    def size(self):
        return self.array.shape

    def stride(self):
        return tuple(stride // self.array.itemsize for stride in self.array.strides)

    def storage_offset(self):
        return 0

    def new_empty(self, *args, **kwargs):
        return self

    def set_(self, *args):
        return self

    def element_size(self):
        return self.array.itemsize
