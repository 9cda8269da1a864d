"""`trainer launch`: the real command, a process a host, as the hosts' units start it."""

import contextlib
import os
import signal
import socket
import time
from pathlib import Path

import pytest
import ranks
from processes import descendants

from trainer import cli

pytestmark = pytest.mark.distributed


# What has happened at the end of good runs, in torch's farewell: a rank of several must have ended before it.
FAREWELL = "import atexit, os\nif 'RANK' in os.environ: atexit.register(os.abort)\n"


@pytest.mark.full
def test_hosts_with_different_numbers_of_ranks(material, whole, tmp_path):
    """One rank on the head, two on the other; logs by global rank; equal to one process."""
    (tmp_path / "farewell").mkdir()
    (tmp_path / "farewell/sitecustomize.py").write_text(FAREWELL)
    path = f"{tmp_path / 'farewell'}{os.pathsep}{ranks.ROOT}"
    attempt = ranks.Launch(tmp_path, [1, 2], material / "run.yaml", PYTHONPATH=path)
    assert attempt.ended() == [(0, ""), (0, "")]
    for node in ("node0", "node1"):
        assert ranks.losses(tmp_path / node) == pytest.approx(whole, rel=1e-5)
        assert ranks.status(tmp_path / node)["state"] == "finished"
        assert (tmp_path / node / "model" / "model.safetensors").exists()
    logs = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.log"))
    assert logs == ["node0/logs/rank-0.log", "node1/logs/rank-1.log", "node1/logs/rank-2.log"]


def test_a_signal_to_one_launcher_stops_all_and_a_second_attempt_finishes(material, tmp_path):
    """SIGTERM at the second host's launcher; all save and end with 75; the next attempt appends to the logs."""
    long = (material / "run.yaml", "steps=100000", "checkpoint_every=0")
    attempt = ranks.Launch(tmp_path, [1, 1], *long)
    wait_for_step(tmp_path, 5)
    attempt.nodes[1].send_signal(signal.SIGTERM)
    assert [code for code, _ in attempt.ended(240)] == [75, 75]
    for node in ("node0", "node1"):
        state = ranks.status(tmp_path / node)
        assert (state["state"], state["attempt"]) == ("stopped", 1)
        assert state["last_checkpoint"] == state["step"] and "stopped on request" in state["reason"]
        assert not (tmp_path / node / "stop").exists()
    done = ranks.status(tmp_path / "node0")["step"]

    again = ranks.Launch(tmp_path, [1, 1], material / "run.yaml", f"steps={done + 3}", "checkpoint_every=0")
    assert again.ended() == [(0, ""), (0, "")]
    state = ranks.status(tmp_path / "node0")
    assert (state["state"], state["step"], state["attempt"]) == ("finished", done + 3, 2)
    log = (tmp_path / "node0" / "logs" / "rank-0.log").read_text()
    assert "attempt 1, rank 0 of 2" in log and "attempt 2, rank 0 of 2" in log


def test_the_stop_command(material, tmp_path):
    attempt = ranks.Launch(tmp_path, [1], material / "run.yaml", "steps=100000", "checkpoint_every=0")
    wait_for_step(tmp_path, 2)
    # Nobody but this machine could have reached the run: all its sockets listen on loopback.
    assert set(listening(attempt.nodes[0].pid)) == {"127.0.0.1"}
    assert cli.main(["stop", str(tmp_path / "node0")]) == 0
    assert [code for code, _ in attempt.ended(240)] == [75]
    assert ranks.status(tmp_path / "node0")["state"] == "stopped"
    # Now there is nothing to stop, and no file must lie in wait for the next attempt.
    assert cli.main(["stop", str(tmp_path / "node0")]) == 0
    assert not (tmp_path / "node0" / "stop").exists()


@pytest.mark.full
def test_a_stop_that_the_ranks_see_before_the_launcher(material, tmp_path):
    """Its look comes four times a second; a step may be over sooner."""
    attempt = ranks.Launch(tmp_path, [1], material / "run.yaml", "steps=100000", "checkpoint_every=0")
    wait_for_step(tmp_path, 2)
    (launcher,) = attempt.nodes
    launcher.send_signal(signal.SIGSTOP)
    try:
        assert cli.main(["stop", str(tmp_path / "node0")]) == 0
        end = time.monotonic() + 60
        while ranks.status(tmp_path / "node0")["state"] != "ending" and time.monotonic() < end:
            time.sleep(0.1)
        assert ranks.status(tmp_path / "node0")["state"] == "ending"
    finally:
        launcher.send_signal(signal.SIGCONT)
    assert [code for code, _ in attempt.ended(60)] == [75]
    assert ranks.status(tmp_path / "node0")["attempt"] == 1
    assert not (tmp_path / "node0" / "stop").exists()


@pytest.mark.full
def test_a_killed_rank_is_named_with_its_signal(material, tmp_path):
    """Where the first fault shall end a run."""
    long = ("steps=100000", "checkpoint_every=0", "restarts=0")
    attempt = ranks.Launch(tmp_path, [2], material / "run.yaml", *long)
    wait_for_step(tmp_path, 2)
    victim = rank_pids(attempt.nodes[0].pid)["1"]
    os.kill(victim, signal.SIGKILL)
    ((code, said),) = attempt.ended(240)
    assert code == 1
    reason = ranks.status(tmp_path / "node0")["reason"]
    assert "rank 1 on node0 was killed by SIGKILL" in reason and reason in said
    assert ranks.status(tmp_path / "node0")["state"] == "failed"


