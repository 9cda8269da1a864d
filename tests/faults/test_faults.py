"""The fault matrix, on three real hosts: each fault is left to itself, and the run goes on with the same losses.

`make faults` runs it and prints a table of the times from the fault to the next step. A time is held to its limit where
the fault has one, plus what importing torch took on these hosts, all at once: they share this machine's cores.
"""

import contextlib
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from cupboard import HOSTS, Calm, Run, losses, memory_eaten, rank_of, saved
from test_train import book, stop

TABLE = []
# Who, and what became of it.
NAMED = r"node\d(, node\d)*( (is|are) gone| (was|were) cut off| takes? part|: its launcher was started anew)"
# Of a run that goes on without node2, which is dead.
ANSWERS = {
    "status": r"RUN STATE .* fault\d+ (?:running|saving) .* {} no answer",  # it saves at every fifth step
    "diagnose": r"The run goes on \(step \d+ of \d+\) without {} \(does not answer\)",
    "stop": "{}",  # what came of it the hosts tell
}
# Ten megabytes for etcd, and away with them.
REMEMBER = """
import base64, json, sys, urllib.request
def ask(what, **words):
    words = {key: base64.b64encode(value.encode()).decode() for key, value in words.items()}
    url = f"http://{sys.argv[1]}:2389/v3/kv/{what}"
    urllib.request.urlopen(url, json.dumps(words).encode(), timeout=30).read()
for number in range(100):
    ask("put", key=f"filler{number}", value="x" * 100_000)
ask("deleterange", key="filler", range_end="filles")
"""


@pytest.fixture(scope="module", autouse=True)
def table():
    """Printed when all is over."""
    yield
    print()
    for fault, seconds, limit, note in TABLE:
        print(f"{fault:<48} {seconds:6.1f} s  (limit {limit})  {note}")


@pytest.fixture(scope="module")
def importing(plays):
    """Seconds that torch and transformers take to load on all hosts at once, as when all their ranks begin anew."""
    load = "/opt/trainyard/env/current/bin/python -c 'import torch, transformers.models.gpt2.modeling_gpt2'"
    begin = time.monotonic()
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda host: plays.sh(host, load), HOSTS))
    return time.monotonic() - begin


@pytest.fixture(scope="module")
def curve(plays, tmp_path_factory):
    return Calm(plays, tmp_path_factory.mktemp("curve"))


def held(fault, seconds, limit, importing, note=""):
    """Note the time in the table, and hold it to its limit."""
    TABLE.append((fault, seconds, f"{limit} s + {importing:.0f} s" if limit else "none", note))
    assert not limit or seconds < limit + importing


@pytest.mark.parametrize(("signal", "host"), [("KILL", "node2"), ("KILL", "node1"), ("STOP", "node2")])
def test_a_rank(plays, curve, importing, signal, host):
    """Killed, the one that the others' connections begin at, too; or hung, without a word."""
    reason = {"KILL": f"restart: .*{host} was killed by SIGKILL", "STOP": f"restart: {host}: a rank hung"}[
        signal
    ]
    run = Run(plays)
    plays.sh(host, f"kill -{signal} {rank_of(plays, host)}")
    seconds = run.wait(lambda: run.goes_on(2, *HOSTS))
    held(f"{host}'s rank gets SIG{signal}", seconds, 10 if signal == "KILL" else 40, importing)
    run.end(curve, *HOSTS, reason=reason)


def test_diagnose_names_the_rank_that_hangs_and_its_cure_is_one(plays, curve):
    """Long before timeout_seconds: the run goes on without a new attempt."""
    run = Run(plays, timeout_seconds=600)
    pid = rank_of(plays, "node2")
    plays.sh("node2", f"kill -STOP {pid}")
    done = book(plays, "playbooks/diagnose.yml", run=run.name)
    words = " ".join(done.stdout.split())
    assert re.search(rf"Rank \d on node2 was stopped by a signal [^.]* `kill -CONT {pid}`", words), words
    assert words.count("(no stack)") <= 1, words  # of the one that is stopped, py-spy may have none
    step = run.status("node1")["step"]
    plays.sh("node2", f"kill -CONT {pid}")
    run.wait(lambda: run.status("node1")["step"] > step + 2)
    assert run.status("node1")["attempt"] == 1
    run.end(curve, *HOSTS)


