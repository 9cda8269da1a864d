"""Kernel settings and limits: merged, applied where they differ, and never hidden when they fail."""

import errno
import os
import resource
from pathlib import Path

import pytest
import yaml

from plugins.filter.sysctl import sysctl_settings

ROLE = Path(__file__).resolve().parents[2] / "roles/tuning"
VALUES = yaml.safe_load((ROLE / "vars/main.yml").read_text())

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
    (etc / "90-trainyard.conf").write_text("vm.swappiness = 10\n")
    earlier, later = sysctl.set_elsewhere("/etc/sysctl.d/90-trainyard.conf", (str(etc), str(lib)))
    assert earlier == {"vm.dirty_ratio": ("3", str(etc / "10-before.conf"))}
    assert later == {
        "vm.swappiness": ("1", str(etc / "99-a.conf")),
        "net.core.rmem_max": ("7", str(etc / "99-a.conf")),
        "net.ipv4.tcp_rmem": ("1 2 3", str(etc / "99-b.conf")),
        "net.ipv4.conf.eth0/1.forwarding": ("1", str(etc / "99-b.conf")),
    }


BUFFER = {"key": "net.ipv4.tcp_rmem", "value": "4096 131072 6291456", "why": "a", "at_least": True}


@pytest.mark.parametrize(
    ("theirs", "stays"),
    [
        ("4096 87380 134217728", True),
        ("4096\t87380\t134217728", True),
        ("8192 262144 6291456", False),  # by the last
        ("4096 87380 65536", False),
        ("134217728", False),  # no such list
        ("4096 87380 much", False),
    ],
)
def test_a_larger_buffer_of_the_owners_stays(sysctl, theirs, stays):
    before = {"net.ipv4.tcp_rmem": (theirs, "/etc/sysctl.d/50-owner.conf")}
    found = sysctl.kept(BUFFER, before)
    assert found["value"] == ("4096 87380 134217728" if stays else BUFFER["value"])
    assert ("/etc/sysctl.d/50-owner.conf sets more" in found["why"]) == stays
    # What the inventory asks for is what it gets.
    (asked,) = sysctl_settings([BUFFER], {"net.ipv4.tcp_rmem": BUFFER["value"]})
    assert sysctl.kept(asked, before) == asked
    assert sysctl.kept(BUFFER, {}) == BUFFER


def test_of_the_roles_own_those_may_be_larger_of_which_more_does_no_harm():
    buffers = {setting["key"] for setting in VALUES["_tuning_sysctl"] if setting.get("at_least")}
    assert buffers == {
        "net.core.rmem_max",
        "net.core.wmem_max",
        "net.ipv4.tcp_rmem",
        "net.ipv4.tcp_wmem",
        "net.core.netdev_max_backlog",
    }


@pytest.fixture
def host(sysctl, kernel, tmp_path, monkeypatch, call_main):
    """`host(settings, check, {file of /etc/sysctl.d: text}, …)`: what the module answers there, and its warnings."""
    folder = tmp_path / "sysctl.d"
    folder.mkdir()
    said = []
    monkeypatch.setattr(sysctl, "PROC", str(kernel))
    monkeypatch.setattr(sysctl, "FOLDERS", (str(folder),))
    monkeypatch.setattr(sysctl.set_elsewhere, "__defaults__", ((str(folder),),))
    monkeypatch.setattr(sysctl, "in_container", lambda: False)
    monkeypatch.setattr(sysctl, "ssh_session", lambda: None)
    monkeypatch.setattr(sysctl, "write", lambda module, path, text: Path(path).write_text(text))

    def run(settings, check=False, files=None, **params):
        for name, text in (files or {}).items():
            (folder / name).write_text(text)
        said.clear()
        settings = [{"why": "", "at_least": False, "asked": False, **setting} for setting in settings]
        path = str(folder / "90-trainyard.conf")
        return call_main(sysctl, check, said, path=path, settings=settings, **params), list(said)

    return run


def test_a_larger_buffer_of_the_owners_is_in_force_and_stays_so(host, kernel):
    files = {"50-owner.conf": "net.ipv4.tcp_rmem = 4096 87380 134217728\n"}
    (seen, _), (done, said) = host([BUFFER], True, files), host([BUFFER])
    assert seen["changed"] and seen["applied"] == done["applied"] != {} and said == []
    assert (kernel / "net/ipv4/tcp_rmem").read_text() == "4096 87380 134217728"
    for check in (True, False):
        again, said = host([BUFFER], check)
        assert (again["changed"], again["applied"], said) == (False, {}, [])
    # Without that file it is the role's own again.
    files["50-owner.conf"] = ""
    assert host([BUFFER], False, files)[0]["applied"] == {"net.ipv4.tcp_rmem": BUFFER["value"]}