@pytest.mark.full
def test_a_rank_that_hears_no_signal_is_not_waited_for_when_another_has_failed(material, tmp_path):
    """As on a GPU, where it waits for the one that is gone; torchrun's agent would wait half a minute for it."""
    long = ("steps=100000", "checkpoint_every=0", "restarts=0")
    run = ranks.Launch(tmp_path, [2], material / "run.yaml", *long)
    wait_for_step(tmp_path, 2)
    pids = rank_pids(run.nodes[0].pid)
    os.kill(pids["1"], signal.SIGSTOP)
    os.kill(pids["0"], signal.SIGKILL)
    begin = time.monotonic()
    ((code, said),) = run.ended(60)
    assert code == 1 and "rank 0 on node0 was killed by SIGKILL" in said
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize("late", ["0", "1"])
def test_a_killed_launcher_leaves_no_rank_behind(material, tmp_path, late):
    """late: ranks connect when they first talk, as many do; with the launcher goes what they find each other by."""
    endless = ("steps=100000", "checkpoint_every=0")
    attempt = ranks.Launch(tmp_path, [2], material / "run.yaml", *endless, TORCH_GLOO_LAZY_INIT=late)
    wait_for_step(tmp_path, 2)
    pids = rank_pids(attempt.nodes[0].pid).values()
    attempt.nodes[0].kill()
    attempt.ended()
    deadline = time.monotonic() + 120
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    known = ranks.status(tmp_path / "node0")
    assert known["state"] == "ending"  # how the run has ended is a launcher's to say
    assert known["last_checkpoint"] == known["step"]  # they saved, too


@pytest.mark.full
def test_a_port_in_use_is_passed_over(material, whole, tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        assert ranks.Launch(tmp_path, [2], material / "run.yaml", MASTER_PORT=port).ended() == [(0, "")]
    assert ranks.losses(tmp_path / "node0") == pytest.approx(whole, rel=1e-5)


def test_an_address_that_is_not_this_host_s(material, tmp_path):
    ((code, said),) = ranks.Launch(
        tmp_path, [1], material / "run.yaml", CLUSTER_ADDRESS="127.0.0.999"
    ).ended()
    assert code == 2
    assert "CLUSTER_ADDRESS 127.0.0.999 is no address of this host" in said and "Traceback" not in said


@pytest.mark.full
def test_hosts_that_do_not_come(material, tmp_path):
    """The head waits for a second host that never comes: a reason, not a hang."""
    attempt = ranks.Launch(tmp_path, [1, 1], material / "run.yaml", "timeout_seconds=3", "min_nodes=2")
    attempt.nodes[1].kill()
    (code, said), _ = attempt.ended(240)
    assert code == 5
    assert "1 of 2 hosts are ready: node0" in said and "firewall" in said and "Traceback" not in said
    assert ranks.status(tmp_path / "node0")["state"] == "failed"


@pytest.mark.parametrize(
    "how",
    [
        lambda process, _: process.send_signal(signal.SIGINT),
        lambda _, run_dir: cli.main(["stop", str(run_dir)]),  # as the unit's ExecStop does
    ],
    ids=["signal", "command"],
)
def test_a_stop_while_waiting_for_the_others(material, tmp_path, how):
    attempt = ranks.Launch(tmp_path, [1, 1], material / "run.yaml")
    attempt.nodes[1].kill()
    deadline = time.monotonic() + 60
    while not (tmp_path / "node0" / "status.json").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    how(attempt.nodes[0], tmp_path / "node0")
    (code, said), _ = attempt.ended(120)
    assert code == 75 and "before the hosts had met" in said


def test_bad_data_ends_with_2_and_the_rank_s_message(material, tmp_path):
    data = tmp_path / "bad.jsonl"
    data.write_text("{\n")
    ((code, said),) = ranks.Launch(tmp_path, [2], material / "run.yaml", f"dataset={data}").ended()
    assert code == 2
    assert f"{data}:1: not JSON" in said and "Traceback" not in said
    assert ranks.status(tmp_path / "node0")["reason"] in said


def wait_for_step(root, step, timeout=240):
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if len(ranks.losses(root / "node0")) >= step:
            return
        time.sleep(0.05)
    logs = "\n".join(path.read_text() for path in root.rglob("*.log"))
    raise AssertionError(f"no step {step} within {timeout} s: {logs}")


def listening(launcher: int) -> list[str]:
    """The addresses on which the launcher, its agent and its ranks listen for TCP."""
    found = []
    for pid in [launcher, *descendants(launcher)]:
        inodes = {
            os.readlink(file)[8:-1]
            for file in Path(f"/proc/{pid}/fd").iterdir()
            if os.path.islink(file) and os.readlink(file).startswith("socket:[")
        }
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and words[9] in inodes:
                    raw = bytes.fromhex(words[1].split(":")[0])
                    found.append(socket.inet_ntoa(raw[::-1]) if len(raw) == 4 else words[1])
    return found


def rank_pids(launcher: int) -> dict[str, int]:
    """The ranks below a launcher, by rank."""
    found = {}
    for pid in descendants(launcher):
        with contextlib.suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
            found |= {value[5:]: pid for value in variables if value.startswith("RANK=")}
    return found
