"""Each alert of roles/monitoring/files/rules.yml, caused: the series that do it, for promtool's tests of rules.

A row of CAUSED: what is the matter, {series: values a minute apart}, the minute, and the labels of the alerts that fire
then, all of them. Of WELL, series that are near to that and fire nothing.
"""

import re

import yaml

HOST = 'instance="node1", job="host"'
RUN = 'instance="node1", run="first"'
CARD = 'instance="node1", gpu="0", bus="0000:01:00"'
OTHER = 'instance="node2", run="first"'
RANKS = [f'trainyard_run_rank_compute_seconds{{{RUN}, rank="{n}", host="node{n + 1}"}}' for n in range(3)]
DISK = '{instance="node1", mountpoint="/", fstype="ext4"}'
IMAGE = '{instance="node1", mountpoint="/media", fstype="udf"}'


def series(name, labels, values):
    return {f"{name}{{{labels}}}": values}


def state(word, labels=RUN, values="1x200"):
    return series("trainyard_run_state", f'{labels}, state="{word}"', values)


def rank_of_other(number, seconds, part="compute"):
    """A rank's, as node2 tells of it."""
    return series(
        f"trainyard_run_rank_{part}_seconds", f'{OTHER}, rank="{number}", host="node{number + 1}"', seconds
    )


# node1 is not in the run any more, which goes on in a later attempt.
LEFT = {
    **state("failed"),
    **series("trainyard_run_attempt", RUN, "1x200"),
    **series("trainyard_run_attempt", OTHER, "2x200"),
}


