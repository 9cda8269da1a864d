"""What site.yml asks before it changes any host: that it comes first, and changes nothing itself; room on the disks."""

import os
import socket
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
POLICY = "grafana:\n  Installed: (none)\n  Candidate: {}"
SITE = (ROOT / "playbooks/site.yml").read_text()


def tasks(items):
    return [task for item in items for task in (tasks(item["block"]) if "block" in item else [item])]


def templated(variables, known, text):
    """`text` by Ansible, with a role's variables, and what else is known."""
    # Not at the top: Ansible changes what is interned, and torch does not load after it.
    from ansible.parsing.dataloader import DataLoader
    from ansible.template import Templar, trust_as_template

    def trusted(value):
        if isinstance(value, dict):
            return {key: trusted(item) for key, item in value.items()}
        if isinstance(value, list):
            return [trusted(item) for item in value]
        return trust_as_template(value) if isinstance(value, str) else value

    variables = {**trusted(variables), **known}
    return Templar(loader=DataLoader(), variables=variables).template(trust_as_template(text))


@pytest.mark.parametrize("role", sorted(path.parts[-3] for path in ROOT.glob("roles/*/tasks/precheck.yml")))
def test_a_roles_precheck_comes_before_any_host_is_changed(role):
    plays = yaml.safe_load(SITE)
    called = [
        {"tasks_from": "main", **task[module]}
        for task in tasks([task for play in plays for task in play["tasks"]])
        for module in ("ansible.builtin.import_role", "ansible.builtin.include_role")
        if module in task
    ]
    asked = [(one["name"], one["tasks_from"]) for one in called]
    assert (role, "precheck") in asked[: asked.index(("identity", "main"))]


def test_the_kernel_is_asked_for_rdma_without_loading_it():
    (command,) = [
        task
        for task in tasks(yaml.safe_load((ROOT / "roles/rdma/tasks/precheck.yml").read_text()))
        if "ansible.builtin.command" in task
    ]
    assert "'--dry-run'" in command["ansible.builtin.command"]["argv"]
    assert command["check_mode"] is False  # check mode refuses it, too
    assert "not __rdma_asked.survey.container" in command["when"]


# ---- ports ----


def listens(port, address="0.0.0.0", owners=(("python3", 7),), state="LISTEN", proto="tcp"):
    return {"proto": proto, "state": state, "address": address, "port": port, "owners": list(owners)}


WANTED = [
    {"variable": "etcd_port", "address": "10.0.0.1", "port": 2389},
    {"variable": "monitoring_port", "address": "127.0.0.1", "port": 9090},
]
SERVICES = {7: "prometheus-node-exporter.service", 8: "trainyard-etcd.service", 9: "trainyard@a.service"}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([], ""),
        (
            [listens(2389, "10.0.0.1", [("etcd", 8)]), listens(9090, "127.0.0.1", [("x", 8)])],
            "",
        ),  # a second run
        ([listens(2389, "127.0.0.1"), listens(9090, "10.0.0.1"), listens(9090, "::")], ""),
        ([listens(9091), listens(2389, proto="udp", state="UNCONN"), listens(2389, state="ESTAB")], ""),
        (
            [listens(2389)],
            "etcd_port: found python3 (process 7, prometheus-node-exporter.service) listening at 0.0.0.0:2389; "
            "expected that port of 10.0.0.1 to be free for Trainyard's own. Set etcd_port to another one, or end that "
            "program (sudo systemctl disable --now prometheus-node-exporter.service).",
        ),
        ([listens(9090, "*", [("node", 5)])], "found node (process 5) listening at *:9090; expected"),
        (
            [listens(9090, "127.0.0.1", [("node", 5)])],
            "end that program (sudo ss -ltnp 'sport = :9090' shows it).",
        ),
        (
            [listens(9090, "*", [("systemd", 1)])],
            "(sudo systemctl list-sockets shows the unit of 9090, which",
        ),
        (
            [listens(9090, "*", [("cockpit-tls", 77), ("systemd", 1)])],  # somebody looks at Cockpit just now
            "(sudo systemctl list-sockets shows the unit of 9090, which",
        ),
        (
            [listens(9090, owners=[("docker-proxy", 900)])],
            "(sudo docker ps --filter publish=9090 names the container of it, which docker stop ends)",
        ),
        ([listens(2389, "10.0.0.1", [("python", 9)])], "(process 9, trainyard@a.service)"),  # a rank's own
        ([listens(2389, owners=[])], "found the kernel listening at 0.0.0.0:2389"),
    ],
)
def test_a_port_that_another_program_has_is_told_with_its_unit(load_module, found, said):
    sentences = load_module("free_ports").faults(WANTED, found, SERVICES)
    assert len(sentences) == bool(said) and said in "".join(sentences)


