"""Runs that Slurm keeps: the job's script, run by a real shell; what stands against a run; how its job is told."""

import getpass
import json
import os
import shlex
import subprocess

import inventory_values
import pytest

from plugins.action import run_follow
from plugins.filter import plan, slurm
from plugins.filter.cluster_status import cluster_status
from plugins.module_utils import host_runs, run_keeper


def fact(number=1, **changes):
    """What run_host says of node `number` where Slurm was asked, too: nothing stands against a run."""
    nodes = [
        {"name": f"n{n}", "hostname": f"node{n}", "address": f"n{n}", "partition": part, "gres": "(null)"}
        for n in (1, 2, 3)
        for part in (("all", "fast") if n < 3 else ("all",))
    ]
    asked = {"lacking": [], "fault": "", "nodes": nodes, "hostname": f"node{number}", "uid": 998, **changes}
    return {"address": f"10.77.0.1{number}", "slurm": asked}


def facts(*changes):
    return {f"node{n}": fact(n, **change) for n, change in enumerate(changes, 1)}


# ---- the script ----

# What stands in for Slurm on the PATH: srun does the one host's part here, and ends as that does.
SRUN = '#!/bin/sh\necho "$@" >srun.words\nwhile [ "$1" != /bin/sh ]; do shift; done\nexec "$@"\n'
SCONTROL = '#!/bin/sh\necho "$@" >>scontrol.words\n'