def test_what_the_owners_file_sets_otherwise_is_told_with_how_to_have_it(host):
    swap = {"key": "vm.swappiness", "value": "10"}
    owner = {"50-owner.conf": "vm.swappiness=1\n"}
    _, (said,) = host([swap], True, owner)
    assert said.startswith("vm.swappiness is 10, not 1 as ") and "50-owner.conf" in said
    assert 'tuning_sysctl: {vm.swappiness: "1"}' in said
    assert host(sysctl_settings([swap], {"vm.swappiness": "10"}), True)[1] == []
    assert host([{**swap, "value": "1"}], True)[1] == []
    # Where a later file has the last word, that one alone is told.
    _, (said,) = host([swap], True, {"99-owner.conf": "vm.swappiness=5\n"})
    assert "stays 5" in said


def test_a_value_that_the_kernel_writes_otherwise_is_changed_once(sysctl, kernel, monkeypatch):
    """As of net.ipv4.ip_local_reserved_ports, and of whatever else has a form of its own."""
    setting = {"key": "vm.ports", "value": "29500,29501,30000"}
    (kernel / "vm/ports").write_text("\n")
    assert sysctl.apply([setting], str(kernel), True)[0] == {"vm.ports": "\n"}
    (kernel / "vm/ports").write_text("29500-29501,30000\n")
    for write_it in (False, True):
        assert sysctl.apply([setting], str(kernel), write_it) == ({}, {})
    (kernel / "vm/ports").write_text("29500-29502,30000\n")
    assert sysctl.apply([setting], str(kernel), False)[0] == {"vm.ports": "29500-29502,30000\n"}

    def as_the_kernel(path, mode="r", **more):
        return open(os.devnull if mode == "w" else path, mode, **more)

    monkeypatch.setattr(sysctl, "open", as_the_kernel, raising=False)
    assert sysctl.apply([{"key": "vm.swappiness", "value": "0x3c"}], str(kernel), True) == ({}, {})


@pytest.mark.parametrize(
    "value", ["-1", "1-2", "3-", "1,2,", "4096 131072", "cubic,reno", "70000000-80000000,1"]
)
def test_only_lists_of_numbers_are_read_as_such(sysctl, value):
    assert sysctl.canonical(f"{value}\n") == ([1, 2] if value == "1-2" else value.split())


@pytest.mark.parametrize(
    "key",
    ["net.ipv4.conf.eth0/100.rp_filter", "net/ipv4/conf/eth0.100/rp_filter", "net/ipv4/conf/eth0/rp_filter"],
)
def test_an_interface_with_a_dot_in_its_name_is_found_as_systemd_finds_it(sysctl, host, kernel, key):
    for link in ("eth0.100", "eth0"):
        file = kernel / "net/ipv4/conf" / link / "rp_filter"
        file.parent.mkdir(parents=True)
        file.write_text("0\n")
    answer, _ = host([{"key": key, "value": "2"}])
    assert answer["applied"] == {key: "2"} and not sysctl.may_come(key, str(kernel))
    assert (kernel / "net/ipv4/conf/eth0.100/rp_filter").read_text() == ("2" if "100" in key else "0\n")
    assert (kernel / "net/ipv4/conf/eth0/rp_filter").read_text() == ("0\n" if "100" in key else "2")
    # A file of the owner's that has the same key is known by it, however it is written there.
    _, (said,) = host([{"key": key, "value": "2"}], True, {"99-owner.conf": f"{key} = 1\n"})
    assert said.startswith(f"{key} stays 1, not 2: ")
    swapped = key.translate(str.maketrans("./", "/."))
    _, (said,) = host([{"key": key, "value": "2"}], True, {"99-owner.conf": f"{swapped} = 1\n"})
    assert said.startswith(f"{key} stays 1, not 2: ")


LINKS = """fd000000000000000000000000000002 02 40 00 80     eth0
fe800000000000000000000000000001 03 40 20 80    wlan0
fd000000000000000000000000000100 04 40 00 80 eth1.100
"""


