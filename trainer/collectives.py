"""Which collective this rank has come to, in every group, kept on disk for playbooks/diagnose.yml.

logs/collectives-RANK.json, written whole by a thread, and only when something has changed: rank, pid, time (s since
1970), groups: [{name, desc, ranks, sequence, since}]. sequence: how many collectives (over gloo, messages from rank to
rank, too: trainer/sums.py, `exchange`) the rank has begun there; since: when it was last seen to begin one. A main
thread that hangs in a collective does not hold this thread up; a process that was stopped has left its last word, two
seconds old at most.
Once nothing has begun for longer than usual, torch's flight recorder adds what the last one is: op, sizes (of what
goes in, in elements), and over NCCL started and completed (how far the card is). It is asked for JSON: nothing is
pickled.
"""

import contextlib
import json
import os
import threading
import time
from pathlib import Path

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

EVERY = 2.0  # seconds between two looks
STANDS = 3  # looks without a new collective, at least, after which the flight recorder is asked
# Times as long as the run has stood before: the question costs a sixth of a second, and slow steps are no standstill.
LONGER = 2
USUAL = 30  # looks that a run may stand as a matter of course, at most


class Watch(threading.Thread):
    """Writes until `close`."""

    def __init__(self, run_dir: Path, rank: int):
        super().__init__(name="collectives", daemon=True)
        self.path = run_dir / "logs" / f"collectives-{rank}.json"
        self._rank, self._over = rank, threading.Event()
        self._known: dict[str, dict] = {}
        self._unchanged = 0  # looks in a row
        self._usual = 0  # the most of them until now

    def run(self) -> None:
        while not self._over.wait(EVERY):
            self.look()

    def look(self) -> None:
        """One turn."""
        now = time.time()
        found = {one["name"]: one for one in groups()}
        changed = False
        for name, one in found.items():
            before = self._known.get(name)
            if before and before["sequence"] == one["sequence"]:
                found[name] = before
            else:
                one["since"] = now
                changed = True
        self._known = found
        if changed:
            self._usual = min(USUAL, max(self._usual, self._unchanged))
        self._unchanged = 0 if changed else self._unchanged + 1
        if self._unchanged == max(STANDS, LONGER * self._usual):
            with contextlib.suppress(LookupError, TypeError):  # another torch's words for it
                for name, last in newest(flight()).items():
                    if name in found:
                        found[name].update(last)
        elif not changed:
            return
        self._write(now)

    def close(self) -> None:
        self._over.set()
        if self.is_alive():
            self.join()

    def _write(self, now: float) -> None:
        word = {"rank": self._rank, "pid": os.getpid(), "time": now, "groups": list(self._known.values())}
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        with contextlib.suppress(OSError):  # a full disk has other things to say
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(word))
            temporary.replace(self.path)


def groups() -> list[dict]:
    """Each group that this rank is in: its name (the same on all its ranks), desc, ranks, sequence."""
    world, found = dist.distributed_c10d._world, []
    for group, name in list(world.pg_names.items()):
        with contextlib.suppress(RuntimeError, KeyError):  # it is being made, or is gone
            found.append(
                {
                    "name": name,
                    "desc": group.group_desc,
                    "ranks": sorted(world.pg_group_ranks[group]),
                    "sequence": group._get_sequence_number_for_group(),
                }
            )
    return found


def flight() -> list[dict]:
    """What the flight recorders of this torch hold, NCCL's and that of other backends; empty where they are off."""
    found = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if hasattr(c10d, name):
            with contextlib.suppress(RuntimeError, ValueError):
                found.append(json.loads(getattr(c10d, name)(True, False)))
    return found


def newest(records: list[dict]) -> dict[str, dict]:
    """By group's name, what the last collective in it is: op, sizes, and of NCCL started and completed."""
    found: dict[str, dict] = {}
    for record in records:
        status = record.get("pg_status") or {}
        for entry in sorted(record.get("entries") or [], key=lambda one: one["record_id"]):
            if entry["is_p2p"]:
                continue
            last = {"op": entry["profiling_name"], "sizes": entry["input_sizes"]}
            # gloo counts one as completed once it has begun.
            if entry["profiling_name"].startswith("nccl:") and (known := status.get(str(entry["pg_id"]))):
                last["started"] = int(known["last_started_collective"])
                last["completed"] = int(known["last_completed_collective"])
            found[entry["process_group"][0]] = last
    return found