@pytest.fixture
def job(tmp_path):
    """`job(trainer, …)`: the job's exit code, run with a trainer of that shell text, in a place of odd names."""
    commands = tmp_path / "bin"
    commands.mkdir()
    run_dir = tmp_path / 'it\'s a "run" of $5'
    (run_dir / "logs").mkdir(parents=True)
    env = tmp_path / "my run.env"
    env.write_text("TRAINYARD_LAUNCH=now\nODD='two words'\n")
    places = {
        "trainer": str(commands / "the trainer"),
        "env": str(env),
        "config": str(tmp_path / "a run.yaml"),
    }
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)

    def run(trainer, restarts=1, begun=0):
        (commands / "the trainer").write_text(f"#!/bin/sh\n{trainer}\n")
        (commands / "the trainer").chmod(0o755)
        text = slurm.slurm_script(
            facts({}, {}),
            "first",
            run_dir=str(run_dir),
            chosen={"partition": "fast", "account": ""},
            options=["--comment=it's two words"],
            restarts=restarts,
            places=places,
        )
        (run_dir / "job.sbatch").write_text(text)
        environment = {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
        if begun:
            environment["SLURM_RESTART_COUNT"] = str(begun)
        done = subprocess.run(["sh", str(run_dir / "job.sbatch")], env=environment, timeout=60)
        return done.returncode

    run.dir = run_dir
    return run


def requeued(job):
    file = job.dir / "scontrol.words"
    return file.read_text().splitlines() if file.exists() else []


@pytest.mark.parametrize(("code", "ends"), [(0, 0), (75, 0), (3, 3), (1, 1)])
def test_a_job_ends_as_the_run_does_and_leaves_the_trainers_code(job, code, ends):
    assert job(f'echo "$@" "$ODD" "$TRAINYARD_LAUNCH" >said; exit {code}') == ends
    assert (job.dir / "exit").read_text() == f"{code}\n"
    assert requeued(job) == []
    said = (job.dir / "said").read_text()
    assert said == f"launch {job.dir.parent}/a run.yaml two words now-0\n"
    assert "--kill-on-bad-exit=1" in (job.dir / "srun.words").read_text()


def test_what_the_trainer_says_is_kept_beside_the_ranks_logs(job):
    job("echo refused >&2; exit 2")
    assert (job.dir / "logs/launch.log").read_text() == "refused\n"


@pytest.mark.parametrize(
    "trainer",
    ["kill -9 $$", "trap 'exit 75' TERM; kill -TERM $PPID $$; sleep 5 & wait"],
    ids=["it was killed", "Slurm told it to end"],
)
def test_a_job_that_was_cut_short_goes_into_the_queue_again(job, trainer):
    assert job(trainer) == 0
    assert requeued(job) == ["requeue 7"]


def test_each_start_of_a_job_is_a_start_of_the_run(job):
    job('echo "$TRAINYARD_LAUNCH" >said', begun=3)
    assert (job.dir / "said").read_text() == "now-3\n"


def test_a_run_that_has_finished_is_not_begun_again_whatever_srun_says(job):
    (job.dir.parent / "bin/srun").write_text(SRUN.replace("exec", "") + "exit 1\n")
    assert job("exit 0") == 0
    assert requeued(job) == []
    assert job("exit 5") == 0  # a host was lost meanwhile: srun ended the others
    assert requeued(job) == ["requeue 7"]


def test_what_an_earlier_start_left_is_ended_first(job):
    left = subprocess.Popen(["sleep", "60"], env={**os.environ, "TRAINYARD_RUN_DIR": str(job.dir)})
    other = subprocess.Popen(["sleep", "60"], env={**os.environ, "TRAINYARD_RUN_DIR": f"{job.dir}-other"})
    try:
        assert job("exit 0") == 0
        assert left.wait(5) == -9
        assert other.poll() is None
    finally:
        left.kill()
        other.kill()


def test_a_signal_that_comes_after_the_end_brings_nothing_back(job):
    assert job("trap '' TERM; kill -TERM $PPID; exit 0") == 0
    assert requeued(job) == []


def test_a_job_that_gets_no_further_is_given_up(job):
    status = job.dir / "status.json"
    for times, step in enumerate((None, 4, 9), 1):
        if step:
            status.write_text(json.dumps({"state": "running", "last_checkpoint": step}, indent=1))
        assert job("kill -9 $$") == 0
        assert len(requeued(job)) == times
    assert job("kill -9 $$") == 1
    assert len(requeued(job)) == 3


def test_no_requeue_where_no_restart_is_wanted(job):
    assert job("kill -9 $$", restarts=0) == 1
    assert requeued(job) == []


def options(text):
    """The options of a script's, as sbatch reads them."""
    lines = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    return [shlex.split(line) for line in lines]


def script(them, given, device="auto"):
    return slurm.slurm_script(
        them,
        "first",
        run_dir="/run",
        chosen={},
        options=given,
        restarts=1,
        places={"trainer": "/t", "env": "/e", "config": "/c"},
        device=device,
    )


def test_the_options_name_the_nodes_as_slurm_does_and_those_of_the_user_come_last(job):
    job("exit 0")
    found = options((job.dir / "job.sbatch").read_text())
    assert all(len(words) == 1 for words in found)
    words = [word for (word,) in found]
    assert words[-1] == "--comment=it's two words"
    for wanted in (
        *(
            "--job-name=trainyard-first",
            "--nodes=2",
            "--nodelist=n1,n2",
            "--ntasks-per-node=1",
            "--exclusive",
        ),
        *("--requeue", "--open-mode=append", "--signal=TERM@300", "--partition=fast"),
        *(f"--output={job.dir}/logs/job.log", f"--chdir={job.dir}"),
    ):
        assert wanted in words
    assert not any(word.startswith("--account") for word in words)


# ---- what stands against a run ----


def test_nothing_stands_against_hosts_that_slurm_has():
    assert slurm.slurm_problems(facts({}, {}), "fast") == []


def test_a_node_is_known_by_its_name_its_host_name_or_its_address():
    them = facts({"hostname": "other"}, {}, {"hostname": "odd"})
    them["n1"] = them.pop("node1")
    them["node3"]["slurm"]["nodes"][-1]["address"] = "10.77.0.13"
    assert slurm.slurm_nodes(them) == {"node2": "n2", "node3": "n3", "n1": "n1"}


@pytest.mark.parametrize(
    ("them", "partition", "words"),
    [
        (
            facts({}, {"lacking": ["sbatch", "srun"]}),
            "",
            ["node2: found no sbatch, srun", "slurm-client", "/opt/slurm/bin"],
        ),
        (
            facts({"fault": "Unable to contact"}, {}),
            "",
            ["node1: Slurm does not answer: Unable to contact", "munge"],
        ),
        (facts({}, {"uid": 997}), "", ["node1 has 998, node2 has 997", "usermod -u"]),
        (facts({}, {"hostname": "x"}, {}), "", []),
        (facts({}, {}), "nope", ["trainer_slurm_partition: found nope", "all, fast"]),
        (facts({}, {}, {}), "fast", ["node3 of the run is not in fast", "-l"]),
    ],
)
def test_what_slurm_has_against_a_run_is_told_with_its_cure(them, partition, words):
    said = slurm.slurm_problems(them, partition)
    assert len(said) == bool(words)
    for word in words:
        assert word in said[0]


def test_a_node_with_a_domain_in_its_name_is_known_without_it_unless_another_has_the_very_name():
    them = facts({}, {})
    names = {"node1": "node1.example.org", "node2": "node2.example.org", "node3": "node2.other.org"}
    for fact_ in them.values():
        for one in fact_["slurm"]["nodes"]:
            one["name"] = one["hostname"] = names[one["hostname"]]
    assert slurm.slurm_nodes(them) == {"node1": "node1.example.org", "node2": "node2.example.org"}
    them["node2"]["slurm"]["nodes"][-1]["hostname"] = "node2"
    assert slurm.slurm_nodes(them)["node2"] == "node2.other.org"


@pytest.mark.parametrize(
    ("gres", "count"),
    [
        ("(null)", 0),
        ("", 0),
        ("gpu:4", 4),
        ("gpu", 1),
        ("gpu:a100", 1),
        ("gpu:a100:4(S:0-1)", 4),
        ("gpu:nvidia_h100_80gb_hbm3:8(S:0-1),shard:nvidia_h100_80gb_hbm3:64(S:0-1)", 8),
        ("gpu:tesla:2(S:0,2-3),gpu:kepler:1,mps:400", 3),
        ("gpu:1g.5gb:7(S:0)", 7),
        ("craynetwork:4,nvme:1", 0),
    ],
)
def test_a_nodes_gpus_are_counted_of_what_sinfo_says(gres, count):
    assert slurm.gpus(gres) == count


def with_gpus(*gres, processes=8):
    them = facts(*({} for _ in gres))
    for number, (fact_, words) in enumerate(zip(them.values(), gres, strict=True), 1):
        fact_["processes"] = processes
        for other in them.values():
            for one in other["slurm"]["nodes"]:
                if one["name"] == f"n{number}":
                    one["gres"] = words
    return them


@pytest.mark.parametrize(
    ("gres", "given", "asked"),
    [
        (("gpu:8", "gpu:h100:8(S:0-1)"), [], ["--gres=gpu:8"]),
        (("gpu:8", "gpu:4"), [], ["--gpus=12"]),  # whole nodes: the sum is all that each has
        (("(null)", "gpu:4"), [], []),
        (("gpu:8", "gpu:8"), ["--gres=gpu:2"], ["--gres=gpu:2"]),
        (("gpu:8", "gpu:8"), ["--gpus-per-node=h100:8"], ["--gpus-per-node=h100:8"]),
        (("gpu:8", "gpu:8"), ["--gres=none"], ["--gres=none"]),
    ],
)
def test_a_job_asks_for_its_nodes_gpus(gres, given, asked):
    """A step has none of those that only come with a whole node, and where devices are confined sees none."""
    words = [word for (word,) in options(script(with_gpus(*gres), given))]
    assert [word for word in words if slurm.GPU_OPTIONS.match(word)] == asked


@pytest.mark.parametrize(
    ("gres", "given", "words"),
    [
        (("gpu:8", "gpu:8"), [], ""),
        (
            ("gpu:8", "gpu:8"),
            ["--gres=gpu:2"],
            "node1, node2: found 8 processes, and 2 of Slurm's GPUs for them (--gres=gpu:2)",
        ),
        (("gpu:8", "gpu:8"), ["--gpus-per-node=h100:4"], "nproc_per_node: 4"),
        (("gpu:8", "gpu:8"), ["--gres=gpu:h100"], "and 1 of"),
        (("gpu:8", "gpu:4"), [], "node2: found 8 processes, and 4 of Slurm's GPUs for them (gres.conf)"),
        (("gpu:8", "gpu:4"), ["--gres=none"], ""),
        (("gpu:8", "gpu:8"), ["--gpus=16"], ""),
        (("gpu:8", "gpu:8"), ["--gres=gpu:8,nvme:1"], ""),
        (("(null)", "(null)"), [], ""),
    ],
)
def test_more_processes_than_the_job_has_gpus_are_refused_before_it_waits(gres, given, words):
    said = "\n".join(slurm.slurm_problems(with_gpus(*gres), options=given))
    assert words in said and bool(said) == bool(words)


def test_a_run_without_gpus_has_as_many_processes_as_it_likes():
    them = with_gpus("gpu:1", "gpu:1", processes=2)
    assert "device: cpu" in slurm.slurm_problems(them)[0]
    assert slurm.slurm_problems(them, device="cpu") == []
    assert not [word for (word,) in options(script(them, [], "cpu")) if slurm.GPU_OPTIONS.match(word)]


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ([], ["--mem=0"]),
        (["--mem=64G"], ["--mem=0", "--mem=64G"]),  # the last one counts
        (["--mem-per-cpu=4G"], ["--mem-per-cpu=4G"]),  # sbatch refuses both
        (["--mem-per-gpu=60G"], ["--mem-per-gpu=60G"]),
    ],
)
def test_one_kind_of_memory_is_asked_for(given, asked):
    words = [word for (word,) in options(script(facts({}, {}), given))]
    assert [word for word in words if word.startswith("--mem")] == asked


