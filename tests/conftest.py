"""What every test shares. Warnings are errors (pyproject.toml); no test needs a network or an accelerator."""

import os
import signal

# Before anything imports JAX: tests are about the CPU path unless the caller says otherwise.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# A tqdm bar in a test's captured output is noise.
os.environ.setdefault("TQDM_DISABLE", "1")

from pathlib import Path

import pytest

from pagedjax.weights import store

# A shell's background job ignores the signal, and tests send it to themselves.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The bundled model's GGUF file, fetched into the model cache once."""
    return store.resolve("smollm2-135m")


@pytest.fixture(scope="session")
def golden_llm(smollm2_path: Path):
    """The bundled model in float32, made once: loading and warming it up takes seconds. One test uses it at a time."""
    from pagedjax.llm import LLM

    return LLM(
        str(smollm2_path),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=32,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=640,
        show_progress_bars=False,
    )
