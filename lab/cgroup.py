"""Control groups of a host: its share of CPU, its memory, freezing it, and killing all of it at once.

A machine with cgroup v2 alone has one tree. A hybrid one (v1 controllers beside a v2 tree) has four that matter here:
v2 for freezing and killing, `cpu` and `memory` for limits, and `name=systemd`, in which systemd inside the host keeps
its units.
"""

import contextlib
import os
import signal
import time
from pathlib import Path

from lab.shell import LabError, wait_until

TOP = "trainyard-lab"
# A host's share of CPU is given out by such periods. In the usual 100 ms a host of 0.4 CPUs computes for 40 and stands
# still for 60, which others wait for in each exchange; a slower machine computes all the time. They are longer where a
# share would be less than QUOTA_US: one processor takes all of it at once, and another thread of the host waits.
PERIOD_US = 5_000
QUOTA_US = 2_000
# Of all labs together, in processes of this machine. Hosts are machines, not one process among many, when tests run
# beside them; where hosts train on every core, what drives them starves at much more than 2 (make faults).
WEIGHT = int(os.environ.get("TRAINYARD_LAB_WEIGHT", "16"))


def _trees() -> dict[str, Path]:
    """Mount points by role: v2, cpu, memory and systemd (the last three only where v1 has them)."""
    found = {}
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, options, *_ = line.split()
        if kind == "cgroup2":
            found.setdefault("v2", Path(where))
        elif kind == "cgroup" and "cpu" in options.split(","):
            found["cpu"] = Path(where)
        elif kind == "cgroup" and "memory" in options.split(","):
            found["memory"] = Path(where)
        elif kind == "cgroup" and "name=systemd" in options.split(","):
            found["systemd"] = Path(where)
    if "v2" not in found:
        raise LabError(
            "this machine mounts no cgroup v2 tree (neither alone nor beside v1): the lab needs one"
        )
    return found


class Group:
    """The control groups of one host, or with no host of a whole lab.

    Below each tree, TOP/LAB/HOST holds the limits; its child `keep` the process that keeps the host running, `run` the
    host itself, and `exec` what the harness starts inside it. (v2 wants processes in leaves only.)
    """

    def __init__(self, lab: str, host: str = ""):
        self.trees = {role: tree / TOP / lab / host for role, tree in _trees().items()}

    def create(self) -> None:
        for group in self.trees.values():
            for part in ("keep", "run", "exec"):
                (group / part).mkdir(parents=True, exist_ok=True)
        # What v1 does not have is v2's: hand it down, level by level.
        for controller in {"cpu", "memory"} - set(self.trees):
            for parent in list(self.trees["v2"].parents)[2::-1]:
                (parent / "cgroup.subtree_control").write_text(f"+{controller}")
        trees = _trees()
        if "cpu" in trees:
            (trees["cpu"] / TOP / "cpu.shares").write_text(str(1024 * WEIGHT))
        else:
            (trees["v2"] / TOP / "cpu.weight").write_text(str(100 * WEIGHT))

    def procs_files(self, part: str) -> list[Path]:
        """Where a process writes its number to join that part in every tree."""
        return [group / part / "cgroup.procs" for group in self.trees.values()]

    def pids(self) -> list[int]:
        """Every process of it."""
        found = []
        for directory, _, _ in os.walk(self.trees["v2"]):  # which takes groups that come and go as they are
            with contextlib.suppress(OSError):
                found += map(int, Path(directory, "cgroup.procs").read_text().split())
        return found

    def set_cpus(self, cpus: float | None) -> None:
        """At most that many CPUs' time together; None lifts the limit."""
        period = PERIOD_US if cpus is None else max(PERIOD_US, round(QUOTA_US / cpus))
        quota = None if cpus is None else max(QUOTA_US, round(cpus * period))
        if "cpu" in self.trees:
            (self.trees["cpu"] / "cpu.cfs_period_us").write_text(str(period))
            (self.trees["cpu"] / "cpu.cfs_quota_us").write_text(str(quota or -1))
        else:
            (self.trees["v2"] / "cpu.max").write_text(f"{quota or 'max'} {period}")

    def set_memory(self, more: int | None) -> None:
        """At most `more` bytes beyond what its processes have now, caches of files apart; None lifts the limit.

        The kernel kills what is largest inside where that is not enough.
        """
        v1 = "memory" in self.trees
        group = self.trees["memory" if v1 else "v2"]
        limit = group / ("memory.limit_in_bytes" if v1 else "memory.max")
        if more is None:
            limit.write_text("-1" if v1 else "max")
            return
        usage = group / ("memory.usage_in_bytes" if v1 else "memory.current")
        with contextlib.suppress(OSError):  # not all of it can be given back
            (group / ("memory.force_empty" if v1 else "memory.reclaim")).write_text(usage.read_text())
        limit.write_text(str(int(usage.read_text()) + more))

    def freeze(self, frozen: bool) -> None:
        """Stop every process dead, or let them go on; returns once it is so."""
        (self.trees["v2"] / "cgroup.freeze").write_text("1" if frozen else "0")
        events = self.trees["v2"] / "cgroup.events"
        if not wait_until(lambda: f"frozen {int(frozen)}" in events.read_text(), 10):
            raise LabError(f"{self.trees['v2']}: did not {'freeze' if frozen else 'thaw'} within 10 s")

    def kill(self) -> None:
        """Kill every process at once and wait for the last."""
        if not self.trees["v2"].exists():
            return
        # Not by cgroup.kill: on newer kernels (6.18) a group that it was used on kills whatever is begun right inside
        # it, as systemd 257 begins services. Frozen, none can begin another meanwhile.
        with contextlib.suppress(LabError):  # one that waits for a disk cannot be
            self.freeze(True)
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        (self.trees["v2"] / "cgroup.freeze").write_text("0")
        # A host's first process takes its mounts down as it ends, which is long where others have the processor.
        if not wait_until(lambda: not self.pids(), 60):
            raise LabError(
                f"{self.trees['v2']}: still has processes {self.pids()} 60 s after they were killed"
            )

    def remove(self) -> None:
        """Take the groups away, leaves first; there must be no process in them."""
        for group in self.trees.values():
            for directory, _, _ in os.walk(group, topdown=False):
                _rmdir(Path(directory))
            with contextlib.suppress(OSError):  # another lab's, or not ours alone
                group.parent.rmdir()


def _rmdir(directory: Path) -> None:
    for _ in range(100):
        try:
            directory.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:  # busy: the last process is dead, but not yet reaped
            time.sleep(0.05)
    raise LabError(f"cannot remove the control group {directory}")