CAUSED = [
    ("a host is gone", series("up", HOST, "1x3 0x10"), 6, ['HostDown{instance="node1", job="host"}']),
    (
        "its own figures stopped",
        {
            **series("up", HOST, "1x20"),
            f'node_textfile_mtime_seconds{{{HOST}, file="/run/x/trainyard.prom"}}': "0x20",
        },
        15,
        ['HostTellsNothing{instance="node1", job="host"}'],
    ),
    ("it never told any", series("up", HOST, "1x20"), 10, ['HostTellsNothing{instance="node1", job="host"}']),
    (
        "a disk is full",
        {
            f"node_filesystem_avail_bytes{DISK}": "4x30",
            f"node_filesystem_size_bytes{DISK}": "100x30",
            f"node_filesystem_readonly{DISK}": "0x30",
        },
        20,
        ['DiskSoonFull{instance="node1", mountpoint="/", fstype="ext4"}'],
    ),
    (
        "a disk fills",
        {f"node_filesystem_avail_bytes{DISK}": "39-0.1x200", f"node_filesystem_size_bytes{DISK}": "100x200"},
        180,
        ['DiskSoonFull{instance="node1", mountpoint="/", fstype="ext4"}'],
    ),
    (
        "a cable is loose",
        series("node_network_carrier_changes_total", f'{HOST}, device="eno1"', "2x5 4 6 8x5"),
        10,
        ['LinkFlaps{instance="node1", job="host", device="eno1"}'],
    ),
    (
        "an InfiniBand cable is loose",
        series("node_infiniband_link_downed_total", f'{HOST}, device="mlx5_0", port="1"', "0x5 1x5"),
        8,
        ['LinkFlaps{instance="node1", job="host", device="mlx5_0", port="1"}'],
    ),
    (
        "a clock is off",
        series("node_time_seconds", HOST, "-3+60x10"),
        6,
        ['ClockOff{instance="node1", job="host"}'],
    ),
    (
        "nothing keeps a clock",
        series("node_timex_sync_status", HOST, "0x40"),
        35,
        ['ClockNotSynchronised{instance="node1", job="host"}'],
    ),
    (
        "what kept a clock stopped an hour ago",
        {
            **series("node_timex_sync_status", HOST, "1x120"),
            **series("node_timex_maxerror_seconds", HOST, "0.1+0.03x120"),
        },
        100,
        ['ClockNotSynchronised{instance="node1", job="host"}'],
    ),
    (
        "nvidia-smi fails",
        series("trainyard_nvidia_smi_up", HOST, "1 0x5"),
        4,
        ['GpuSilent{instance="node1", job="host"}'],
    ),
    (
        "nvidia-smi answers without a card",
        series("trainyard_nvidia_smi_up", HOST, "1x10")
        | series("trainyard_gpu_up", f'{HOST}, bus="0000:41:00"', "1 0x9"),
        4,
        ['GpuSilent{instance="node1", job="host", bus="0000:41:00"}'],
    ),
    ("a card is hot", series("trainyard_gpu_temperature_celsius", CARD, "86x10"), 7, [f"GpuHot{{{CARD}}}"]),
    (
        "a card slows down now and then",
        series("trainyard_gpu_throttled", f'{CARD}, reason="heat"', "0 0 1 0 0 1 0 0 1 0 1 0 0 1"),
        13,
        [f'GpuThrottled{{{CARD}, reason="heat"}}'],
    ),
    (
        "a card's memory errs",
        series("trainyard_gpu_ecc_errors_total", f'{CARD}, kind="uncorrected"', "0x2 2x5"),
        5,
        [f'EccErrors{{{CARD}, kind="uncorrected"}}'],
    ),
    (
        "the machine's memory errs",
        series("node_edac_uncorrectable_errors_total", f'{HOST}, controller="0"', "0x2 1x5"),
        5,
        ['EccErrors{instance="node1", job="host", controller="0"}'],
    ),
    (
        "the driver reports a fault",
        {
            **series("trainyard_gpu_xid_errors_total", 'instance="node1", bus="0000:01:00"', "0x5 1x10"),
            **series("trainyard_gpu_xid_last", 'instance="node1", bus="0000:01:00"', "_x5 79x10"),
        },
        10,
        ['GpuXid{instance="node1", bus="0000:01:00"}'],
    ),
    (
        "packets arrive out of order",
        series(
            "trainyard_rdma_hw_counter_total",
            f'{HOST}, device="mlx5_0", port="1", counter="out_of_sequence"',
            "0+1200x20",
        ),
        15,
        ['RdmaLosesPackets{instance="node1", device="mlx5_0", port="1"}'],
    ),
    (
        "a port goes down and stays down, and another one's interface goes with it",
        {
            **series(
                "trainyard_rdma_port_up", f'{HOST}, device="mlx5_0", port="1", link="InfiniBand"', "1x5 0x30"
            ),
            **series(
                "trainyard_rdma_port_up", f'{HOST}, device="mlx5_2", port="1", interface="ens1"', "1x5 _x30"
            ),
            **series(
                "trainyard_rdma_port_up", f'{HOST}, device="mlx5_2", port="1", interface=""', "_x6 0x30"
            ),
        },
        12,
        [
            'RdmaDown{instance="node1", job="host", device="mlx5_0", port="1", link="InfiniBand"}',
            'RdmaDown{instance="node1", job="host", device="mlx5_2", port="1"}',
        ],
    ),
    (
        "the fabric is full",
        {
            **series(
                "trainyard_rdma_hw_counter_total",
                f'{HOST}, device="mlx5_0", port="1", counter="np_cnp_sent"',
                "0+40000x30",
            ),
            **series(
                "trainyard_rdma_hw_counter_total",
                f'{HOST}, device="mlx5_0", port="1", counter="rp_cnp_handled"',
                "0+40000x30",
            ),
        },
        25,
        ['RdmaCongested{instance="node1", device="mlx5_0", port="1"}'],
    ),
    (
        "a host cannot keep up",
        series(
            "trainyard_nic_pause_total", f'{HOST}, device="ens1", direction="tx", priority="3"', "0+120000x20"
        ),
        15,
        ['PauseStorm{instance="node1", job="host", device="ens1", direction="tx", priority="3"}'],
    ),
    (
        "a run failed",
        {**state("failed", values="_x2 1x5"), **state("running", values="1x2 stale")},
        4,
        ['RunFailed{run="first"}'],
    ),
    (
        "a run diverged",
        {
            **state("failed"),
            **series("trainyard_run_reason", f'{RUN}, reason="diverged at step 7: loss nan"', "1x10"),
        },
        4,
        ['RunFailed{run="first"}', 'RunDiverged{run="first"}'],
    ),
    (
        "a loss is no number",
        series("trainyard_run_loss", RUN, "2 NaN NaN NaN"),
        2,
        ['RunDiverged{run="first"}'],
    ),
    # It has said so once, and is not silent for that.
    (
        "a host waits for an hour",
        {**state("stalled"), **series("trainyard_run_updated_timestamp_seconds", RUN, "0x200")},
        60,
        [f'RunStalled{{{RUN}, state="stalled"}}'],
    ),
    ("a host waits", state("stalled"), 7, [f'RunStalled{{{RUN}, state="stalled"}}']),
    (
        "a run says nothing more",
        {
            **state("running"),
            **series("trainyard_run_updated_timestamp_seconds", RUN, "0x40"),
            **series("trainyard_run_step_seconds", RUN, "2x40"),
        },
        20,
        [f"RunSilent{{{RUN}}}"],
    ),
    (
        "a run crashes again and again",
        series("trainyard_run_attempt", RUN, "1x5 2x5 3x5 4x5"),
        20,
        ['RunRestartsOften{run="first"}'],
    ),
    (
        "a checkpoint was not saved",
        {**state("running"), **series("trainyard_run_warning", f'{RUN}, warning="no space left"', "1x5")},
        3,
        ['RunWarns{run="first", warning="no space left"}'],
    ),
    ("the loss jumps", series("trainyard_run_loss", RUN, "2x60 6x8"), 66, ['LossSpike{run="first"}']),
    (
        "the loss jumps, to less than that of a host that was left out",
        {
            **LEFT,
            **state("running", OTHER),
            **series("trainyard_run_loss", RUN, "9x80"),
            **series("trainyard_run_loss", OTHER, "2x60 6x8"),
        },
        66,
        ['LossSpike{run="first"}'],
    ),
    (
        "a run fails on those, too, that went on without a host",
        {**LEFT, **state("failed", OTHER)},
        4,
        ['RunFailed{run="first"}'],
    ),
    (
        "one rank is slow",
        {**state("running"), RANKS[0]: "1x30", RANKS[1]: "1x30", RANKS[2]: "1.6x30"},
        20,
        ['OneRankAlwaysLast{run="first", rank="2", host="node3"}'],
    ),
    (
        "one of two ranks is slow",
        {**state("running"), RANKS[0]: "1x30", RANKS[1]: "1.3x30"},
        20,
        ['OneRankAlwaysLast{run="first", rank="1", host="node2"}'],
    ),
    (
        "one of two ranks is slow with its optimizer alone",
        {
            **state("running", OTHER),
            **rank_of_other(0, "1x30"),
            **rank_of_other(0, "0.1x30", "optimizer"),
            **rank_of_other(1, "1x30"),
            **rank_of_other(1, "0.5x30", "optimizer"),
        },
        20,
        ['OneRankAlwaysLast{run="first", rank="1", host="node2"}'],
    ),
]