def test_a_service_is_known_by_its_main_process(load_module):
    out = "Id=a.service\nMainPID=7\n\nMainPID=0\nId=b.service\n\nMainPID=8\nId=c.service\n"
    assert load_module("free_ports").units(lambda command: (0, out, "")) == {7: "a.service", 8: "c.service"}
    assert load_module("free_ports").units(lambda command: (1, "", "no systemd")) == {}


def test_ports_of_this_machine(run_module):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        told = run_module("free_ports", wanted=[{"variable": "x_port", "address": "127.0.0.1", "port": port}])
        assert f"listening at 127.0.0.1:{port}; expected" in told["msg"] and told["msg"].endswith(
            "Nothing was changed."
        )
        assert f"process {os.getpid()}" in told["msg"]
        other = [{"variable": "x_port", "address": "127.0.0.2", "port": port}]
        assert run_module("free_ports", wanted=other)["changed"] is False


@pytest.mark.parametrize(
    ("known", "ports"),
    [
        ({}, {"monitoring_exporter_port": ("10.0.0.2", 9100)}),
        ({"inventory_hostname": "node1"}, {"monitoring_exporter_port": ("10.0.0.2", 9100),
                                           "monitoring_port": ("127.0.0.1", 9090)}),
        ({"inventory_hostname": "node1", "__monitoring_apt": {"stdout": POLICY.format("11.0")}},
         {"monitoring_exporter_port": ("10.0.0.2", 9100), "monitoring_port": ("127.0.0.1", 9090),
          "monitoring_grafana_port": ("127.0.0.1", 3001)}),
        ({"inventory_hostname": "node1", "__monitoring_apt": {"stdout": POLICY.format("(none)")}},
         {"monitoring_exporter_port": ("10.0.0.2", 9100), "monitoring_port": ("127.0.0.1", 9090)}),
        ({"inventory_hostname": "node1", "monitoring_grafana": "always", "monitoring_grafana_port": 4000},
         {"monitoring_exporter_port": ("10.0.0.2", 9100), "monitoring_port": ("127.0.0.1", 9090),
          "monitoring_grafana_port": ("127.0.0.1", 4000)}),
    ],
)  # fmt: skip
def test_a_host_is_asked_for_the_ports_that_it_is_to_have(known, ports):
    variables = yaml.safe_load((ROOT / "roles/monitoring/defaults/main.yml").read_text())
    variables |= yaml.safe_load((ROOT / "roles/monitoring/vars/main.yml").read_text())
    variables |= {
        "inventory_hostname": "node2",
        "cluster_address": "10.0.0.2",
        "groups": {"monitoring": ["node1"]},
    }
    wanted = templated(variables, known, "{{ _monitoring_ports }}")
    assert {one["variable"]: (one["address"], one["port"]) for one in wanted} == ports
    (task,) = yaml.safe_load((ROOT / "roles/etcd/tasks/precheck.yml").read_text())
    assert [one["variable"] for one in task["free_ports"]["wanted"]] == ["etcd_port", "etcd_peer_port"]


@pytest.mark.parametrize(
    ("known", "has"),
    [
        ({}, True),
        ({"monitoring_dcgm": "always"}, True),
        ({"__monitoring_dcgm_before": {"stdout": "datacenter-gpu-manager:\n  Installed: (none)\n"}}, True),
        # Of before DCGM 4, the owner's: apt would take it away.
        ({"__monitoring_dcgm_before": {"stdout": "datacenter-gpu-manager:\n  Installed: 1:3.3.9\n"}}, False),
        ({"__monitoring_dcgm_other": {"status": 200}}, False),
        ({"__monitoring_dcgm_apt": {"stdout_lines": []}}, False),
        ({"__monitoring_cards": {"stdout": "No devices were found"}}, False),
    ],
)
def test_dcgm_is_had_beside_no_other(known, has):
    variables = yaml.safe_load((ROOT / "roles/monitoring/defaults/main.yml").read_text())
    variables |= yaml.safe_load((ROOT / "roles/monitoring/vars/main.yml").read_text())
    found = {
        "__monitoring_cards": {"stdout": "GPU 0: NVIDIA H100 (UUID: GPU-1)"},
        "__monitoring_dcgm_unit": {"stat": {"exists": False}},
        "__monitoring_dcgm_other": {"status": -1},
        "__monitoring_dcgm_apt": {"stdout_lines": ["datacenter-gpu-manager-exporter - Exporter"]},
    }
    assert templated(variables, found | known, "{{ _monitoring_has_dcgm }}") is has


