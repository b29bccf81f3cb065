"""Kernels in Triton's language, run by Triton's interpreter where some environment here has Triton."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
GATE = ROOT / ".venv-gpu-gate" / "bin" / "python"  # made by `make gpu-gate`
PYTHON = sys.executable if importlib.util.find_spec("triton") else str(GATE) if GATE.exists() else None
TIMEOUT_S = 300

pytestmark = pytest.mark.skipif(PYTHON is None, reason="no environment here has Triton; make gpu-gate makes one")


def run(op, *arguments):
    """{case: error} of an op's kernel; pytest shows the seed of a failure."""
    command = [PYTHON, "-m", f"tests.pallas_kernels.triton_language.{op}", *arguments]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    print(f"seed {told['seed']}")
    return told["errors"]


def mutant(tmp_path, kernel, old, new):
    source = (ROOT / kernel).read_text()
    assert source.count(old) == 1
    path = tmp_path / "mutant.py"
    path.write_text(source.replace(old, new))
    return "--kernel", str(path)


def test_products_with_4_bit_weights_agree_with_float64():
    errors = run("quant_matmul")
    assert {name: error for name, error in errors.items() if not error < 1e-5} == {}
    assert len(errors) > 8


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(pairs & 15) - zeros", "(pairs >> 4) - zeros"),
        ("group = i * TILE_K // GROUP_SIZE", "group = 0"),
        ("i = split * share + step", "i = step"),
    ],
)
def test_a_bug_planted_in_the_product_is_seen(tmp_path, old, new):
    mutated = mutant(tmp_path, "pallas_kernels/quant_matmul/triton_kernel.py", old, new)
    errors = run("quant_matmul", "--only", "splits", *mutated)
    assert max(errors.values()) > 1e-2


def test_paged_attention_agrees_with_float64():
    errors = run("paged_attention")
    limits = {name: 4e-3 if "float16" in name else 1e-4 for name in errors}
    assert {name: error for name, error in errors.items() if not error < limits[name]} == {}
    assert len(errors) > 8


@pytest.mark.parametrize(
    ("case", "old", "new"),
    [
        ("plain", "live = keys < stop", "live = keys <= stop"),
        ("plain", "keys % BLOCK_SIZE", "keys % BLOCK_SIZE * 0"),
        ("plain", "total = total * decay", "total = total"),
        ("window", "tl.maximum(end - WINDOW, 0)", "tl.maximum(end - WINDOW - 1, 0)"),
    ],
)
def test_a_bug_planted_in_paged_attention_is_seen(tmp_path, case, old, new):
    mutated = mutant(tmp_path, "pallas_kernels/paged_attention/triton_kernel.py", old, new)
    errors = run("paged_attention", "--only", case, *mutated)
    assert max(errors.values()) > 1e-2
