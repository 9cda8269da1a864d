"""Kernel settings and limits: merged, applied where they differ, and never hidden when they fail."""

import errno
import os
import resource
from pathlib import Path

import pytest
import yaml

from plugins.filter.sysctl import sysctl_settings

OWN = [
    {"key": "vm.swappiness", "value": "10", "why": "a"},
    {"key": "net.core.rmem_max", "value": "64", "why": "b"},
]


@pytest.fixture(scope="module")
def sysctl(load_module):
    return load_module("sysctl_file")


@pytest.fixture(scope="module")
def limits(load_module):
    return load_module("limits_file")


@pytest.fixture
def kernel(tmp_path):
    """A tree like /proc/sys: one value that differs, one that is as wanted."""
    for key, value in {"vm/swappiness": "60\n", "net/ipv4/tcp_rmem": "4096\t131072\t6291456\n"}.items():
        file = tmp_path / key
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(value)
    return tmp_path


def test_the_inventory_overrides_adds_and_leaves_alone():
    merged = sysctl_settings(OWN, {"vm.swappiness": 1, "net.core.rmem_max": None, "vm.dirty_ratio": "5"})
    assert [(setting["key"], setting["value"]) for setting in merged] == [
        ("vm.swappiness", "1"),
        ("vm.dirty_ratio", "5"),
    ]
    assert sysctl_settings(OWN, {}) == OWN


def test_zero_is_a_value():
    assert sysctl_settings([], {"kernel.numa_balancing": 0})[0]["value"] == "0"


def test_the_file_has_every_setting_below_its_reason(sysctl):
    text = sysctl.render(OWN)
    assert "\n# a\nvm.swappiness = 10\n" in text
    assert all(len(line) <= 102 for line in sysctl.render([{**OWN[0], "why": "word " * 60}]).splitlines())


def test_only_what_differs_is_written(sysctl, kernel):
    settings = [
        {"key": "vm.swappiness", "value": "10"},
        {"key": "net.ipv4.tcp_rmem", "value": "4096 131072 6291456"},
    ]
    assert sysctl.apply(settings, str(kernel), False) == ({"vm.swappiness": "60\n"}, {})
    assert (kernel / "vm/swappiness").read_text() == "60\n"
    assert sysctl.apply(settings, str(kernel), True) == ({"vm.swappiness": "60\n"}, {})
    assert (kernel / "vm/swappiness").read_text() == "10"
    assert sysctl.apply(settings, str(kernel), True) == ({}, {})


def test_what_a_later_file_sets_is_that_files(sysctl, tmp_path):
    etc, lib = tmp_path / "etc", tmp_path / "lib"
    etc.mkdir()
    lib.mkdir()
    (lib / "99-a.conf").write_text("vm.swappiness = 5\n")
    (etc / "99-a.conf").write_text("# vm.dirty_ratio=3\n-vm.swappiness=1\nnet/core/rmem_max = 7\n")
    (etc / "99-b.conf").write_text("net.ipv4.tcp_rmem = 1 2 3\nnet/ipv4/conf/eth0.1/forwarding=1\n")
    (etc / "10-before.conf").write_text("vm.dirty_ratio = 3\n")
    (etc / "99-gone.conf").symlink_to(tmp_path / "nowhere")
    found = sysctl.set_later("/etc/sysctl.d/90-trainyard.conf", (str(etc), str(lib)))
    assert found == {
        "vm.swappiness": ("1", str(etc / "99-a.conf")),
        "net.core.rmem_max": ("7", str(etc / "99-a.conf")),
        "net.ipv4.tcp_rmem": ("1 2 3", str(etc / "99-b.conf")),
        "net.ipv4.conf.eth0.1.forwarding": ("1", str(etc / "99-b.conf")),
    }


def test_a_key_that_is_not_there_fails_and_the_others_are_set(sysctl, kernel):
    settings = [{"key": "net.core.rmem_max", "value": "1"}, {"key": "vm.swappiness", "value": "10"}]
    applied, failed = sysctl.apply(settings, str(kernel), True)
    assert applied == {"vm.swappiness": "60\n"}
    assert failed["net.core.rmem_max"].errno == errno.ENOENT