WELL = [
    (
        "a host as it should be",
        {
            **series("up", HOST, "1x200"),
            f'node_textfile_mtime_seconds{{{HOST}, file="/run/x/trainyard.prom"}}': "0+60x200",
            f"node_filesystem_avail_bytes{DISK}": "39-0.002x200",
            f"node_filesystem_size_bytes{DISK}": "100x200",
            **series("node_network_carrier_changes_total", f'{HOST}, device="eno1"', "2x5 4x200"),
            **series("node_network_carrier_changes_total", f'{HOST}, device="veth1"', "0+9x200"),
            **series("node_time_seconds", HOST, "0.2+60x200"),
            **series("node_timex_sync_status", HOST, "1x200"),
            **series("node_timex_maxerror_seconds", HOST, "0.1+0.03x20 0.1+0.03x20 0.1x160"),
            **series("trainyard_nvidia_smi_up", HOST, "1x200"),
            # A second port that nobody has ever used.
            **series("trainyard_rdma_port_up", f'{HOST}, device="mlx5_1", port="1"', "0x200"),
            **series("trainyard_gpu_temperature_celsius", CARD, "80x200"),
            **series("trainyard_gpu_throttled", f'{CARD}, reason="power limit"', "1x200"),
            **series("trainyard_gpu_throttled", f'{CARD}, reason="heat"', "0x100 1 0x100"),
            **series("trainyard_gpu_ecc_errors_total", f'{CARD}, kind="corrected"', "0+1x200"),
            **series("trainyard_gpu_xid_errors_total", 'instance="node1", bus="0000:01:00"', "3x200"),
            **series("trainyard_gpu_xid_last", 'instance="node1", bus="0000:01:00"', "43x200"),
            **series(
                "trainyard_rdma_hw_counter_total",
                f'{HOST}, device="mlx5_0", port="1", counter="rx_read_requests"',
                "0+9000000x200",
            ),
            **series(
                "trainyard_rdma_hw_counter_total",
                f'{HOST}, device="mlx5_0", port="1", counter="np_cnp_sent"',
                "0+600x200",
            ),
        },
        180,
    ),
    (
        "an image, which is full and which nobody writes to; a disk that filled before it became one",
        {
            f"node_filesystem_avail_bytes{IMAGE}": "0x200",
            f"node_filesystem_size_bytes{IMAGE}": "100x200",
            f"node_filesystem_readonly{IMAGE}": "1x200",
            f"node_filesystem_avail_bytes{DISK}": "39-0.1x200",
            f"node_filesystem_size_bytes{DISK}": "100x200",
            f"node_filesystem_readonly{DISK}": "1x200",
        },
        180,
    ),
    (
        "a run as it should be, whose loss falls",
        {
            **state("running"),
            **series("trainyard_run_updated_timestamp_seconds", RUN, "0+60x200"),
            **series("trainyard_run_loss", RUN, "9-0.04x200"),
            **series("trainyard_run_attempt", RUN, "1x50 2x150"),
            RANKS[0]: "1x200",
            RANKS[1]: "1.1x200",
            RANKS[2]: "0.9x200",
        },
        180,
    ),
    (
        "steps of ten minutes",
        {
            **state("running"),
            **series("trainyard_run_updated_timestamp_seconds", RUN, "0x25"),
            **series("trainyard_run_step_seconds", RUN, "600x25"),
        },
        25,
    ),
    (
        "a run that ended long ago, its slow rank with it",
        {
            **state("finished"),
            **series("trainyard_run_updated_timestamp_seconds", RUN, "0x200"),
            RANKS[0]: "1x200",
            RANKS[1]: "9x200",
        },
        100,
    ),
    (
        "a host that was left out, while the others go on",
        {**state("failed"), **state("running", OTHER)},
        30,
    ),
    (
        "a host that failed, while the others are paused",
        {**state("failed"), **state("stalled", OTHER)},
        2,
    ),
    (
        "a run that ended without a host that had failed, and diverged there",
        {
            **LEFT,
            **state("finished", OTHER),
            **series("trainyard_run_reason", f'{RUN}, reason="diverged at step 7: loss nan"', "1x200"),
            **series("trainyard_run_loss", RUN, "NaN+0x200"),
            **series("trainyard_run_warning", f'{RUN}, warning="no space left"', "1x200"),
        },
        30,
    ),
    (
        "a run that was stopped, and had warned",
        {
            **state("stopped"),
            **series("trainyard_run_warning", f'{RUN}, warning="no space left"', "1x200"),
        },
        30,
    ),
    (
        "a run whose slow host was left out",
        {
            **LEFT,
            **state("running", OTHER),
            RANKS[0]: "1x200",
            RANKS[1]: "1x200",
            RANKS[2]: "3x200",
            **rank_of_other(0, "1x200"),
            **rank_of_other(1, "1.1x200"),
        },
        30,
    ),
    (
        "a rank that computes more, as its optimizer does less",
        {
            **state("running", OTHER),
            **rank_of_other(0, "1x200"),
            **rank_of_other(0, "0.5x200", "optimizer"),
            **rank_of_other(1, "1.45x200"),
            **rank_of_other(1, "0.05x200", "optimizer"),
        },
        30,
    ),
    (
        "a slow rank that was slow for a moment",
        {**state("running"), RANKS[0]: "1x200", RANKS[1]: "1x10 3x10 1x100"},
        24,
    ),
    (
        "a disk that one file has filled a little",
        {
            f"node_filesystem_avail_bytes{DISK}": "39 35 30 25x40",
            f"node_filesystem_size_bytes{DISK}": "100x43",
        },
        40,
    ),
]