@pytest.mark.parametrize(
    ("wanted", "other", "refused"), [("always", -1, True), ("always", 200, False), ("auto", -1, False)]
)
def test_an_older_dcgm_stands_in_the_way_of_what_is_to_be_installed(wanted, other, refused):
    """Not where an exporter of the owner's answers: nothing is installed then."""
    variables = yaml.safe_load((ROOT / "roles/monitoring/vars/main.yml").read_text())
    tasks = yaml.safe_load((ROOT / "roles/monitoring/tasks/dcgm.yml").read_text())
    (task,) = [one for block in tasks for one in block.get("block", []) if "purge" in str(one)]
    known = {
        "monitoring_dcgm": wanted,
        "__monitoring_dcgm_before": {"stdout": "datacenter-gpu-manager:\n  Installed: 1:3.3.9\n"},
        "__monitoring_dcgm_other": {"status": other},
    }
    assert templated(variables, known, "{{ " + task["when"] + " }}") is refused


# ---- room ----

FIRST = [
    {"path": "/", "bytes": 300, "what": "programs"},
    {"path": "/var", "bytes": 400, "what": "lists"},
    {"path": "/opt/trainyard/env", "bytes": 3000, "what": "the environment"},
]


@pytest.fixture
def disks(load_module, monkeypatch):
    """`disks({directory: (number of its disk, megabytes free)})`: the module on such a host, which has no others."""

    def made(there):
        module = load_module("disk_room")
        status = namedtuple("Status", "st_dev")
        space = namedtuple("Space", "f_bavail f_frsize f_files f_favail")
        monkeypatch.setattr(module.os.path, "exists", lambda path: path in there)
        monkeypatch.setattr(module.os, "stat", lambda path: status(there[path][0]))
        monkeypatch.setattr(module.os, "statvfs", lambda path: space(there[path][1] * 1000, 1000, 0, 0))
        return module.faults([{**need, "bytes": need["bytes"] * 10**6} for need in FIRST])

    return made


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ({"/": (1, 3700), "/var": (1, 3700)}, []),
        # What lies on one disk must fit together, although each alone would.
        (
            {"/": (1, 3600), "/var": (1, 3600)},
            [
                "/, /var, /opt/trainyard/env: found 3.60 GB free; expected 3.70 GB, for programs (0.30), lists (0.40), "
                "the environment (3.00)."
            ],
        ),
        (
            {"/": (1, 3400), "/var": (2, 100)},
            ["/var: found 0.10 GB free; expected 0.40 GB, for lists (0.40)."],
        ),
        (
            {"/": (1, 300), "/var": (2, 400), "/opt/trainyard": (3, 2900)},
            ["/opt/trainyard/env: found 2.90 GB free; expected 3.00 GB, for the environment (3.00)."],
        ),
    ],
)
def test_a_disk_without_room_is_named_with_what_it_is_for(disks, there, said):
    assert disks(there) == said


@pytest.mark.parametrize(
    ("inodes", "free", "said"),
    [
        (0, 0, ""),  # btrfs
        (1_000_000, 0, "/, /srv: found 0 inodes free; expected 30000, for as many files."),
        (1_000_000, 29_999, "/, /srv: found 29999 inodes free; expected 30000, for as many files."),
        (1_000_000, 30_000, ""),
    ],
)
def test_a_disk_without_inodes_is_full(load_module, monkeypatch, inodes, free, said):
    """With gigabytes free: as of many small files, or of a disk that was made for large ones (mkfs -T largefile4)."""
    module = load_module("disk_room")
    needs = [{"path": path, "bytes": 1, "what": "x"} for path in ("/", "/srv")]
    there = {"f_bavail": 10**9, "f_frsize": 4096, "f_files": inodes, "f_favail": free, "f_flag": 0}
    monkeypatch.setattr(module.os, "statvfs", lambda path: SimpleNamespace(**there))
    monkeypatch.setattr(module.os, "stat", lambda path: SimpleNamespace(st_dev=1))
    assert module.faults(needs, module.FILES["first"]) == [said] * bool(said)
    assert module.read_only(needs) == []
    there["f_flag"] = os.ST_RDONLY
    assert module.read_only(needs) == ["/", "/srv"]