@pytest.mark.parametrize(
    ("key", "value", "address", "refused"),
    [
        ("net.ipv6.conf.all.disable_ipv6", "1", "fd00::2", True),
        ("net.ipv6.conf.default.disable_ipv6", "1", "fd00::2", True),
        ("net.ipv6.conf.eth0.disable_ipv6", "1", "fd00::2", True),
        ("net/ipv6/conf/eth0/disable_ipv6", "1", "fd00::2", True),
        ("net.ipv6.conf.eth1/100.disable_ipv6", "1", "fd00::100", True),
        ("net/ipv6/conf/eth1.100/disable_ipv6", "1", "fd00::100", True),
        ("net.ipv6.conf.wlan0.disable_ipv6", "1", "fd00::2", False),
        ("net.ipv6.conf.all.disable_ipv6", "0", "fd00::2", False),
        ("net.ipv6.conf.all.forwarding", "1", "fd00::2", False),
        ("net.ipv6.conf.all.disable_ipv6", "1", "10.0.0.2", False),
        ("net.ipv6.conf.all.disable_ipv6", "1", "", False),
    ],
)
def test_ipv6_stays_where_somebody_is_logged_in_by_it(
    sysctl, host, tmp_path, monkeypatch, key, value, address, refused
):
    (tmp_path / "links").write_text(LINKS)
    setting = {"key": key, "value": value}
    assert sysctl.cuts_off([setting], address, str(tmp_path / "links")) == (key if refused else "")
    monkeypatch.setattr(sysctl.cuts_off, "__defaults__", (str(tmp_path / "links"),))
    monkeypatch.setattr(sysctl, "ssh_session", lambda: {"address": address} if address else None)
    for more in ({"only_look": True}, {"check": True}, {}):
        answer, _ = host([setting], **more)
        assert (f"found {key} turned on; expected IPv6 to stay" in answer["msg"]) == refused


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


