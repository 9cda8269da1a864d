"""What is freed is kept for the next step: the kernel is not asked for it again, page by page; and how much data there
is makes no difference.
"""

import re
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, resource
from trainer.environment import keep_freed_memory
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
def step():
    blocks = [libc.malloc(50 << 20) for _ in range(3)]
    for block in blocks:
        libc.memset(block, 1, 50 << 20)
    for block in blocks:
        libc.free(block)
{call}
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.parametrize(("call", "kept"), [("keep_freed_memory()", True), ("", False)])
def test_pages_are_asked_for_once(call, kept, repository):
    command = [sys.executable, "-c", PROGRAM.format(call=call)]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True)
    assert (int(done.stdout) < 100) == kept, done.stdout


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_memory_does_not_grow_with_the_data(repository):
    """200 MB of JSONL are tokenised, packed and trained on in the memory of 10 MB, give or take a twentieth."""
    command = [sys.executable, "scripts/data_memory.py", "10", "200"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True)
    found = re.findall(r"([\d,]+) sequences; peak (\d+) MB when tokenised .*, (\d+) MB after", done.stdout)
    sequences, *peaks = ([int(one.replace(",", "")) for one in part] for part in zip(*found, strict=True))
    assert sequences[1] > 15 * sequences[0] > 0, done.stdout
    for little, much in peaks:
        assert much < 1.05 * little, done.stdout
