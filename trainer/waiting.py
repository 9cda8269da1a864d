"""How a rank says that it waits for others, so that its launcher does not take it for one that hangs.

By its thread's name, which the kernel keeps: nothing is written, and it ends with the process (cluster/attempt.py).
The thread's number is in it, for those that are begun meanwhile, as torch begins some, have their beginner's name.
"""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

NAME = "waits {}"  # at most 15 bytes, as many as a name may have


@contextlib.contextmanager
def for_others() -> Iterator[None]:
    """This thread waits for ranks, or for another process, that may take long, and may not be at fault if they do."""
    number = threading.get_native_id()
    file = Path(f"/proc/self/task/{number}/comm")
    try:
        before = file.read_bytes().removesuffix(b"\n")  # which would become a part of the name
        file.write_text(NAME.format(number))
    except OSError:  # no Linux, or a /proc of another kind: it is judged by what it does
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.write_bytes(before)