def test_open_files_go_by_what_the_kernel_is_to_grant(limits, monkeypatch):
    """In check mode, and before anything is changed, the kernel has got it neither raised nor lowered."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]

    def grantable(number, *nr_open):
        return limits.grantable({"item": "nofile", "value": str(number)}, *nr_open)

    assert grantable(most, most) and not grantable(most, most - 1)
    monkeypatch.setattr(limits, "most_files", lambda: most)
    assert grantable(2 * most, 2 * most) and not grantable(2 * most + 1, 2 * most)
    monkeypatch.setattr(limits, "most_files", lambda: 2**40)  # more than root gets here
    assert not grantable(2**40, 2**40)
    assert limits.grantable({"item": "memlock", "value": "64"}, 1)  # which is not bounded by it


@pytest.mark.parametrize("container", [True, False])
def test_what_is_asked_before_anything_is_changed_changes_nothing(
    limits, call_main, tmp_path, monkeypatch, container
):
    path = str(tmp_path / "limits.conf")
    monkeypatch.setattr(limits, "in_container", lambda: container)
    good, bad = ({"domain": "x", "item": "nofile", "value": value, "why": ""} for value in ("64", "65"))
    answer = call_main(limits, path=path, limits=[good], nr_open=64, only_look=True)
    assert answer == {"changed": False, "differs": True} and not os.path.exists(path)
    (tmp_path / "limits.conf").write_text(limits.render([good]))
    answer = call_main(limits, path=path, limits=[good], nr_open=64, only_look=True)
    assert answer == {"changed": False, "differs": False}
    os.unlink(path)
    answer = call_main(limits, path=path, limits=[bad], nr_open=64, only_look=True)
    assert bool(answer.get("failed")) is not container and not os.path.exists(path)
    assert container or "tuning_nofile: found 65; expected at most 64, fs.nr_open" in answer["msg"]
    # In check mode the kernel does not grant yet what it will.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    monkeypatch.setattr(limits, "most_files", lambda: most)
    more = {**good, "value": str(2 * most)}
    answer = call_main(limits, check=True, path=path, limits=[more], nr_open=2 * most)
    assert answer["changed"] and answer["left_out"] == [] and not os.path.exists(path)
    assert call_main(limits, check=True, path=path, limits=[more]).get("left_out") == (
        ["nofile"] if container else None
    )


@pytest.mark.parametrize(
    ("text", "wanted", "cure"),
    [
        ("fs.nr_open = 2000000\n", "2000000", "50-owner.conf sets it to 2000000, which is not in force yet"),
        ("fs/nr_open=2000000\n", "1500000", "Have that read: sudo sysctl --system"),
        ("fs.nr_open = 2000000\n", "2000001", 'tuning_sysctl: {fs.nr_open: "2000001"}'),
        ("", "2000000", 'tuning_sysctl: {fs.nr_open: "2000000"}'),
    ],
)
def test_a_limit_that_the_hosts_own_file_grants_is_no_reason_to_write_it_once_more(
    limits, call_main, tmp_path, monkeypatch, text, wanted, cure
):
    """With fs.nr_open in a later file than ours, tuning_sysctl would be of no use, and was what was said to help."""
    (tmp_path / "50-owner.conf").write_text(text)
    monkeypatch.setattr(limits.set_elsewhere, "__defaults__", ((str(tmp_path),),))
    monkeypatch.setattr(limits, "in_container", lambda: False)
    monkeypatch.setattr(limits, "most_files", lambda: 1048576)
    limit = {"domain": "x", "item": "nofile", "value": wanted, "why": ""}
    told = call_main(limits, path=str(tmp_path / "limits.conf"), limits=[limit], only_look=True)["msg"]
    assert f"found {wanted}; expected at most 1048576, fs.nr_open" in told and cure in told


@pytest.mark.parametrize("name", ["precheck", "main"])
def test_the_limits_are_held_against_what_the_kernels_settings_make_of_it(name):
    from ansible.parsing.dataloader import DataLoader
    from ansible.template import Templar, trust_as_template

    settings, limits = yaml.safe_load((ROLE / f"tasks/{name}.yml").read_text())[:2]
    assert settings["register"] == "__tuning_kernel" and "sysctl_file" in settings
    template = trust_as_template(limits["limits_file"]["nr_open"])
    for told, nr_open in [
        ({"applied": {"fs.nr_open": "2000000"}}, "2000000"),
        ({"applied": {}}, "as it is"),
        ({"skipped": True}, "as it is"),
    ]:
        values = {"_tuning_nr_open": trust_as_template(VALUES["_tuning_nr_open"]), "omit": "as it is"}
        templar = Templar(loader=DataLoader(), variables={**values, "__tuning_kernel": told})
        assert templar.template(template) == nr_open


def test_limits_hold_for_a_domain(limits):
    text = limits.render(
        [{"domain": "@trainyard", "item": "memlock", "value": "unlimited", "why": "NCCL pins."}]
    )
    assert "# NCCL pins.\n@trainyard - memlock unlimited\n" in text


def test_a_limit_that_cannot_be_granted_never_reaches_pam(run_module, tmp_path):
    """PAM of Debian and Ubuntu would pass it over, and nobody knew; others' refuse the login."""
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
    gone = {
        f"{item['path']}/{name}" for item in VALUES["_tuning_made_awake"] for name in item.get("inside", [])
    }
    gone |= {item["path"] for item in VALUES["_tuning_made_awake"]}
    made = {item["path"]: item for item in VALUES["_tuning_awake"]}
    assert gone >= set(made)
    unit = (ROLE / "files/trainyard-awake.service").read_text()
    wanted = next(line.split("=")[1] for line in unit.splitlines() if line.startswith("WantedBy="))
    link = f"/etc/systemd/system/{wanted}.wants/trainyard-awake.service"  # what enabling it makes
    assert made[link]["link_to"] == "/etc/systemd/system/trainyard-awake.service"


@pytest.mark.parametrize(
    ("seen", "kept"),
    [
        ({}, True),  # --tags python_env: nobody looked
        ({"__identity_survey": {"survey": {"kept_awake": True}}}, True),  # an earlier run, which was killed
        ({"__identity_survey": {"survey": {"kept_awake": False}}}, False),
        (
            {"__identity_survey": {"survey": {"kept_awake": False}}, "__packages_room": {"first": False}},
            False,
        ),
        ({"__identity_survey": {"survey": {"kept_awake": False}}, "__packages_room": {"first": True}}, True),
    ],
)
def test_whoever_was_kept_awake_may_sleep_in_the_end(seen, kept):
    from ansible.parsing.dataloader import DataLoader
    from ansible.template import Templar, trust_as_template

    template = trust_as_template(VALUES["_tuning_kept_awake"])
    assert Templar(loader=DataLoader(), variables=seen).template(template) is kept
    (task,) = yaml.safe_load((ROLE / "tasks/release.yml").read_text())
    (held,) = yaml.safe_load((ROLE / "tasks/hold.yml").read_text())
    unit = task["ansible.builtin.systemd_service"]["name"].removesuffix(".service")
    assert task["when"] == "_tuning_kept_awake" and f"--unit={unit}" in held["ansible.builtin.shell"]
    look = (ROLE.parent.parent / "plugins/modules/identity_survey.py").read_text()
    assert f'"/run/systemd/transient/{unit}.service"' in look
