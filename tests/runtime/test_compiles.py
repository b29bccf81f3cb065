"""Counting compilations and keeping them."""

import subprocess
import sys

import jax
import numpy as np
import pytest

from pagedjax.core.errors import ConfigError
from pagedjax.runtime import compiles

# In a process of its own: the cache is a setting of the process.
KEEP = """
import sys, jax, numpy as np
from pagedjax.runtime import compiles
jax.jit(lambda x: x + 1)(np.zeros(3)).block_until_ready()
folder = compiles.use_persistent_cache(sys.argv[1])
jax.jit(lambda x: x * 2 - 7)(np.zeros(5)).block_until_ready()
print(sum(1 for file in folder.iterdir() if file.stat().st_size))
"""


def test_each_compilation_counts_once_and_a_call_not():
    function = jax.jit(lambda x: x * 5 - 1)
    before = compiles.num_compiles()
    function(np.zeros(4)).block_until_ready()
    function(np.ones(4)).block_until_ready()
    assert compiles.num_compiles() == before + 1
    function(np.ones(6)).block_until_ready()
    assert compiles.num_compiles() == before + 2


def test_programs_are_kept_even_if_the_process_compiled_before_it_was_asked_to(tmp_path):
    kept = subprocess.run([sys.executable, "-c", KEEP, str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(kept.stdout) >= 1


def test_a_folder_that_cannot_be_made_is_refused_with_the_flag(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--compilation-cache-dir"):
        compiles.use_persistent_cache(tmp_path / "file")