@pytest.mark.parametrize("host", ["node3", "node1"])
def test_a_launcher(plays, curve, importing, host):
    run = Run(plays)
    plays.sh(host, f"systemctl kill --kill-whom=main --signal=KILL trainyard@{run.name}")
    seconds = run.wait(lambda: run.goes_on(2, *HOSTS) or run.goes_on(3, *HOSTS))
    held(f"{host}'s launcher gets SIGKILL", seconds, 10, importing)
    run.end(curve, *HOSTS, reason=f"restart: {host}(: its launcher was started anew| is gone)")


@pytest.mark.parametrize("host", ["node1", "node3"])
def test_a_power_cut_and_back_after_30_seconds(plays, curve, importing, host):
    run = Run(plays)
    others = [one for one in HOSTS if one != host]
    begin = time.monotonic()  # of the cut, which takes its time where others have the processor
    plays.lab.power(host, False)
    try:
        run.wait(lambda: run.goes_on(2, *others))
        held(f"{host} loses its power", time.monotonic() - begin, 20, importing)
        time.sleep(max(0, 30 - (time.monotonic() - begin)))
    finally:
        plays.lab.power(host, True)
    seconds = run.wait(lambda: run.goes_on(3, *HOSTS))
    held(f"{host} boots and is taken in", seconds, None, importing)
    run.end(curve, *HOSTS, reason=f"restart: {host} is gone")


@pytest.mark.parametrize("host", ["node1", "node2"])
def test_a_wire_is_out_for_20_seconds(plays, curve, importing, host):
    run = Run(plays)
    plays.lab.cut(host)
    try:
        time.sleep(20)
    finally:
        plays.lab.join(host)
    seconds = 20 + run.wait(lambda: any(run.goes_on(attempt, *HOSTS) for attempt in (2, 3, 4)))
    held(f"{host}'s wire is out for 20 s, until all take part", seconds, None, importing)
    named = rf"(node\d, )*{host}(, node\d)*"
    run.end(curve, *HOSTS, reason=f"restart: {named} ((is|are) gone|(was|were) cut off)")


@pytest.mark.parametrize("host", ["node1", "node3"])
def test_a_wire_is_out_for_good(plays, curve, importing, host):
    """Two halves never train the same run: the host that is alone stops before the others go on."""
    run = Run(plays)
    others = [one for one in HOSTS if one != host]
    plays.lab.cut(host)
    try:
        seconds = run.wait(lambda: run.goes_on(2, *others))
        held(f"{host}'s wire is out for good", seconds, 20, importing)
        assert not plays.sh(host, "pgrep -f 'trainer [t]rain' || true")
        run.wait(lambda: run.status(host).get("state") == "stalled", 30)
        assert "etcd" in run.status(host)["reason"]
    finally:
        plays.lab.join(host)
    run.wait(lambda: run.goes_on(3, *HOSTS))
    run.end(curve, *HOSTS, reason=f"restart: {host} is gone")


def test_a_flipped_byte_in_the_newest_checkpoint(plays, curve, importing):
    run = Run(plays)
    folder = f"/var/lib/trainyard/runs/{run.name}/checkpoints"
    flip = (
        f"f=$(ls -d {folder}/step-* | tail -1)/model.safetensors; "
        "printf X | dd of=$f bs=1 seek=4000 conv=notrunc status=none"
    )
    run.wait(lambda: saved(run) >= 10)  # there is one before it to go on from
    for host in ("node1", "node2"):  # both copies
        plays.sh(host, f"systemctl kill --signal=STOP trainyard@{run.name}")
    newest = 0
    for host in ("node1", "node2"):
        newest = max(
            newest, int(plays.sh(host, f"ls -d {folder}/step-* | tail -1").strip().rpartition("-")[2])
        )
        plays.sh(host, flip)
        plays.sh(
            host, f"kill -KILL {rank_of(plays, host)}; systemctl kill --signal=CONT trainyard@{run.name}"
        )
    seconds = run.wait(lambda: any(run.goes_on(attempt, *HOSTS) for attempt in (2, 3, 4)))
    held("the newest checkpoint is damaged, both copies", seconds, None, importing)
    log = plays.sh("node1", f"cat /var/lib/trainyard/runs/{run.name}/logs/rank-0.log")
    assert "passed over a damaged checkpoint" in log
    run.end(curve, *HOSTS, damaged=newest, reason=f"damaged checkpoint: .*step-{newest:08d}")