def test_a_host_that_slurm_does_not_know_is_named_beside_those_that_it_does():
    them = facts({}, {})
    them["stranger"] = fact(9)
    (said,) = slurm.slurm_problems(them, "fast")
    assert "stranger: not among Slurm's nodes (there are: n1, n2, n3)" in said and "NodeName" in said


def test_slurms_own_queue_lets_runs_wait_but_not_for_those_of_systemd():
    one = {
        "release": "a",
        "environment": None,
        "active": ["other"],
        "jobs": {"other": {"id": "3", "state": "RUNNING", "reason": ""}},
        "at_work": [],
        "run_dir": "/var/lib/trainyard/runs/first",
        "run_state": None,
        "address": "10.77.0.11",
        "interface": "eth0",
        "port_holder": "other's rank",
        "free_bytes": 1,
        "brought_bytes": 0,
        "missing_paths": [],
        "processes": 1,
    }
    commands = dict.fromkeys(("follow", "stop", "resume"), "run=first")

    def problems(launcher, **flags):
        return plan.run_problems(
            {"node1": one}, "first", port=1, commands=commands, launcher=launcher, **flags
        )

    assert problems("slurm") == []
    assert "run other is already active on node1" in problems("systemd")[0]
    (said,) = problems("systemd", queue=True)  # the job could be cancelled, and the wait have no end
    assert "run other is already active on node1" in said
    assert "queue=true" not in said and "launcher=slurm" in said
    assert problems("systemd", beside=True) == []
    one["jobs"] = {}
    assert "run other is already active on node1" in problems("slurm")[0]
    assert problems("systemd", queue=True) == []