def samples(alerts, severities):
    """What ALERTS shall be then."""
    found = []
    for alert in alerts:
        name, labels = re.fullmatch(r"(\w+)\{(.*)\}", alert).groups()
        told = f'ALERTS{{alertname="{name}", alertstate="firing", severity="{severities[name]}", {labels}}}'
        found.append({"labels": told, "value": 1})
    return found


def promtool_tests(rules, path):
    """The file for `promtool test rules`; rules: text of the rules, which lie at `path`."""
    every = [rule for group in yaml.safe_load(rules)["groups"] for rule in group["rules"]]
    severities = {rule["alert"]: rule["labels"]["severity"] for rule in every if "alert" in rule}
    tests = []
    for what, given, minute, *alerts in [*CAUSED, *WELL]:
        tests.append(
            {
                "name": what,
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in given.items()],
                "promql_expr_test": [
                    {
                        "expr": 'ALERTS{alertstate="firing"}',
                        "eval_time": f"{minute}m",
                        "exp_samples": samples(alerts[0] if alerts else [], severities),
                    }
                ],
            }
        )
    return yaml.safe_dump(
        {"rule_files": [path], "evaluation_interval": "1m", "tests": tests}, sort_keys=False
    )


def caused():
    """The names of the alerts that a row of CAUSED causes."""
    return {re.match(r"\w+", alert)[0] for _, _, _, alerts in CAUSED for alert in alerts}
