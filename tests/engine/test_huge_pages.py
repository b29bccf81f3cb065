import os
import subprocess
import sys

import pytest

from pagedjax.engine.huge_pages import TUNABLE, VARIABLE, glibc_version, kernel_setting, refusal, with_huge_pages

MADVISE = "always [madvise] never"


@pytest.mark.parametrize("kernel", [MADVISE, "[always] madvise never"])
def test_a_process_of_a_recent_glibc_asks_for_huge_pages(kernel):
    assert refusal({}, (2, 35), kernel) is None


@pytest.mark.parametrize(
    ("environment", "glibc", "kernel", "reason"),
    [
        ({VARIABLE: f"{TUNABLE}=0"}, (2, 36), MADVISE, "says so"),
        ({VARIABLE: f"glibc.malloc.check=0:{TUNABLE}=1"}, (2, 36), MADVISE, "says so"),
        ({}, (2, 34), MADVISE, "2.35"),
        ({}, None, MADVISE, "2.35"),
        ({}, (2, 36), "always madvise [never]", "kernel"),
        ({}, (2, 36), "", "kernel"),
    ],
)
def test_otherwise_it_says_why_not(environment, glibc, kernel, reason):
    assert reason in refusal(environment, glibc, kernel)


def test_other_tunables_are_kept():
    asked = with_huge_pages({VARIABLE: "glibc.malloc.check=0", "HOME": "/"})
    assert asked == {VARIABLE: f"glibc.malloc.check=0:{TUNABLE}=1", "HOME": "/"}


def test_a_restarted_process_is_the_same_but_for_its_malloc():
    code = """
import os, sys
from pagedjax.engine.huge_pages import restart_with_huge_pages
pid = os.environ.setdefault("FIRST_PID", str(os.getpid()))
restart_with_huge_pages()
print(pid == str(os.getpid()), sys.argv[1:], os.environ.get("GLIBC_TUNABLES"))
"""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    command = [sys.executable, "-c", code, "a b", "--flag"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    asked = f"{TUNABLE}=1" if refusal({}, glibc_version(), kernel_setting()) is None else None
    assert done.stdout.strip() == f"True ['a b', '--flag'] {asked}"