def test_of_settings_that_the_kernel_does_not_take_none_is_in_force(sysctl, kernel, monkeypatch):
    swap, missing = {"key": "vm.swappiness", "value": "10"}, {"key": "net.core.rmem_max", "value": "1"}
    assert (
        sysctl.take([swap, missing], str(kernel), True, False)[2]
        == "net.core.rmem_max: No such file or directory"
    )
    assert (kernel / "vm/swappiness").read_text() == "60\n"
    # A container's kernel is another's: what it has not got is left out.
    assert sysctl.take([swap, missing], str(kernel), False, True)[2] == ""

    def refuses(path, mode="r", **more):
        if mode == "w" and path.endswith("tcp_rmem"):
            raise OSError(errno.EINVAL, "Invalid argument")
        return open(path, mode, **more)

    monkeypatch.setattr(sysctl, "open", refuses, raising=False)
    odd = {"key": "net.ipv4.tcp_rmem", "value": "many"}
    assert sysctl.take([swap, odd], str(kernel), True, True)[2] == "net.ipv4.tcp_rmem: Invalid argument"
    assert (kernel / "vm/swappiness").read_text() == "60\n"
    assert sysctl.take([swap], str(kernel), True, True) == ({"vm.swappiness": "60\n"}, {}, "")


def test_a_key_that_comes_with_the_firewalls_rules_is_no_reason_to_refuse_a_host(sysctl, kernel):
    (kernel / "net/netfilter").mkdir()
    assert sysctl.may_come("net.netfilter.nf_conntrack_max", str(kernel))
    # What no earlier role brings would only be refused later, after the network has changed.
    assert not sysctl.may_come("net.bridge.bridge-nf-call-iptables", str(kernel))
    assert not sysctl.may_come("sunrpc.tcp_slot_table_entries", str(kernel))
    assert not sysctl.may_come("nte.core.rmem_max", str(kernel))
    assert not sysctl.may_come("vm.swapiness", str(kernel))
    assert not sysctl.may_come("vm.swappiness", str(kernel))
    (kernel / "net/netfilter/nf_conntrack_max").write_text("1")
    assert not sysctl.may_come("net.netfilter.nf_conntrack_max", str(kernel))


def test_a_value_that_the_kernel_refuses_is_a_failure_even_in_a_container(sysctl):
    assert errno.EINVAL not in sysctl.NOT_OURS


def test_a_limit_is_tried_in_a_child_and_leaves_this_process_alone(limits):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert limits.grantable({"item": "nofile", "value": "64"})
    with open("/proc/sys/fs/nr_open", encoding="ascii") as file:
        beyond = int(file.read()) + 1
    assert not limits.grantable({"item": "nofile", "value": str(beyond)})
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


def test_limits_hold_for_a_domain(limits):
    text = limits.render(
        [{"domain": "@trainyard", "item": "memlock", "value": "unlimited", "why": "NCCL pins."}]
    )
    assert "# NCCL pins.\n@trainyard - memlock unlimited\n" in text


def test_a_limit_that_cannot_be_granted_never_reaches_pam(run_module, tmp_path):
    """PAM would refuse the login of everybody whom it concerns."""
    path = tmp_path / "limits.conf"
    wanted = [
        {"domain": "@trainyard", "item": "nofile", "value": "64"},
        {"domain": "@trainyard", "item": "nofile", "value": str(2**40)},
    ]
    # Whether this machine is a container decides between a warning and a failure; the file is the same.
    result = run_module("limits_file", path=str(path), limits=wanted)
    text = path.read_text() if path.exists() else ""
    assert str(2**40) not in text
    if os.system("systemd-detect-virt --container --quiet") == 0:
        assert result["left_out"] == ["nofile"]
        assert "nofile 64" in text
    else:
        assert "cannot grant nofile" in result["msg"]


def test_what_keeps_a_host_awake_goes_with_the_rest():
    role = Path(__file__).resolve().parents[2] / "roles/tuning"
    values = yaml.safe_load((role / "vars/main.yml").read_text())
    gone = {
        f"{item['path']}/{name}" for item in values["_tuning_made_awake"] for name in item.get("inside", [])
    }
    gone |= {item["path"] for item in values["_tuning_made_awake"]}
    made = {item["path"]: item for item in values["_tuning_awake"] + values["_tuning_needrestart"]}
    assert gone >= set(made)
    unit = (role / "files/trainyard-awake.service").read_text()
    wanted = next(line.split("=")[1] for line in unit.splitlines() if line.startswith("WantedBy="))
    link = f"/etc/systemd/system/{wanted}.wants/trainyard-awake.service"  # what enabling it makes
    assert made[link]["link_to"] == "/etc/systemd/system/trainyard-awake.service"