@pytest.mark.parametrize(
    ("uuid", "device"),
    [
        ("LVM-abc123", "/dev/mapper/ubuntu--vg-ubuntu--lv"),
        ("CRYPT-LUKS2-abc123-root", ""),
        (None, ""),  # a partition
    ],
)
def test_a_logical_volume_without_room_may_grow(load_module, monkeypatch, tmp_path, uuid, device):
    module = load_module("disk_room")
    place = tmp_path / "dev/block/253:0/dm"
    place.mkdir(parents=True)
    if uuid:
        (place / "uuid").write_text(f"{uuid}\n")
        (place / "name").write_text("ubuntu--vg-ubuntu--lv\n")
    assert module.volume(os.makedev(253, 0), str(tmp_path)) == device
    monkeypatch.setattr(module, "volume", lambda number: device)
    (said,) = module.faults([{"path": "/", "bytes": 10**18, "what": "programs"}])
    assert said.endswith(f"lvextend -r -l +100%FREE {device}.") if device else "lvextend" not in said


def test_what_a_first_installation_needs_is_asked_of_no_other(load_module, run_module, tmp_path):
    installed = load_module("disk_room").installed
    (tmp_path / "key").mkdir()
    (tmp_path / "current").symlink_to("key")
    assert not installed(str(tmp_path))  # its installation broke off
    (tmp_path / "key/.complete").touch()
    assert installed(str(tmp_path))
    # What a run that broke off has downloaded and unpacked is a part of what it needs.
    (tmp_path / "env/.cache/http").mkdir(parents=True)
    (tmp_path / "env/.cache/http/torch").write_bytes(bytes(1 << 20))
    os.link(tmp_path / "env/.cache/http/torch", tmp_path / "env/torch")  # under two names
    left = [str(tmp_path / "env"), str(tmp_path / "nothing")]
    need = {"path": str(tmp_path), "what": "it"}
    assert load_module("disk_room").size(left[0]) == 1 << 20 and load_module("disk_room").size(left[1]) == 0
    (said,) = load_module("disk_room").faults([{**need, "bytes": 10**18, "left": left}])
    assert f"expected {(10**18 - (1 << 20)) / 1e9:.2f} GB" in said
    full = [{"path": "/", "bytes": 10**18, "what": "programs"}]
    assert run_module("disk_room", first=full, later=[], environment=str(tmp_path))["changed"] is False
    told = run_module("disk_room", first=full, later=[], environment=f"{tmp_path}/env")["msg"]
    assert told.startswith("/: found ") and "Make room there (`df -h`" in told and "python_env_dir" in told


@pytest.mark.parametrize(
    ("known", "path", "gigabytes"),
    [
        ({}, "/opt/trainyard/env", 3),
        ({"python_env_dir": "/data/env", "__nvidia_survey": {"survey": {"cards": []}}}, "/data/env", 3),
        ({"__nvidia_survey": {"survey": {"cards": [{}]}}}, "/opt/trainyard/env", 10),
        (
            {"__nvidia_survey": {"survey": {"cards": [{}]}}, "python_env_torch": "torch==2.13.0+cpu"},
            "/opt/trainyard/env",
            3,
        ),
    ],
)
def test_an_environment_with_cuda_needs_more(known, path, gigabytes):
    variables = yaml.safe_load((ROOT / "roles/packages/vars/main.yml").read_text())
    room = templated(variables, known, "{{ _packages_room }}")
    assert [need["path"] for need in room["first"]] == ["/", "/var", path]
    assert room["first"][2]["bytes"] == gigabytes * 10**9
    assert all(need["bytes"] <= 10**8 for need in room["later"])  # a host that is nearly full trains on
