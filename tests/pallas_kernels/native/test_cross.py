"""The native kernels are C++ that an Arm compiler takes too; `make cross` runs them there, emulated."""

import shutil
import subprocess

import pytest

from pallas_kernels.native import build

CROSS = shutil.which("aarch64-linux-gnu-g++")


@pytest.mark.skipif(CROSS is None, reason="no compiler for 64-bit Arm here (Debian: g++-aarch64-linux-gnu)")
def test_every_kernel_compiles_for_arm_without_a_warning():
    defines = ["-DPAGEDJAX_LEVEL=plain", '-DPAGEDJAX_SOURCE_HASH=""']
    command = [CROSS, *build.FLAGS, *defines, "-Werror", "-fsyntax-only", "-isystem", str(build.headers())]
    sources = sorted(map(str, build.FOLDER.glob("*.cc")))
    done = subprocess.run([*command, *sources], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
