"""What train.yml -e plan=true says of all hosts, from what the trainer says on each."""

import json

from plugins.filter.foresee import foresee_arguments, foresee_link, foresee_text

MIB = 1 << 20
FACTS = {"alpha": {"processes": 2}, "beta": {"processes": 1}}


def plan(there, speed, needs=600, device="cpu", comm="auto"):
    def strategy(size):
        on_host = {"checkpoint": 9 * MIB} if device != "cpu" else {}
        return {
            "memory_bytes": size * MIB,
            "host_memory": on_host,
            "host_memory_bytes": sum(on_host.values()),
            "fits": size <= there,
        }

    return json.dumps(
        {
            "strategy": "ddp",
            "comm": comm,
            "device": device,
            "memory_there": there * MIB,
            "host_memory_there": 5000 * MIB,
            "strategies": {"ddp": strategy(needs), "fsdp": strategy(needs // 2)},
            "want_force": [],
            "estimate": {"matrix_flops_per_second": speed},
        }
    )


def test_a_configuration_goes_to_the_trainer_word_for_word():
    words = foresee_arguments(
        {"run": "first", "model": "a model", "balance": [2, 1], "resume": True, "lr": 1e-4},
        {},
    )
    assert words == [
        *("plan", "/dev/null", "run=first", "model=a model", "balance=[2, 1]", "resume=true", "lr=0.0001")
    ]


def test_speeds_are_those_of_every_rank_and_the_link_that_of_just_these_hosts(tmp_path):
    found = {"alpha": plan(1000, 3e12), "beta": plan(1000, 1e12)}
    assert foresee_arguments({}, {}, found, FACTS)[2:] == ["--speeds", "3.00,3.00,1.00"]
    alone = {"alpha": {"processes": 1}}
    assert foresee_arguments({}, {}, {"alpha": plan(1, 1)}, alone)[2:] == []
    bench = tmp_path / "bench"
    bench.mkdir()
    result = {"hosts": ["alpha", "beta"], "time": 1e9, "figures": {"mbit": {"alpha>beta": 940}}}
    (bench / "baseline-1.json").write_text(json.dumps(result))
    measured = foresee_link(list(FACTS), tmp_path, ["gamma"])
    assert "940 Mbit/s of the slowest pair" in measured["source"]
    assert foresee_arguments({}, measured)[2:] == ["--link", "1000.000mbit"]
    assert foresee_link(["alpha", "gamma"], tmp_path, []) == {}
    assert foresee_link(list(FACTS), tmp_path, ["alpha"]) == {}  # which goes by RDMA; that was TCP


def test_each_host_has_a_line_with_what_it_needs_and_has():
    found = {"alpha": plan(1000, 3e12), "beta": plan(400, 1e12)}
    said = foresee_text("the plan\n", {"source": "measured"}, found, FACTS).splitlines()
    assert said[0] == "the plan"
    assert said[3].split() == ["host", "ranks", "on", "a", "rank", "needs", "there", "is", "TFLOP/s"]
    assert said[4].split() == ["alpha", "2", "cpu", "600", "MiB", "1,000", "MiB", "fits", "3"]
    assert said[5].split() == ["beta", "1", "cpu", "600", "MiB", "400", "MiB", "does", "not", "fit", "1"]
    assert said[6:] == [
        "the link: measured",
        "fits on all of them: fsdp",
        "Nothing was started: leave plan out for that.",
    ]


def test_a_strategy_that_is_to_be_forced_over_this_link_is_named_with_that():
    found = {"alpha": json.loads(plan(1000, 3e12)), "beta": json.loads(plan(400, 1e12))}
    found["beta"]["want_force"] = ["fsdp"]  # whose own link is the slow one
    said = foresee_text("", {}, {host: json.dumps(one) for host, one in found.items()}, FACTS)
    assert "fits on all of them: fsdp (with force_strategy: true)\n" in said


def test_ddp_with_fewer_sequences_fits_where_each_host_says_so():
    found = {host: json.loads(plan(400, 1e12)) for host in FACTS}

    def fits():
        said = foresee_text("", {}, {host: json.dumps(one) for host, one in found.items()}, FACTS)
        return said.splitlines()[-2]

    found["alpha"]["proposed_micro_batch_size"] = 3
    assert fits() == "fits on all of them: fsdp"
    found["beta"]["proposed_micro_batch_size"] = 2
    assert fits() == "fits on all of them: ddp with micro_batch_size: 2, fsdp"


def test_with_a_lossy_comm_no_strategy_is_named_that_refuses_it():
    for needs, fits in ((100, "ddp"), (2000, "none of the strategies")):
        said = foresee_text(
            "", {}, {"alpha": plan(1000, 1e12, needs=needs, comm="8bit")}, {"alpha": {"processes": 1}}
        )
        assert f"fits on all of them: {fits} (with comm: 8bit, which works with ddp alone)" in said


def test_a_gpus_host_has_a_line_too_and_where_nothing_fits_that_is_said():
    said = foresee_text("", {}, {"alpha": plan(100, 1e12, device="cuda:0")}, {"alpha": {"processes": 1}})
    assert "its host" in said and "9 MiB" in said and "5,000 MiB" in said
    assert "fits on all of them: none of the strategies" in said