def test_a_host_shuts_down_and_boots(plays, curve, importing):
    """Cleanly, as by `reboot`: nobody waits for a lease."""
    run = Run(plays)
    plays.sh("node2", "systemctl poweroff")
    seconds = run.wait(lambda: run.goes_on(2, "node1", "node3"))
    held("a host shuts down", seconds, None, importing)
    plays.lab.power("node2", False)
    plays.lab.power("node2", True)
    run.wait(lambda: run.goes_on(3, *HOSTS))
    run.end(curve, *HOSTS, reason="restart: node2 is gone")


@pytest.mark.parametrize("lost", ["node1", "node3"])
def test_a_host_is_gone_for_good(plays, curve, importing, lost):
    """The head, or a worker: the others take the run to its end."""
    run = Run(plays, steps=100)
    others = [host for host in HOSTS if host != lost]
    begin = time.monotonic()
    plays.lab.power(lost, False)
    try:
        run.wait(lambda: run.goes_on(2, *others))
        held(f"{lost} is gone for good", time.monotonic() - begin, 20, importing)
        run.wait(lambda: all(run.status(host).get("state") == "finished" for host in others))
    finally:
        plays.lab.power(lost, True)
        run.wait(lambda: run.status(lost))
        stop(plays, run.name)
    run.end(curve, *others, reason=f"restart: {lost} is gone")
    assert list(losses(run.metrics(others[0]))) == list(range(1, 101))


def test_stopped_and_resumed(plays, curve, importing):
    """What a person does, and no fault."""
    run = Run(plays)
    stop(plays, run.name)
    before = losses(run.metrics("node1"))
    begin = time.monotonic()
    done = book(plays, "train.yml", run=run.name, resume="true", detach="true")
    assert done.returncode == 0, done.stdout
    run.wait(lambda: run.goes_on(2, *HOSTS))
    held("stopped, then train.yml -e resume=true", time.monotonic() - begin, None, importing)
    run.wait(lambda: (run.status("node1")["step"] or 0) > len(before) + 20)
    run.end(curve, *HOSTS, reason="^resume: ")


def crowd():
    """How many of this priority share a core, measured: what a second of processor time takes in seconds."""
    begin, used = time.monotonic(), time.process_time()
    while time.process_time() - used < 1:
        pass
    return max(1.0, time.monotonic() - begin)


def stand_back(plays, hosts):
    """Ranks at the lowest priority: hosts have cores to spare for others, the lab has none."""
    for host in hosts:
        plays.sh(
            host, "for p in $(pgrep -u trainyard); do renice -n 19 -p $(ls /proc/$p/task) >/dev/null; done"
        )


@pytest.mark.parametrize("name", ["status", "diagnose", "stop"])
def test_a_playbook_answers_right_after_a_host_died(plays, name):
    """Before the others go on without it, when they do not know yet."""
    run, dead, living = Run(plays), "node2", ["node1", "node3"]
    stand_back(plays, HOSTS)
    busy = crowd()
    plays.lab.power(dead, False)
    try:
        begin = time.monotonic()
        done = book(plays, f"playbooks/{name}.yml", run=run.name)
        seconds = time.monotonic() - begin
        TABLE.append((f"{name}.yml right after {dead} died", seconds, "10 s", f"{busy:.2f} at a core"))
        assert dead in done.stdout and (name == "stop" or done.returncode == 0), done.stdout
        assert seconds < 10 * busy, done.stdout
        if name == "stop":
            assert {run.status(host)["state"] for host in living} == {"stopped"}
        else:
            run.wait(lambda: run.goes_on(2, *living))
            book(plays, "playbooks/stop.yml", run=run.name)  # no success: one is silent
            assert {run.status(host)["state"] for host in living} == {"stopped"}
    finally:
        plays.lab.power(dead, True)
        run.wait(lambda: run.status(dead).get("state") == "stopped")


