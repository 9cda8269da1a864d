"""Runs the layers of tests, fast ones first, and sums up: what passed, what failed, what was skipped and why.

    tests/run.py [LAYER …]        all layers, or the named ones; `make test` calls this

Layers run in two chains beside each other, for the playbooks and the lab mostly wait. What those of the second chain
print is shown once the first has ended: the lab's tests of a single host's network, firewall and sleep (`guards`) run
beside those of a whole cluster. A layer that fails does not hide the later ones. One that passes its time limit is
stopped and counts as failed.
The last line is `N passed, N failed, N skipped`; the exit status is 0 only where nothing failed.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent  # not resolved: the virtual environment's, not the system's

# Layer -> minutes after which it is stopped, for hangs; WHOLE times as many where the whole is run (FULL=1), with hosts
# that are emulated.
LIMITS = {"lint": 4, "unit": 14, "distributed": 30, "playbooks": 44, "lab": 32, "guards": 32}
WHOLE = {"lint": 1, "unit": 3, "distributed": 5, "playbooks": 3, "lab": 15, "guards": 8}
CHAINS = (("unit", "distributed", "lab"), ("lint", "playbooks", "guards"))  # of about the same length
# What has the lab `job` in common (tests/lab/conftest.py) must be in one chain.
GUARDS = [
    f"tests/lab/test_{name}.py"
    for name in ("awake", "firewall", "guard", "lab", "molecule", "network", "site_system", "vms")
]
SLOW, SHOWN = 10, 12  # seconds from which on a test is told, and how many of a layer: what to shorten first
RUNNING = set()  # processes under way
BROKEN_OFF = threading.Event()  # no more are started


@dataclass
class Result:
    """What one layer came to."""

    passed: int = 0
    failures: list[str] = field(default_factory=list)
    skips: list[str] = field(default_factory=list)  # the reason of each skipped test
    times: list[tuple[float, str]] = field(default_factory=list)  # seconds and name of each test that ran
    seconds: float = 0.0


# bash -n reads one script a call.
BASH_N = 'for script; do bash -n "$script" || bad=1; done; exit ${bad:-0}'


def shell_scripts():
    """The checked-in files that bash runs: named *.sh, or with a shell's name in their first line."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if not path.is_file() or path.suffix == ".j2":
            continue
        with path.open("rb") as file:
            first = file.readline(100)
        if path.suffix == ".sh" or (
            first.startswith(b"#!") and first.split(b"/")[-1].strip().endswith(b"sh")
        ):
            yield name


def lint_checks():
    """The checks of `make lint`: (name, command) pairs."""
    return [
        ("ruff check", [BIN / "ruff", "check", "."]),
        ("ruff format", [BIN / "ruff", "format", "--check", "."]),
        ("yamllint", [BIN / "yamllint", "--strict", "."]),
        ("ansible-lint", [BIN / "ansible-lint"]),
        ("bash -n", ["bash", "-c", BASH_N, "--", *shell_scripts()]),
        ("house rules", [BIN / "python", "-m", "pytest", "-q", "tests/unit/test_house_rules.py"]),
    ]


def run(command, seconds, output=None):
    """Runs `command` in a process group of its own; returns its exit status, or None where it took too long, or all is
    broken off.

    output: a file for what it prints. A limit or Ctrl-C reaches it as SIGINT first, so that fixtures take down what
    they built.
    """
    if BROKEN_OFF.is_set():
        return None
    # What the user tells Ansible by environment is no part of this checkout.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
    environment |= {
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    }
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output and subprocess.STDOUT,
        start_new_session=True,
    )
    RUNNING.add(process)
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        stop(process)
        return None
    except KeyboardInterrupt:
        stop(process)
        raise
    finally:
        RUNNING.discard(process)


def stop(process):
    """Ends `process` and all of its group: asked twice, then killed."""
    for number, seconds in ((signal.SIGINT, 60), (signal.SIGTERM, 10)):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=seconds)
            break
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            continue
    # What is left of the group, if anything is.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def lint(limit, output=None):
    """The lint layer: every check counts as one test. output: as `run` has it."""
    result = Result()
    for name, command in lint_checks():
        print(f"-- {name}", file=output, flush=True)
        status = run(command, limit, output)
        if status == 0:
            result.passed += 1
        else:
            result.failures.append(
                f"{name}: {'took too long' if status is None else f'exit status {status}'}"
            )
    return result


def pytest(layer, limit, report, output=None):
    """A layer of pytest's: tests/LAYER, counted from its XML report. output: as `run` has it."""
    places = {"lab": ["tests/lab", *(f"--ignore={file}" for file in GUARDS)], "guards": GUARDS}
    command = [BIN / "python", "-m", "pytest", "-q", *places.get(layer, [f"tests/{layer}"])]
    command += [f"--junit-xml={report}"]
    status = run(command, limit, output)
    result = read_report(report)
    if status is None:
        result.failures.append(f"tests/{layer}: stopped at its limit of {limit / 60:g} minutes")
        result.passed = max(
            0, result.passed - 1
        )  # the report holds the test that was broken off as a passed one
    elif status == 5 and not result.skips:
        result.failures.append(f"tests/{layer}: there is no test in it")
    elif status not in (0, 5) and not result.failures:
        result.failures.append(f"tests/{layer}: pytest ended with status {status}")
    return result


