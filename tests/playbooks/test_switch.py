"""playbooks/switch.yml: what a switch must be told, written on the controller from the example of two RoCE servers."""

import os
import sys
from pathlib import Path

import ansible_runner
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def play(tmp_path):
    """Runs the playbook on an example; (changed hosts, messages of failures, text that was written)."""

    def run(example, **given):
        (tmp_path / "runner").mkdir(exist_ok=True)
        run = ansible_runner.run(
            private_data_dir=str(tmp_path / "runner"),
            project_dir=str(ROOT),
            playbook="playbooks/switch.yml",
            inventory=str(ROOT / "inventory/examples" / example),
            extravars={**given, "trainer_results_dir": str(tmp_path / "results")},
            envvars={
                "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
                "HOME": str(tmp_path),
            },
            quiet=True,
        )
        told = [
            event["event_data"]["res"]["msg"] for event in run.events if event["event"] == "runner_on_failed"
        ]
        written = [path.read_text() for path in sorted((tmp_path / "results").glob("switch-*"))]
        return run.stats["changed"], told, "".join(written)

    return run


def test_it_is_written_once(play):
    changed, told, text = play("rdma-pair", roce_qos_mode="lossless")
    assert changed and not told
    assert "    pause pfc-cos 3\n" in text
    assert "interface Ethernet1/1\n  description ubunturdma1\n" in text
    assert play("rdma-pair", roce_qos_mode="lossless")[0] == {}


@pytest.mark.parametrize(
    ("example", "given", "words"),
    [
        ("rdma-pair", {}, "roce_qos_mode: found none; expected lossy or lossless"),
        ("home-lan", {}, "rdma: found no host in the group"),
        (
            "rdma-pair",
            {"roce_qos_mode": "lossy", "roce_qos_switch_port": ""},
            "found none for ubunturdma1, ubunturdma2; expected the switch's port",
        ),
        ("rdma-pair", {"roce_qos_mode": "lossless", "roce_qos_priority": 12}, "roce_qos_priority: found 12"),
        ("rdma-pair", {"roce_qos_mode": "lossless", "roce_qos_swich": "sonic"}, "roce_qos_switch"),
    ],
)
def test_what_is_missing_is_named(play, example, given, words):
    _, (told, *_), text = play(example, **given)
    assert words in told and not text