@pytest.mark.parametrize("dead", ["node2", "node1"])
def test_the_playbooks_answer_while_a_host_is_dead(plays, dead):
    """In ten seconds, on hosts with cores to spare: here the ranks get what nobody else wants."""
    run, living = Run(plays), [host for host in HOSTS if host != dead]
    plays.lab.power(dead, False)
    try:
        run.wait(lambda: run.goes_on(2, *living))
        stand_back(plays, living)
        for name in ("status", "diagnose", "stop"):
            busy = crowd()
            begin = time.monotonic()
            done = book(plays, f"playbooks/{name}.yml", run=run.name)
            seconds = time.monotonic() - begin
            TABLE.append((f"{name}.yml while {dead} is dead", seconds, "10 s", f"{busy:.2f} at a core"))
            assert re.search(ANSWERS[name].format(dead), " ".join(done.stdout.split())), done.stdout
            assert name == "stop" or done.returncode == 0, done.stdout
            assert seconds < 10 * busy, done.stdout
        assert {run.status(host)["state"] for host in living} == {"stopped"}
    finally:
        plays.lab.power(dead, True)
        run.wait(lambda: run.status(dead).get("state") == "stopped")


def test_a_full_disk_during_a_checkpoint(plays, curve, importing):
    """Another host has its copy. Where none has room, the checkpoint alone is lost: no step, and no new attempt."""
    run = Run(plays)
    folder = f"/var/lib/trainyard/runs/{run.name}/checkpoints"

    def warned(words):
        run.wait(lambda: words in (run.status("node1").get("warning") or ""))

    @contextlib.contextmanager
    def full(host):
        made = f"install -d -o trainyard -g trainyard {folder}"  # the third host has had no copy to keep
        plays.sh(host, f"{made}; mount -t tmpfs -o size=64k,uid=$(id -u trainyard) full {folder}")
        try:
            yield
        finally:
            plays.sh(host, f"umount {folder}")

    with full("node2"):
        warned("copies are on node1 and node3")
        run.wait(lambda: plays.sh("node3", f"ls -d {folder}/step-* || true"))
        with full("node3"):
            warned("the checkpoint cannot be saved")
    begin = time.monotonic()
    run.wait(lambda: run.status("node1").get("warning") is None)
    assert all(run.status(host)["attempt"] == 1 for host in HOSTS)
    held("a full disk during a checkpoint, until one is saved", time.monotonic() - begin, None, importing)
    run.end(curve, *HOSTS, reason="checkpoint elsewhere: .*node2")


def test_somebody_fills_the_disk_that_a_run_is_on(plays, curve, importing):
    """Metrics, status and logs lie there, too: no rank ends over them, and no line is lost."""
    folders = []

    def mount(folder):
        # train.yml refuses directories that are somebody else's.
        owner = "uid=$(id -u trainyard),gid=$(id -g trainyard),mode=750"
        plays.sh("node2", f"mkdir -p {folder}; mount -t tmpfs -o size=96m,{owner} small {folder}")
        folders.append(folder)

    run = Run(plays, before=mount, checkpoint_every=0)
    try:
        plays.sh("node2", f"cat /dev/zero > {folders[0]}/filler || true")
        for host in HOSTS:  # node2's takes the place of the one before
            run.wait(lambda host=host: "node2: no space" in (run.status(host).get("warning") or ""), 60)
        step = run.status("node1")["step"]
        run.wait(lambda: run.status("node1")["step"] > step + 5)
        assert run.status("node2")["step"] > step
        plays.sh("node2", f"rm {folders[0]}/filler")
        seconds = run.wait(lambda: all(run.status(host).get("warning") is None for host in HOSTS), 60)
        held("a disk that somebody fills, until all is written", seconds, None, importing)
        assert all(run.status(host)["attempt"] == 1 for host in HOSTS)
        run.end(curve, *HOSTS, reason="disk full: node2: no space left for metrics.jsonl")
    finally:
        plays.sh("node2", f"systemctl stop trainyard@{run.name}; umount -l {folders[0]}")