def test_an_active_run_of_systemds_is_not_taken_for_the_job_that_is_asked_for():
    one = {"active": ["first"], "jobs": {}, "run_config": "seed: 1\n"}
    assert plan.run_is_same({"node1": one}, "first", {"seed": 1})
    assert not plan.run_is_same({"node1": one}, "first", {"seed": 1}, "slurm")
    one["jobs"] = {"first": {}}
    assert plan.run_is_same({"node1": one}, "first", {"seed": 1}, "slurm")


@pytest.mark.parametrize(
    ("option", "fits"),
    [
        ("--time=24:00:00", True),
        ("--gres=gpu:2", True),
        ("--comment=two words", True),
        ("--no-kill", True),
        ("--signal=TERM@60", True),
        ("--signal=R:SIGTERM@600", True),
        ("--signal=15", True),
        ("--signal=USR1@90", False),  # it would kill the ranks
        ("--signal=B:TERM@60", False),
        ("--clusters=other", False),
        ("--nodelist=n9", False),
        ("--wrap=reboot", False),
        ("-N 3", False),
        ("time=3", False),
        ("--comment=a\n#SBATCH --uid=0", False),
    ],
)
def test_options_that_trainyard_stands_on_are_not_passed_through(option, fits):
    spec = {"type": "list", "elements": "str"}
    fault = inventory_values.value_fault("trainer_slurm_options", [option], spec, False)
    assert (fault is None) == fits, fault


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ([], 300),
        (["--time=24:00:00"], 300),
        (["--time=4"], 80),
        (["--time=4:30"], 90),
        (["--time=0:9:0"], 180),
        (["--time=1-0"], 300),
        (["--time=0-0:03"], 60),
        (["--time=1-02:03:04"], 300),
        (["--time=60", "--time=3"], 60),
        (["--time=UNLIMITED"], 300),
        (["--time=0"], 300),  # sbatch's word for none
    ],
)
def test_a_short_limit_leaves_time_to_train_before_the_ranks_save(options, seconds):
    """Slurm's word to save, sent longer before the end than the job may last, would come as each start begins."""
    assert f"#SBATCH --signal=TERM@{seconds}\n" in script(facts({}, {}), options)


