"""What every test shares. Warnings are errors (pyproject.toml); no test needs a network or an accelerator."""

import os

# Before anything imports JAX: tests are about the CPU path unless the caller says otherwise.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# A tqdm bar in a test's captured output is noise.
os.environ.setdefault("TQDM_DISABLE", "1")

from pathlib import Path

import pytest

from pagedjax.weights import store


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The bundled model's GGUF file, fetched into the model cache once."""
    return store.resolve("smollm2-135m")
