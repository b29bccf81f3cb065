"""Kernels run at every level of instructions that the machine and the library have."""

import pytest

from pallas_kernels import native


@pytest.fixture(params=native.LEVELS)
def level(request):
    """The kernels at one level, for one test."""
    reason = native.unavailable()
    if reason is not None:
        pytest.skip(f"no native kernels here: {reason}")
    library = native.load()
    if request.param not in library.levels:
        pytest.skip(f"{request.param} is not here; the best is {library.levels[-1]}")
    native.use_level(request.param)
    yield request.param
    native.use_level(library.level)