# ---- how a job is ----


def squeue(out="", rc=0, error=""):
    """What stands for module.run_command."""
    return lambda command: (rc, out, error)


@pytest.fixture
def state_dir(tmp_path):
    """Of a host that has the runs `first`, which Slurm keeps, and `second`, which it does not."""
    for run in ("first", "second"):
        (tmp_path / "runs" / run).mkdir(parents=True)
    (tmp_path / "runs/first/job.sbatch").write_text("")
    return tmp_path


def test_jobs_are_those_of_runs_that_lie_here(state_dir):
    out = "7|PENDING|trainyard-first|Resources\n8|RUNNING|trainyard-elsewhere|None\n9|RUNNING|other|None\n"
    found = host_runs.slurm_jobs(squeue(out), str(state_dir))
    assert found == {"first": {"id": "7", "state": "PENDING", "reason": "Resources"}}
    assert host_runs.job_words(found["first"]) == "Slurm's job 7 is pending: Resources"


@pytest.mark.parametrize(
    ("reason", "more"),
    [
        ("launch failed requeued held", "; mend that, then scontrol release 7"),
        ("JobHeldAdmin", "; mend that, then scontrol release 7"),
        ("JobHoldMaxRequeue", "; mend that, then scontrol release 7"),
        ("PartitionTimeLimit", "; so it never begins"),
        ("QOSMaxGRESPerJob", "; so it never begins"),
        ("InvalidQOS", "; so it never begins"),
        ("QOSMaxGRESPerUser", ""),  # until another of the user's ends
        ("ReqNodeNotAvail, UnavailableNodes:gpu[001-004]", ""),
        ("PartitionNodeLimit", ""),  # until a node is no more drained
        ("Priority", ""),
    ],
)
def test_a_job_that_would_wait_for_ever_is_told_with_what_helps(reason, more):
    job = {"id": "7", "state": "PENDING", "reason": reason}
    assert host_runs.job_words(job).startswith(f"Slurm's job 7 is pending: {reason}{more}")
    assert bool(more) or host_runs.job_words(job).endswith(reason)
    assert ";" not in host_runs.job_words({**job, "state": "RUNNING"})


def test_nobody_asks_slurm_where_it_keeps_no_run(tmp_path):
    (tmp_path / "runs/first").mkdir(parents=True)
    assert host_runs.slurm_jobs(None, str(tmp_path)) == {}
    assert host_runs.slurm_jobs(None, str(tmp_path / "nothing")) == {}