def read_report(path):
    """Counts a JUnit XML report of pytest's, with each test's seconds; a missing or cut-off one counts as nothing."""
    result = Result()
    try:
        cases = list(ElementTree.parse(path).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return result
    for case in cases:
        skipped = case.find("skipped")
        name = f"{case.get('classname', '').replace('.', '/')}::{case.get('name')}"
        result.times.append((float(case.get("time", 0)), name))
        if case.find("failure") is not None or case.find("error") is not None:
            result.failures.append(name)
        elif skipped is not None:
            result.skips.append(skipped.get("message") or "no reason given")
        else:
            result.passed += 1
    return result


def summary(results):
    """The closing table, the reasons for skips, the failed tests, and the plain last line."""
    lines = ["", f"{'layer':<14}{'passed':>8}{'failed':>8}{'skipped':>9}{'time':>9}"]
    for layer, result in results.items():
        minutes, seconds = divmod(round(result.seconds), 60)
        counts = f"{result.passed:>8}{len(result.failures):>8}{len(result.skips):>9}"
        lines.append(f"{layer:<14}{counts}{f'{minutes}:{seconds:02}':>9}")
    slowest = [
        f"  {round(seconds):>4} s  {layer}: {name}"
        for layer, result in results.items()
        for seconds, name in sorted(result.times, reverse=True)[:SHOWN]
        if seconds >= SLOW
    ]
    if slowest:
        lines += ["", "Slowest, with their fixtures:", *slowest]
    reasons = Counter((layer, reason) for layer, result in results.items() for reason in result.skips)
    if reasons:
        lines += ["", "Skipped:"]
        lines += [f"  {layer}: {count} x {reason}" for (layer, reason), count in reasons.items()]
    failures = [f"  {layer}: {name}" for layer, result in results.items() for name in result.failures]
    if failures:
        lines += ["", "Failed:", *failures]
    passed = sum(result.passed for result in results.values())
    skipped = sum(len(result.skips) for result in results.values())
    lines += ["", f"{passed} passed, {len(failures)} failed, {skipped} skipped"]
    return "\n".join(lines)


def layer_result(layer, limit, reports, output=None):
    """Runs one layer. output: as `run` has it."""
    begin = time.monotonic()
    result = (
        lint(limit, output) if layer == "lint" else pytest(layer, limit, reports / f"{layer}.xml", output)
    )
    result.seconds = time.monotonic() - begin
    return result


class Beside(threading.Thread):
    """Layers, one after another, that run while others do."""

    def __init__(self, layers, limits, reports):
        super().__init__(daemon=True)
        self.layers, self.limits, self.reports = layers, limits, reports
        self.results = {}
        self.start()

    def run(self):
        for layer in self.layers:
            if BROKEN_OFF.is_set():
                return
            with (self.reports / f"{layer}.log").open("w") as output:
                result = layer_result(layer, self.limits[layer], self.reports, output)
            self.results[layer] = Result(failures=["interrupted"]) if BROKEN_OFF.is_set() else result

    def ended(self):
        """Wait for them, show what they printed, and return their results."""
        self.join()
        for layer in self.layers:
            print(f"\n==== {layer}", flush=True)
            log = self.reports / f"{layer}.log"
            print(log.read_text(errors="replace") if log.exists() else "", flush=True)
        return {layer: self.results.get(layer, Result(failures=["broken off"])) for layer in self.layers}


def main(names):
    unknown = [name for name in names if name not in LIMITS]
    if unknown:
        print(f"no layer is named {unknown[0]!r}; there are: {' '.join(LIMITS)}", file=sys.stderr)
        return 2
    # A killed runner tidies up, too. SIGINT is ignored in what a shell without job control starts in the background.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    BROKEN_OFF.clear()
    results, beside = {}, None
    reports = Path(tempfile.mkdtemp(prefix="trainyard-tests-"))
    whole = WHOLE if os.environ.get("TRAINYARD_FULL") else {}
    limits = {name: minutes * 60 * whole.get(name, 1) for name, minutes in LIMITS.items()}
    try:
        chains = [[layer for layer in chain if not names or layer in names] for chain in CHAINS]
        first, *others = filter(None, chains)
        beside = Beside(*others, limits, reports) if others else None
        for layer in first:
            print(f"\n==== {layer}", flush=True)
            results[layer] = Result(failures=["interrupted"])
            results[layer] = layer_result(layer, limits[layer], reports)
        if beside:
            results |= beside.ended()
    except KeyboardInterrupt:
        BROKEN_OFF.set()
        for process in list(RUNNING):
            stop(process)
        if beside:
            results |= beside.ended()
        return 130
    finally:
        print(summary({layer: results[layer] for layer in LIMITS if layer in results}), flush=True)
        shutil.rmtree(reports)
    return 1 if any(result.failures for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
