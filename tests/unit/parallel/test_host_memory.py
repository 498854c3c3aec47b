"""A process that keeps what it frees asks the system for no page a second time."""

import subprocess
import sys

import pytest

PAGES_OF_A_TENSOR = 64 * 2**20 // 4096
WORK = """
import resource, sys
import torch
from ndtrain.parallel.host_memory import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def use(times):
    before = faults()
    for _ in range(times):
        torch.empty(2**24).fill_(1.0)
    return faults() - before

took = sys.argv[1] == "keep" and keep_freed_memory()
use(20)
print(took, use(10))
"""


def page_faults(word: str, **environment: str) -> tuple[str, int]:
    command = [sys.executable, "-c", WORK, word]
    printed = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout
    took, faults = printed.split()
    return took, int(faults)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is glibc's")
def test_freed_memory_is_used_again() -> None:
    _, returned = page_faults("leave")
    took, kept = page_faults("keep")
    assert took == "True"
    # each of ten tensors is touched anew, against none
    assert returned >= 9 * PAGES_OF_A_TENSOR
    assert kept < PAGES_OF_A_TENSOR / 10


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_the_users_own_settings_stay(name: str) -> None:
    took, _ = page_faults("keep", **{name: "100"})
    assert took == "False"