def test_the_disk_that_the_memory_of_runs_is_on_is_full(plays, curve, importing):
    """That host's etcd ends; the others remember, the run goes on, and it is back when there is room.

    Room enough: etcd allocates 64 MB for the log after the one that it writes, and needs as much again to mend one
    whose last record was cut short ("read wal error … and cannot be repaired").
    """
    data, kept, unit = "/var/lib/trainyard-etcd", "/root/kept", "trainyard-etcd"

    def ends():
        return int(plays.sh("node2", f"systemctl show -P NRestarts {unit}"))

    def answers():
        address = plays.lab.host("node2").address
        asked = f"from urllib.request import urlopen; print(urlopen('http://{address}:2389/health').read())"
        return "true" in plays.sh("node2", f'python3 -c "{asked}" 2>&1 || true')

    def fill():
        plays.sh("node2", f"cat /dev/zero >> {filler} || true")
        plays.sh("node1", f"python3 -c '{REMEMBER}' {plays.lab.host('node1').address}")

    plays.sh(
        "node2",
        f"systemctl stop {unit}; cp -a {data} {kept}; mount -t tmpfs -o size=256m small {data}; "
        f"cp -a {kept}/. {data}; systemctl start {unit}",
    )
    try:
        run = Run(plays)
        filler = plays.sh("node2", f"ls -d {data}/*").strip() + "/filler"
        begin = ends()
        fill()
        run.wait(lambda: ends() > begin + 1, 60)  # again: it is still full
        step = run.status("node1")["step"]
        run.wait(lambda: all(run.status(host)["step"] > step + 10 for host in HOSTS))
        # As it starts anew it may answer, until something is to be written; what it removes for that leaves it room.
        run.wait(lambda: fill() or not answers(), 120)
        plays.sh("node2", f"rm {filler}")
        seconds = run.wait(answers, 60)
        held("etcd's disk is full on a host, until it answers again", seconds, None, importing)
        assert all(run.status(host)["attempt"] == 1 for host in HOSTS)
        run.end(curve, *HOSTS)
    finally:
        plays.sh(
            "node2",
            f"systemctl stop {unit}; rm -r {kept}; cp -a {data} {kept}; umount {data}; rm -rf {data}; "
            f"mv {kept} {data}; rm -f {data}/*/filler; systemctl start {unit}",
        )


def test_memory_runs_out_on_one_host(plays, curve, importing):
    run = Run(plays)
    with memory_eaten(plays, "node2"):
        run.wait(lambda: (run.status("node1").get("attempt") or 0) > 1)
    seconds = run.wait(lambda: any(run.goes_on(attempt, *HOSTS) for attempt in (2, 3, 4)))
    held("memory runs out on a host, and is given back", seconds, None, importing)
    run.end(
        curve,
        *HOSTS,
        # In the lab's hosts no OOMScoreAdjust holds: at times the kernel takes the launcher or its agent there.
        reason=r"restart: .*node2(: its launcher was started anew: .*|(: torchrun's agent)? was killed by SIGKILL); "
        "the kernel does so when memory runs out",
    )


def test_memory_runs_out_on_one_host_for_good(plays, curve, importing):
    """What takes it stays: the next attempts fail there, too, killed or refused, and the others go on without it."""
    run = Run(plays, steps=300)
    others = ("node1", "node3")
    with memory_eaten(plays, "node2"):
        seconds = run.wait(lambda: any(run.goes_on(attempt, *others) for attempt in range(3, 8)))
        held("memory runs out on a host for good", seconds, None, importing)
        run.wait(lambda: all(run.status(host).get("state") == "finished" for host in others))
    run.end(curve, *others, reason="restart: .*node2 failed again and again and is left out")
    assert list(losses(run.metrics("node1"))) == list(range(1, 301))


def test_all_units_are_restarted(plays, curve, importing):
    """The memory of runs, the firewall, what keeps network and clock, on all hosts at once."""
    run = Run(plays)
    for host in HOSTS:
        plays.sh(
            host,
            f"systemctl restart --no-block trainyard@{run.name} trainyard-etcd trainyard-firewall; "
            # A container follows its machine's clock, and has no chrony.
            "systemctl try-restart --no-block systemd-networkd; systemctl try-restart --no-block chrony || true",
        )
    seconds = run.wait(lambda: any(run.goes_on(attempt, *HOSTS) for attempt in range(2, 6)))
    held("all units are restarted", seconds, None, importing)
    run.end(curve, *HOSTS, reason=f"restart: {NAMED}")


def test_everything_loses_its_power(plays, curve, importing):
    run = Run(plays)
    for host in HOSTS:
        plays.lab.power(host, False)
    for host in HOSTS:
        plays.lab.power(host, True)
    seconds = run.wait(lambda: any(run.goes_on(attempt, *HOSTS) for attempt in range(2, 6)))
    held("all hosts lose their power, and boot", seconds, None, importing)
    run.end(curve, *HOSTS, reason=f"restart: {NAMED}")