@pytest.mark.parametrize(("state", "active"), [("running", True), ("finished", False)])
def test_where_slurm_does_not_answer_a_run_counts_as_active_that_has_not_ended(state_dir, state, active):
    (state_dir / "runs/first/status.json").write_text(json.dumps({"state": state}))
    found = host_runs.slurm_jobs(squeue(rc=1, error="squeue: error: down\n"), str(state_dir))
    assert bool(found) == active
    if active:
        assert host_runs.job_words(found["first"]) == "Slurm cannot be asked about it: squeue: error: down"


@pytest.mark.parametrize(
    ("private", "user", "known"), [("jobs,usage", 1, True), ("none", 1, False), ("jobs", 0, False)]
)
def test_where_slurm_hides_others_jobs_a_run_counts_as_active_that_has_not_ended(
    state_dir, monkeypatch, private, user, known
):
    (state_dir / "runs/first/status.json").write_text('{"state": "running"}')
    monkeypatch.setattr(host_runs.os, "geteuid", lambda: 54321 * user)
    config = f"PluginDir = /usr/lib\nPrivateData             = {private}\n"
    found = host_runs.slurm_jobs(
        lambda command: (0, config if "scontrol" in command else "", ""), str(state_dir)
    )
    assert [job["state"] for job in found.values()] == ["UNKNOWN"] * known


