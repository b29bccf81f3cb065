"""Run kernels in Triton's language by its own interpreter, on numpy arrays and without torch."""

import importlib.util
import json
import os
import sys

# Read by Triton when a kernel is defined.
os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
from triton.runtime import interpreter


def _patch_index(patch):
    """Triton 3.6 makes an index of an array of one number in a way that numpy has since forbidden."""

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patched


interpreter._patch_lang_tensor = _patch_index(interpreter._patch_lang_tensor)


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


def load_kernel(default: str):
    """The module of kernels in the file that --kernel names, or in `default`."""
    path = sys.argv[sys.argv.index("--kernel") + 1] if "--kernel" in sys.argv else default
    spec = importlib.util.spec_from_file_location("kernel", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wanted(cases):
    """The names of `cases` that --only asks for; all of them by default."""
    return [sys.argv[sys.argv.index("--only") + 1]] if "--only" in sys.argv else list(cases)


def report(errors):
    """Print the seed of this run and every error, by the case's name; NaN reads as 1e30."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    found = {
        name: min(float(np.nan_to_num(error, nan=1e30)), 1e30) for name, error in errors(np.random.default_rng(seed))
    }
    print(json.dumps({"seed": seed, "errors": found}))
