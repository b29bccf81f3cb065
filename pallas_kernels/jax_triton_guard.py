"""Whether jax-triton can run here: which versions go together is known by trying, and few do.

Tried through the compile gate with JAX 0.11.2 and CUDA 13.0: 0.3.1 with Triton 3.6 compiles; 0.4.1 fails with Triton
3.6 and with JAX 0.12, and with Triton 3.9 it gives PTX 9.4, which ptxas 13.0 refuses.
"""

from functools import cache
from importlib.metadata import PackageNotFoundError, version

# jax-triton, Triton, and the JAX versions from the first to before the second.
KNOWN = (((0, 3, 1), (3, 6), (0, 10, 2), (0, 12)),)


@cache
def unavailable() -> str | None:
    """Why jax-triton's kernels can't be had with the installed versions, or None. Imports none of them."""
    try:
        installed = {package: version(package) for package in ("jax-triton", "triton", "jax")}
    except PackageNotFoundError as missing:
        return f"{missing.name} is not installed"
    return refusal(installed)


def refusal(installed: dict[str, str]) -> str | None:
    """The same for these versions of "jax-triton", "triton" and "jax"."""
    ours, triton, jax = (_numbers(installed[package]) for package in ("jax-triton", "triton", "jax"))
    for known, known_triton, first, end in KNOWN:
        if ours == known and triton[:2] == known_triton and first <= jax < end:
            return None
    named = ", ".join(f"{package} {number}" for package, number in installed.items())
    return f"{named} are not known to work together; jax-triton 0.3.1, triton 3.6 and jax 0.10.2 to 0.11 are"


def _numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: of 0.12.0.dev3 they are 0, 12 and 0."""
    found = []
    for part in text.split("+")[0].split("."):
        if not part.isdigit():
            break
        found.append(int(part))
    return tuple(found)