def keeper(run_dir, commands, answer):
    """The state of the run in `run_dir`, as the very command finds it with that shell text for squeue."""
    commands.mkdir(exist_ok=True)
    (commands / "squeue").write_text(f'#!/bin/sh\necho "$@" >{commands}/words\n{answer}\n')
    (commands / "squeue").chmod(0o755)
    done = subprocess.run(
        ["sh", "-c", run_keeper.state_command("systemd", "first", str(run_dir))],
        cwd=run_dir,
        env={**os.environ, "PATH": f"{commands}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    return run_keeper.read_state(done.stdout)


def test_a_job_is_active_until_slurm_holds_it_no_more(state_dir, tmp_path):
    run_dir, commands = state_dir / "runs/first", tmp_path / "bin"
    found = keeper(run_dir, commands, "echo '7|PENDING|trainyard-first|Nodes required are DOWN, or reserved'")
    assert found["state"] == "active"
    assert found["queued"] == "Slurm's job 7 is pending: Nodes required are DOWN, or reserved"
    asked = (commands / "words").read_text()
    assert "--name=trainyard-first" in asked and f"--user={getpass.getuser()}" in asked
    found = keeper(run_dir, commands, "echo '7|RUNNING|trainyard-first|None'")
    assert (found["state"], found["queued"]) == ("active", "")
    found = keeper(run_dir, commands, "echo no slurmctld >&2; exit 1")
    assert (found["state"], found["queued"]) == ("active", "")
    found = keeper(run_dir, commands, "exit 0")
    assert (found["state"], found["ExecMainStatus"]) == ("ended", "")
    (run_dir / "exit").write_text("75\n")
    assert keeper(run_dir, commands, "exit 0")["ExecMainStatus"] == "75"


def test_what_squeue_says_beside_its_answer_is_no_job(state_dir, tmp_path):
    run_dir, commands = state_dir / "runs/first", tmp_path / "bin"
    warns = "echo 'squeue: error: the first controller does not answer' >&2; "
    assert keeper(run_dir, commands, warns + "exit 0")["state"] == "ended"
    found = keeper(run_dir, commands, warns + "echo '7|PENDING|trainyard-first|Priority'")
    assert found["queued"] == "Slurm's job 7 is pending: Priority"
    assert "--all" in (commands / "words").read_text()


@pytest.mark.parametrize(
    ("private", "user", "exit_code", "state"),
    [
        ("none", "ops", "", "ended"),
        ("accounts,jobs,usage", "ops", "", "active"),
        ("accounts,jobs,usage", "ops", "0", "ended"),
        ("accounts,jobs,usage", "root", "", "ended"),
        ("accounts,jobs,usage", "", "", "ended"),  # the run's own
    ],
)
def test_where_slurm_hides_others_jobs_an_empty_answer_is_no_end(
    state_dir, tmp_path, private, user, exit_code, state
):
    run_dir, commands = state_dir / "runs/first", tmp_path / "bin"
    commands.mkdir()
    number, name = ("0" if user == "root" else "1000"), user or getpass.getuser()
    for command, text in (
        ("scontrol", f"echo 'PrivateData             = {private}'"),
        ("id", f"[ $1 = -u ] && echo {number} || echo {name}"),
    ):
        (commands / command).write_text(f"#!/bin/sh\n{text}\n")
        (commands / command).chmod(0o755)
    if exit_code:
        (run_dir / "exit").write_text(f"{exit_code}\n")
    assert keeper(run_dir, commands, "exit 0")["state"] == state


def test_the_follower_says_what_a_job_waits_for_and_then_how_the_run_is():
    def answer(job, status=""):
        return f"::keeper\nActiveState=active\nJob={job}\n::status\n{status}\n::metrics 0\n"

    view = run_follow.View("node1")
    run_follow.read_poll(
        view, answer("7|PENDING|trainyard-first|Resources", '{"state": "stopped", "step": 4}'), 1.0
    )
    line = run_follow.progress_line("first", [view], 1.0)
    assert line == "first  queued  Slurm's job 7 is pending: Resources"
    run_follow.read_poll(view, answer("7|RUNNING|trainyard-first|None"), 2.0)
    assert run_follow.progress_line("first", [view], 2.0) == "first  starting"
    run_follow.read_poll(view, answer("7|RUNNING|trainyard-first|None", '{"state": "saving"}'), 3.0)
    assert view.status == {"state": "saving"}


def test_the_journal_has_nothing_of_a_job_whose_launcher_has_a_log(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/launch.log").write_text("refused\n")
    (tmp_path / "job.sbatch").write_text("")
    command = run_follow.log_command("systemd", "first", str(tmp_path))
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert run_follow.read_logs(done.stdout) == {"launch.log": ["refused"]}


def test_the_status_tells_the_job():
    with_job = host_runs.with_job
    pending = {"id": "7", "state": "PENDING", "reason": "Resources"}
    found = with_job({"state": "stopped", "reason": "once", "updated": 1.0, "step": 4}, pending)
    answer = {
        **{
            "time": 5.0,
            "release": "a",
            "active": ["first"],
            "runs": {"first": found},
            "load": 0.1,
            "cpus": 1,
        },
        **{"memory_bytes": 1, "memory_free_bytes": 1, "free_bytes": 1, "gpus": []},
    }
    text = cluster_status({"node1": {"host_status": answer}})
    assert text.splitlines()[1].split()[:2] == ["first", "queued"]
    assert "first: Slurm's job 7 is pending: Resources" in text and "once" not in text
    running = with_job({"state": "running"}, {**pending, "state": "RUNNING", "reason": ""})
    assert running == {"state": "running", "job": "Slurm's job 7 is running"}


# ---- the module that submits and stops ----


class Module:
    """As much of AnsibleModule as the functions use. `queue`: squeue's answers, one a look, the last for ever."""

    def __init__(self, state_dir, queue, sbatch=(0, "7\n", "")):
        user = getpass.getuser()
        self.params = {"state_dir": str(state_dir), "run": "first", "user": user, "patience": 10}
        self.queue, self.sbatch, self.commands = list(queue), sbatch, []

    def run_command(self, command):
        if "squeue" in command:
            return 0, self.queue.pop(0) if len(self.queue) > 1 else self.queue[0], ""
        self.commands.append(command)
        return self.sbatch

    def fail_json(self, msg):
        raise SystemExit(msg)


@pytest.fixture
def slurm_job(load_module, monkeypatch):
    """The module, with a clock of its own."""
    module, clock = load_module("slurm_job"), [0.0]
    monkeypatch.setattr(module.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    return module


def test_a_job_is_submitted_as_the_service_user_with_a_clean_environment(slurm_job, state_dir, monkeypatch):
    monkeypatch.setenv("SECRET", "x")
    module = Module(state_dir, [""])
    assert slurm_job.submit(module) == "7"
    (command,) = module.commands
    assert command[:6] == ["runuser", "-u", getpass.getuser(), "--", "env", "-i"]
    assert command[-3:] == ["sbatch", "--parsable", f"{state_dir}/runs/first/job.sbatch"]
    assert not any("SECRET" in word for word in command)


def test_what_sbatch_refuses_is_said_once_with_the_variables(slurm_job, state_dir):
    said = "sbatch: error: invalid account\n" * 2 + "sbatch: error: Batch job submission failed\n"
    with pytest.raises(SystemExit) as refused:
        slurm_job.submit(Module(state_dir, [""], (1, "", said)))
    assert str(refused.value).count("invalid account") == 1
    assert "Batch job submission failed. Correct trainer_slurm_partition" in str(refused.value)


@pytest.mark.parametrize(
    ("said", "of_the_user"),
    [
        ("Invalid account or account/partition combination specified", True),
        ("Invalid qos specification", True),
        ("User's group not permitted to use this partition", True),
        ("Access/permission denied", True),
        ("Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)", True),
        ("Requested node configuration is not available", False),
        ("Requested time limit is invalid (missing or exceeds some limit)", False),
        ("No partition specified or system default partition", False),
        ("invalid partition specified: nope", False),
        ("Invalid generic resource (gres) specification", False),
    ],
)
def test_an_account_that_the_service_user_lacks_is_named(slurm_job, state_dir, said, of_the_user):
    with pytest.raises(SystemExit) as refused:
        slurm_job.submit(
            Module(state_dir, [""], (1, "", f"sbatch: error: Batch job submission failed: {said}\n"))
        )
    assert f"failed: {said}. Correct" in str(refused.value)
    assert (f"sacctmgr add user {getpass.getuser()} account=NAME" in str(refused.value)) is of_the_user


RUNNING = "7|RUNNING|trainyard-first|None\n"


def stop(slurm_job, module):
    slurm_job.stop(module, host_runs.read_jobs(module.queue[0])["first"])


def test_a_running_job_is_stopped_by_the_file_that_its_ranks_see(slurm_job, state_dir):
    run_dir = state_dir / "runs/first"
    (run_dir / "status.json").write_text('{"state": "stopped", "reason": "its own word"}')
    module = Module(state_dir, [RUNNING, RUNNING, ""])
    stop(slurm_job, module)
    assert (run_dir / "stop").exists() and module.commands == []
    assert json.loads((run_dir / "status.json").read_text())["reason"] == "its own word"


def test_a_job_that_waits_is_cancelled_and_the_run_has_stopped(slurm_job, state_dir):
    run_dir = state_dir / "runs/first"
    (run_dir / "status.json").write_text('{"state": "starting", "last_checkpoint": 4}')
    module = Module(state_dir, ["7|PENDING|trainyard-first|Resources\n", ""])
    stop(slurm_job, module)
    assert [command[-2:] for command in module.commands] == [["scancel", "7"]]
    status = json.loads((run_dir / "status.json").read_text())
    assert (status["state"], status["last_checkpoint"]) == ("stopped", 4)
    assert (run_dir / "exit").read_text() == "75\n" and not (run_dir / "stop").exists()


def test_a_job_that_is_being_signalled_is_at_work(slurm_job, state_dir):
    module = Module(state_dir, [RUNNING.replace("RUNNING", "SIGNALING"), ""])
    stop(slurm_job, module)
    assert (state_dir / "runs/first/stop").exists() and module.commands == []


def test_a_job_that_another_host_has_cancelled_has_stopped_here_too(slurm_job, state_dir):
    for state, run, expected in (
        ("queued", "first", True),
        ("stopped", "first", False),  # it had its word
        ("running", "second", False),  # which Slurm never kept: its power was cut
    ):
        (state_dir / "runs" / run / "status.json").write_text(json.dumps({"state": state}))
        assert slurm_job.left(run, str(state_dir)) is expected


def test_a_job_that_does_not_end_is_cancelled_in_the_end_and_then_told(slurm_job, state_dir):
    module = Module(state_dir, [RUNNING])
    with pytest.raises(SystemExit, match="still holds the job 7"):
        stop(slurm_job, module)
    assert [command[-2:] for command in module.commands] == [["scancel", "7"]]
