"""RDMA: what /sys says, what is made of it, and who manages InfiniBand."""

import json
import subprocess
import sys
from pathlib import Path

import jinja2
import pytest
import yaml

from plugins.filter import rdma as rdma_filter
from plugins.filter import roce_switch as switch_filter
from plugins.module_utils import rdma_ports

ROOT = Path(__file__).resolve().parents[2]


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def make_port(root, device, layer="Ethernet", state="4: ACTIVE", guid="0002:c903:0002:fce9", **more):
    """A port below `root`/sys as the kernel shows it."""
    port = root / f"sys/class/infiniband/{device}/ports/{more.get('number', 1)}"
    write(port.parent.parent / "node_type", more.get("node_type", "1: CA"))
    if "driver" in more:
        (root / "drivers" / more["driver"]).mkdir(parents=True, exist_ok=True)
        (port.parent.parent / "device").mkdir(exist_ok=True)
        (port.parent.parent / "device/driver").symlink_to(root / "drivers" / more["driver"])
    write(port / "state", state)
    write(port / "rate", more.get("rate", "100 Gb/sec (4X EDR)"))
    write(port / "link_layer", layer)
    write(port / "sm_lid", more.get("sm_lid", "0x0"))
    gids = more.get("gids", [(f"fe80:0000:0000:0000:{guid}", "IB/RoCE v1", "")])
    for index, (gid, kind, interface) in enumerate(gids):
        write(port / f"gids/{index}", gid)
        write(port / f"gid_attrs/types/{index}", kind)
        write(port / f"gid_attrs/ndevs/{index}", interface)
    write(port / "gids/9", "0000:0000:0000:0000:0000:0000:0000:0000")


ROCE = [
    ("fe80:0000:0000:0000:0250:56ff:fe00:0001", "IB/RoCE v1", "ens192"),
    ("0000:0000:0000:0000:0000:ffff:c0a8:fac9", "RoCE v2", "ens192"),
]


def survey(root, managers=()):
    ports = rdma_ports.rdma_ports(str(root))
    for port in ports:
        port["manager"] = (
            dict(zip(("guid", "state"), (managers[0], "MASTER"), strict=True)) if managers else None
        )
    return {"ports": ports, "missing": [], "container": False}


def test_a_roce_port_is_read_and_told(tmp_path):
    make_port(tmp_path, "rocep11s0", gids=ROCE)
    write(tmp_path / "sys/class/net/ens192/mtu", "1500")
    found = survey(tmp_path)
    # A guest's to be, of which nothing is told:
    make_port(tmp_path, "rocep11s0v0", gids=ROCE[:1], driver="mlx5_core")
    write(tmp_path / "sys/class/infiniband/rocep11s0v0/device/physfn", "")
    (virtual,) = survey(tmp_path)["ports"][1:]
    assert virtual["guests"] and len(rdma_filter.rdma_told(survey(tmp_path))) == 1
    (port,) = found["ports"]
    assert (port["device"], port["interface"], port["mtu"], port["gbit"]) == (
        "rocep11s0",
        "ens192",
        1500,
        100.0,
    )
    assert [gid["address"] for gid in port["gids"]] == ["", "192.168.250.201"]
    assert rdma_filter.rdma_faults(found, "node1") == []
    (line,) = rdma_filter.rdma_told(found)
    assert "RoCE v2 over ens192 (192.168.250.201, GID 1), 100 Gbit/s" in line and "mtu: 9000" in line
    assert rdma_filter.roce_ports(found) == [{"device": "rocep11s0", "port": 1, "interface": "ens192"}]


def test_a_bonds_cards_get_the_class_and_not_the_bond(tmp_path):
    """Nor a VLAN on it: classes are a card's; both ports of one device are."""
    gids = [(gid, kind, "bond0.7") for gid, kind, _ in ROCE]
    make_port(tmp_path, "mlx5_bond_0", gids=gids)
    net = tmp_path / "sys/class/net"
    for above, below in (("bond0.7", "bond0"), ("bond0", "ens1f0np0"), ("bond0", "ens1f1np1")):
        (net / f"{above}/lower_{below}").mkdir(parents=True)
    (tmp_path / "drivers/mlx5_core").mkdir(parents=True)
    for card in ("ens1f0np0", "ens1f1np1"):
        (net / card / "device").mkdir(parents=True)
        (net / card / "device/driver").symlink_to(tmp_path / "drivers/mlx5_core")
    found = survey(tmp_path)
    asked = rdma_filter.roce_ports(found)
    assert [(one["device"], one["interface"]) for one in asked] == [
        ("mlx5_bond_0", "ens1f0np0"),
        ("mlx5_bond_0", "ens1f1np1"),
    ]
    assert rdma_filter.roce_deaf(found) == []
    found["ports"][0]["cards"][1]["driver"] = "mlx4_core"
    assert rdma_filter.roce_deaf(found) == ["ens1f1np1"]
    # As a ConnectX-3 for management beside a card that heeds its class: that one alone gets it.
    assert [one["interface"] for one in rdma_filter.roce_ports(found)] == ["ens1f0np0"]


def test_what_knows_no_classes_is_left_out_beside_what_does(tmp_path):
    """As a virtual function; where none knows them the role refuses."""
    for device, interface in (("rocep1s0", "ens1"), ("rocep1s0v0", "ens1v0")):
        make_port(tmp_path, device, gids=[(gid, kind, interface) for gid, kind, _ in ROCE])
    found = survey(tmp_path)
    ports = rdma_filter.roce_ports(found)
    results = [
        {"item": ports[0], "rc": 0, "stderr": ""},
        {"item": ports[1], "rc": 1, "stderr": "Operation not supported"},
    ]
    assert rdma_filter.roce_ports(found, {"results": results}) == ports[:1]
    assert rdma_filter.roce_silent({"results": results}) == {ports[1]["interface"]: results[1]["stderr"]}
    assert (
        rdma_filter.roce_ports(found, {"results": [{"item": port, "skipped": True} for port in ports]})
        == ports
    )
    assert rdma_filter.roce_ports(found, {"skipped": True}) == ports


def test_a_card_without_a_cable_or_an_address_is_refused(tmp_path):
    assert "no RDMA device" in rdma_filter.rdma_faults(survey(tmp_path), "node1")[0]
    make_port(tmp_path, "mlx5_0", state="1: DOWN", gids=ROCE)
    assert (
        "found DOWN; expected ACTIVE. Look at the cable of ens192"
        in rdma_filter.rdma_faults(survey(tmp_path), "n")[0]
    )
    make_port(tmp_path, "mlx5_1", gids=ROCE[:1])
    assert "no GID of type RoCE v2" in rdma_filter.rdma_faults(survey(tmp_path), "n")[1]
    make_port(tmp_path, "mlx5_2", gids=ROCE)  # one that is well is enough
    assert rdma_filter.rdma_faults(survey(tmp_path), "n") == []
    told = rdma_filter.rdma_told(survey(tmp_path))
    assert [line.partition(";")[0].partition(" over")[0] for line in told] == [
        "mlx5_1/1: found no GID of type RoCE v2 with an IPv4 address",
        "mlx5_2/1: RoCE v2",
    ]


def test_a_port_of_another_kind_is_refused_by_its_name(tmp_path):
    make_port(tmp_path, "efa_0", "Unspecified")
    assert "found a link layer of Unspecified" in rdma_filter.rdma_faults(survey(tmp_path), "n")[0]
    assert rdma_filter.rdma_faults(survey(tmp_path), "n")[-1].endswith(
        "out of the group rdma, to train over TCP"
    )


V1, V2 = "IB/RoCE v1", "RoCE v2"
GIDS = {  # by what stands for them in FIELD
    "local": "fe80:0000:0000:0000:0250:56ff:fe00:0001",
    "4": "0000:0000:0000:0000:0000:ffff:c0a8:fac9",
    "6": "2001:0db8:0000:0000:0000:0000:0000:0001",
    "mac": "b496:9191:7040:0000:0000:0000:0000:0000",
}


def ib(device, state="4: ACTIVE", **more):
    return {"device": device, "layer": "InfiniBand", "state": state, "sm_lid": "0x1", **more}


def eth(device, *gids, **more):
    """gids: (key of GIDS, kind, interface unless ens1)."""
    given = [(GIDS[key], kind, *(interface or ["ens1"])) for key, kind, *interface in gids]
    return {"device": device, "gids": given, **more}


LOCAL, MAPPED, RNIC = ("local", V2), ("4", V2), {"node_type": "4: RNIC"}
FIELD = {  # what hosts show: ports, and of each of them what is said, "" where it carries a run
    "ConnectX-6 in InfiniBand mode": [(ib("ibp59s0"), "")],
    "eight rails of NDR": [(ib(f"mlx5_{n}", rate="400 Gb/sec (4X NDR)"), "") for n in range(8)],
    "a VPI card, one port each way": [
        (ib("mlx4_0", number=1), ""),
        (eth("mlx4_0", ("4", V1), MAPPED, number=2), ""),
    ],
    "no cable in the second port": [(ib("mlx5_0"), ""), (ib("mlx5_1", "1: DOWN"), "found DOWN")],
    "ARMED": [(ib("ibp1s0", "3: ARMED", sm_lid="0x0"), "group opensm")],
    "Omni-Path without its manager": [(ib("opap1s0", "2: INIT", driver="hfi1"), "opafm")],
    "Omni-Path": [(ib("hfi1_0", driver="hfi1"), "")],
    "a GID table as mlx5 has it": [(eth("rocep1s0", ("local", V1), LOCAL, ("4", V1), MAPPED), "")],
    "IPv6 alone": [(eth("rocep1s0", LOCAL, ("6", V2)), "no GID of type RoCE v2 with an IPv4 address")],
    "an address on a VLAN alone": [(eth("rocep1s0", LOCAL, ("4", V2, "ens1.100")), "")],
    "ConnectX-3 on Ethernet": [(eth("mlx4_0", ("4", V1)), "found 192.168.250.201 by RoCE v1 alone")],
    "E810, set to iWARP": [
        (eth("iwp1s0f0", ("mac", V1, ""), **RNIC, driver="ice"), "enable_iwarp to false and then enable_roce")
    ],
    "E810 by RoCE": [(eth("rocep1s0f0", MAPPED, driver="ice"), "")],
    "X722": [(eth("iwp1s0", **RNIC, driver="i40e"), "found iWARP; expected RoCE, the way that NCCL goes")],
    "Chelsio": [(eth("cxgb4_0", **RNIC, driver="cxgb4"), "found iWARP")],
    "siw": [(eth("siw0", **RNIC), "found iWARP")],
    "bnxt_re": [(eth("bnxt_re0", LOCAL, MAPPED, driver="bnxt_en"), "")],
    "rxe": [(eth("rxe0", LOCAL, MAPPED, rate="2.5 Gb/sec (1X SDR)"), "")],
    "EFA": [({"device": "rdmap16s27", "layer": "Unspecified"}, "a link layer of Unspecified")],
    "usNIC": [(eth("usnic_0", node_type="129: usNIC"), "no GID of type RoCE v2")],
    "no rate, no layer": [({"device": "odd0", "layer": "", "rate": ""}, "a link layer of no name")],
}


@pytest.mark.parametrize("name", FIELD)
def test_ports_of_the_field_are_judged_by_what_they_are(tmp_path, name):
    for made, _ in FIELD[name]:
        make_port(tmp_path, made["device"], **{key: one for key, one in made.items() if key != "device"})
    found = survey(tmp_path)
    said = [rdma_ports.port_fault(port) for port in found["ports"]]
    assert [bool(one) for one in said] == [bool(fault) for _, fault in FIELD[name]]
    assert all(fault in one for one, (_, fault) in zip(said, FIELD[name], strict=True)), said
    assert bool(rdma_filter.rdma_faults(found, "n")) is all(said)
    best = rdma_ports.fastest(found["ports"])
    assert bool(best) is not all(said)
    if name == "an address on a VLAN alone":
        assert "over ens1.100 (192.168.250.201, GID 1)" in rdma_filter.rdma_told(found)[0]


def test_a_port_whose_interface_nobody_set_up_wants_no_cable(tmp_path):
    make_port(tmp_path, "rocep1s0", state="1: DOWN", gids=ROCE[:1])
    for flags, said in (("0x1002", "nobody set up its interface ens192"), ("0x1003", "the cable of ens192")):
        write(tmp_path / "sys/class/net/ens192/flags", flags)
        (fault, _) = rdma_filter.rdma_faults(survey(tmp_path), "n")
        assert said in fault and fault.startswith("n: rocep1s0/1: found DOWN")


def test_what_carries_a_run_is_measured(tmp_path):
    """Not a port that is up without an address, though it is the first, or faster."""
    make_port(tmp_path, "mlx5_0", gids=ROCE[:1], rate="200 Gb/sec (4X HDR)")
    make_port(tmp_path, "mlx5_1", gids=ROCE)
    assert rdma_ports.fastest(rdma_ports.rdma_ports(str(tmp_path))) == "mlx5_1"


def test_opensm_is_not_for_omni_path(tmp_path):
    make_port(tmp_path, "opap1s0", "InfiniBand", "2: INIT", driver="hfi1")
    plan = rdma_filter.opensm_plan({"a": survey(tmp_path)}, ["a"], ["a"])["a"]
    assert (
        "found opap1s0/1 is Omni-Path; expected an InfiniBand port" in plan["problem"] and not plan["guids"]
    )


def test_infiniband_wants_a_subnet_manager(tmp_path):
    make_port(tmp_path, "ibp1s0", "InfiniBand", "2: INIT")
    assert "no subnet manager" in rdma_filter.rdma_faults(survey(tmp_path), "n")[0]
    make_port(tmp_path, "ibp1s0", "InfiniBand")
    assert "sm_lid 0" in rdma_filter.rdma_faults(survey(tmp_path), "n")[0]
    make_port(tmp_path, "ibp1s0", "InfiniBand", sm_lid="0x1")
    assert rdma_filter.rdma_faults(survey(tmp_path), "n") == []


def test_who_manages_infiniband(tmp_path):
    """The first of the group, its standby; nobody on RoCE, nor beside a manager that is not ours."""
    make_port(tmp_path / "a", "ibp1s0", "InfiniBand", guid="0002:c903:0000:00aa")
    make_port(tmp_path / "b", "ibp1s0", "InfiniBand", guid="0002:c903:0000:00bb")
    make_port(tmp_path / "c", "rocep1s0", gids=ROCE)
    hosts = {name: survey(tmp_path / name) for name in "ab"}
    plans = rdma_filter.opensm_plan(hosts, ["a", "b"], ["a", "b"])
    assert [plans[name]["guids"] for name in "ab"] == [["0002c903000000aa"], ["0002c903000000bb"]]
    assert (plans["a"]["priority"], plans["b"]["priority"]) == (15, 14)
    assert plans["a"]["ports"] == {"0002c903000000aa": "ibp1s0 1"}

    with_own = {"a": survey(tmp_path / "a", ["0002c903000000aa"]), "b": hosts["b"]}
    assert not rdma_filter.opensm_plan(with_own, ["b"], ["a", "b"])["b"]["skip"]
    with_strange = {"a": survey(tmp_path / "a", ["0002c903000000ff"]), "b": hosts["b"]}
    plan = rdma_filter.opensm_plan(with_strange, ["b"], ["a", "b"])["b"]
    assert "0002c903000000ff" in plan["skip"] and not plan["guids"]

    roce = rdma_filter.opensm_plan({"c": survey(tmp_path / "c")}, ["c"], ["c"])["c"]
    assert "rocep1s0/1 is Ethernet; expected an InfiniBand port" in roce["problem"] and not roce["guids"]


@pytest.mark.parametrize(
    ("asked", "reigns", "told"),
    [
        (15, "", 15),
        (14, "", 14),
        (10, "sminfo: sm lid 3 sm guid 0x100004, activity count 8 priority 9 state 3 SMINFO_MASTER", 8),
        (9, "sminfo: sm lid 1 sm guid 0x100001, activity count 8 priority 10 state 3 SMINFO_MASTER", 9),
        (9, "sminfo: sm lid 1 sm guid 0x100001, activity count 8 priority 9 state 3 SMINFO_MASTER", 8),
        (10, "sminfo: sm lid 3 sm guid 0x100004, activity count 8 priority 0 state 3 SMINFO_MASTER", 10),
        (10, "sminfo: sm lid 3 sm guid 0x100004, activity count 8 priority 9 state 2 SMINFO_STANDBY", 10),
    ],
)
def test_a_subnet_manager_that_comes_later_stands_by(tmp_path, asked, reigns, told):
    """Nothing is handed over: the new master may wait for the old one for ever."""
    role = ROOT / "roles/opensm"
    for name, does in {
        "sminfo": f'echo "$@" > {tmp_path}/asked; echo "{reigns}"; test -n "{reigns}"',
        "sleep": f'echo "$1" > {tmp_path}/slept',
        "opensm": f'echo "$@" > {tmp_path}/told',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    program = (role / "files/start-opensm").read_text().replace("/usr/sbin/opensm", f"{tmp_path}/opensm")
    (tmp_path / "start").write_text(program)
    words = ["0002c903000000aa", str(asked), "ibp1s0", "1"]
    subprocess.run(["sh", tmp_path / "start", *words], check=True, env={"PATH": f"{tmp_path}:/usr/bin:/bin"})
    said = {name: (tmp_path / name).read_text().split() for name in ("asked", "slept", "told")}
    assert said["asked"] == ["-C", "ibp1s0", "-P", "1"] and said["slept"] == [str(5 * (15 - asked))]
    assert said["told"] == ["--guid", "0x0002c903000000aa", "--priority", str(told), "--log_file", "stdout"]
    unit = jinja2.Template((role / "templates/trainyard-opensm.service.j2").read_text()).render(
        item=words[0], _opensm_plan={"priority": asked, "ports": {words[0]: "ibp1s0 1"}}
    )
    assert f"\nExecStart=/usr/local/lib/trainyard/start-opensm %i {asked} ibp1s0 1\n" in unit


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (FileNotFoundError(2, "No such file or directory"), "comes with infiniband-diags"),
        (subprocess.TimeoutExpired("sminfo", 10), "sminfo -C ibp1s0 -P 1: found no answer within 10 s"),
    ],
)
def test_a_fabric_that_cannot_be_asked_is_not_taken_for_one_without_a_manager(
    load_module, monkeypatch, call_main, tmp_path, error, words, check
):
    """OpenSM would reign beside a switch's. In check mode its program may not be there yet."""
    make_port(tmp_path, "ibp1s0", "InfiniBand", state="2: INIT")
    module = load_module("rdma_survey")

    def run(*_, **__):
        raise error

    monkeypatch.setattr(module, "in_container", lambda: False)
    monkeypatch.setattr(module.subprocess, "run", run)
    found = call_main(module, check, modules=[], managers=True, sys_root=str(tmp_path))
    if check:
        assert found["survey"]["ports"]
    else:
        assert found["failed"] and words in found["msg"]

    def answers(said):
        monkeypatch.setattr(
            module.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 1, "", said)
        )

    answers("ibwarn: [7] mad_rpc_open_port: can't open UMAD port ((null):0)\n")
    found = call_main(module, check, modules=[], managers=True, sys_root=str(tmp_path))
    assert found.get("failed", False) is not check and (check or "can't open UMAD port" in found["msg"])
    answers("sminfo: iberror: failed: query\n")
    (port,) = call_main(module, check, modules=[], managers=True, sys_root=str(tmp_path))["survey"]["ports"]
    assert port["manager"] is None


# ---- roce_qos ----


@pytest.fixture
def host(tmp_path):
    """Calls the program on a host that is made up; `.told` is what `dcb` was told."""
    (tmp_path / "bin").mkdir()
    dcb = tmp_path / "bin/dcb"
    dcb.write_text((ROOT / "molecule/roce_qos/dcb").read_text())
    dcb.chmod(0o755)
    (tmp_path / "sys/kernel/config/rdma_cm").mkdir(parents=True)
    (tmp_path / "run").mkdir()
    for end in ("np", "rp"):
        write(tmp_path / f"sys/class/net/ens192/ecn/roce_{end}/enable/3", "0")

    class Host:
        root = tmp_path
        tos = tmp_path / "sys/kernel/config/rdma_cm/rocep11s0/ports/1/default_roce_tos"

        def __call__(self, what, pfc, interface="ens192", dscp=26):
            port = {"device": "rocep11s0", "port": 1, "interface": interface}
            wanted = {"dscp": dscp, "priority": 3, "pfc": pfc, "tos": 106, "ports": [port]}
            (tmp_path / "wanted.json").write_text(json.dumps(wanted))
            self.tos.parent.mkdir(
                parents=True, exist_ok=True
            )  # as configfs does when the device's folder is made
            return subprocess.run(
                [sys.executable, ROOT / "roles/roce_qos/files/roce_qos.py", what, tmp_path / "wanted.json"],
                env={
                    "PATH": f"{tmp_path}/bin:/usr/bin:/bin",
                    "ROOT": str(tmp_path),
                    "DCB_STATE": str(tmp_path / "dcb"),
                },
                capture_output=True,
                text=True,
            )

        def classes(self):
            return json.loads((tmp_path / "dcb").read_text())["app"]

        def told(self):
            return [
                line for line in json.loads((tmp_path / "dcb").read_text())["told"] if " show " not in line
            ]

    return Host()


@pytest.mark.parametrize("pfc", [False, True])
def test_the_class_is_set_and_checked(host, pfc):
    before = host("check", pfc)
    assert before.returncode == 1 and "DSCP 26 has priority None; expected 3" in before.stdout
    done = host("apply", pfc)
    assert done.returncode == 0, done.stderr
    assert host.told()[:2] == [
        "app replace dev ens192 dscp-prio 26:3 48:6",
        "pfc set dev ens192 prio-pfc 3:" + ("on" if pfc else "off"),
    ]
    assert host.tos.read_text() == "106"
    assert (host.root / "sys/class/net/ens192/ecn/roce_np/enable/3").read_text() == "1"
    assert host("check", pfc).returncode == 0, host("check", pfc).stdout
    wrong = host("check", not pfc)
    assert (
        wrong.returncode == 1 and f"PFC is {'on' if pfc else 'off'} for priority 3; expected" in wrong.stdout
    )
    assert host("clear", pfc).returncode == 0
    assert host("check", pfc).returncode == 1 and host.classes() == {}


def test_a_priority_that_is_lossless_for_its_owners_storage_stays_so(host):
    own = {"app": {}, "pfc": [number == 4 for number in range(8)], "told": []}
    (host.root / "dcb").write_text(json.dumps(own))
    for what in ("apply", "check", "clear"):
        assert host(what, True).returncode == 0
        paused = json.loads((host.root / "dcb").read_text())["pfc"]
        assert [number for number, on in enumerate(paused) if on] == ([4] if what == "clear" else [3, 4])


def test_what_its_owner_had_of_that_class_comes_back(host):
    """Storage with the usual mark and a lossless class: `lossy` takes both, for as long as it is asked for."""
    own = {"app": {"26": "4", "8": "1"}, "pfc": [number == 3 for number in range(8)], "told": []}
    (host.root / "dcb").write_text(json.dumps(own))
    host.tos.parent.mkdir(parents=True)
    host.tos.write_text("32")
    for _ in range(2):  # what the first time has set is not what was there
        assert host("apply", False).returncode == 0
        assert host.classes() == {"26": "3", "8": "1", "48": "6"}
    assert host("clear", False).returncode == 0
    now = json.loads((host.root / "dcb").read_text())
    assert (now["app"], now["pfc"], host.tos.read_text()) == (own["app"], own["pfc"], "32")
    # Somebody's own change since then stays his.
    assert host("apply", False).returncode == 0
    (host.root / "dcb").write_text(json.dumps(now | {"app": {"26": "5"}}))
    assert host("clear", False).returncode == 0 and host.classes() == {"26": "5"}


def test_what_cannot_be_given_back_stays_known(host):
    own = {"app": {}, "pfc": [number == 3 for number in range(8)], "told": []}
    (host.root / "dcb").write_text(json.dumps(own))
    host.tos.parent.mkdir(parents=True)
    host.tos.write_text("32")
    assert host("apply", False).returncode == 0
    dcb = host.root / "bin/dcb"
    works = host.root / "bin/dcb-that-works"
    dcb.rename(works)
    dcb.write_text(f'#!/bin/sh\ncase "$*" in *"app del"*) echo busy >&2; exit 1;; esac\nexec {works} "$@"\n')
    dcb.chmod(0o755)
    done = host("clear", False)
    assert done.returncode == 1 and done.stdout.startswith("ens192: ") and "busy" in done.stdout
    # What is ours by now is not what was there, and the other mark takes nothing with it.
    done = host("apply", False, dscp=34)
    assert done.returncode == 0 and done.stderr.startswith("warning: ens192: ")
    assert host.classes() == {"26": "3", "34": "3", "48": "6"}
    works.rename(dcb)
    assert host("clear", False, dscp=34).returncode == 0
    now = json.loads((host.root / "dcb").read_text())
    assert (now["app"], now["pfc"], host.tos.read_text()) == ({}, own["pfc"], "32")
    assert not (host.root / "run/trainyard-roce-qos.json").exists()


def test_another_mark_takes_the_place_of_the_one_before(host):
    assert host("apply", True).returncode == 0
    assert (
        host("clear", True, dscp=34).returncode == 0
    )  # as the unit's stop does, when the file is new already
    assert host.classes() == {}
    for dscp in (26, 34):
        assert host("apply", True, dscp=dscp).returncode == 0
    assert host.classes() == {"34": "3", "48": "6"}


def test_a_card_that_knows_no_classes_is_told(host):
    done = host("apply", True, "eth9")
    assert done.returncode == 1 and "Operation not supported. If eth9's driver knows no DCB" in done.stderr
    assert "Traceback" not in done.stderr and "LLDP" not in done.stderr
    (host.root / "sys/class/net/eth9/device").mkdir(parents=True)
    (host.root / "drivers/ice").mkdir(parents=True)
    (host.root / "sys/class/net/eth9/device/driver").symlink_to(host.root / "drivers/ice")
    assert "`ethtool --set-priv-flags eth9 fw-lldp-agent off`" in host("apply", True, "eth9").stderr


def test_the_mark_is_that_of_the_scenario():
    assert rdma_filter.traffic_class(26) == 106


@pytest.mark.parametrize(
    ("mode", "in_group", "own", "marks"),
    [
        ("lossy", True, {}, {"TRAINYARD_RDMA": "1", "NCCL_IB_TC": "106"}),
        ("lossless", True, {}, {"TRAINYARD_RDMA": "1", "NCCL_IB_TC": "106"}),
        ("none", True, {}, {"TRAINYARD_RDMA": "1"}),
        (None, True, {}, {"TRAINYARD_RDMA": "1"}),
        ("lossy", False, {}, {}),
        ("lossy", False, {"NCCL_DEBUG": "INFO"}, {"NCCL_DEBUG": "INFO"}),
        ("lossy", True, {"NCCL_IB_TC": 96}, {"TRAINYARD_RDMA": "1", "NCCL_IB_TC": "96"}),
    ],
)
def test_nccl_marks_its_packets_where_roce_has_a_class_unless_the_inventory_says_how(
    mode, in_group, own, marks
):
    from ansible.parsing.dataloader import DataLoader
    from ansible.template import Templar, trust_as_template

    words = yaml.safe_load((ROOT / "roles/trainer/vars/main.yml").read_text())["_trainer_marks"]
    words = words.replace("| traffic_class", "* 4 + 2")  # which test_the_mark_is_that_of_the_scenario has
    known = {"inventory_hostname": "node1", "groups": {"rdma": ["node1"] if in_group else []}}
    known |= {"trainer_environment": own}
    known |= {"roce_qos_mode": mode} if mode else {}
    found = Templar(loader=DataLoader(), variables=known).template(trust_as_template(words))
    assert {name: str(value) for name, value in found.items()} == marks
    (env,) = [
        task["ansible.builtin.copy"]["content"]
        for task in yaml.safe_load((ROOT / "roles/trainer/tasks/start.yml").read_text())
        if "rank variables" in task["name"]
    ]
    assert "_trainer_marks)" in env


# ---- the switch ----


HOSTS = {"a": {"roce_qos_switch_port": "Ethernet1/1"}, "b": {"roce_qos_switch_port": "Ethernet1/2"}}


def wanted(pfc):
    return {"dscp": 26, "priority": 3, "pfc": pfc}


@pytest.mark.parametrize("pfc", [False, True])
def test_nx_os_is_read_by_a_parser_of_such_configurations(pfc):
    from hier_config import Platform, get_hconfig

    text = switch_filter.roce_switch(["a", "b"], HOSTS, "cisco-nxos", wanted(pfc))
    tree = get_hconfig(Platform.CISCO_NXOS, text)

    def below(*path):
        node = tree
        for words in path:
            node = node.get_child(equals=words)
            assert node is not None, (path, text)
        return [child.text for child in node.children]

    assert below("class-map type qos match-all TRAINYARD-ROCE") == ["match dscp 26"]
    assert below("policy-map type qos TRAINYARD-MARK", "class TRAINYARD-ROCE") == ["set qos-group 3"]
    paused = below("policy-map type network-qos TRAINYARD-NETWORK", "class type network-qos c-8q-nq3")
    assert ("pause pfc-cos 3" in paused) == pfc
    queue = below("policy-map type queuing TRAINYARD-QUEUES", "class type queuing c-out-8q-q3")
    assert any(line.startswith("random-detect ") and line.endswith(" ecn") for line in queue)
    # Priority is for the highest numbered group alone, and each of the eight queues has its part.
    queues = {
        group: below("policy-map type queuing TRAINYARD-QUEUES", f"class type queuing c-out-8q-q{group}")[0]
        for group in ("-default", *range(1, 8))
    }
    assert [group for group, told in queues.items() if told == "priority level 1"] == [7]
    assert below("policy-map type qos TRAINYARD-MARK", "class TRAINYARD-CNP") == ["set qos-group 7"]
    shares = [told.removeprefix("bandwidth remaining percent ") for told in queues.values()]
    assert sum(map(int, filter(str.isdigit, shares))) == 100
    for port in ("Ethernet1/1", "Ethernet1/2"):
        told = below(f"interface {port}")
        assert "service-policy type qos input TRAINYARD-MARK" in told
        assert ("priority-flow-control mode on" in told) == pfc
    # Each policy that is applied is one that is there.
    named = {line.split()[-1] for line in text.splitlines() if line.strip().startswith("service-policy")}
    assert named == {line.split()[-1] for line in text.splitlines() if line.startswith("policy-map")}


@pytest.mark.parametrize("pfc", [False, True])
def test_sonic_s_tables_name_only_what_is_there(pfc):
    hosts = {"a": {"roce_qos_switch_port": "Ethernet0"}}
    tables = json.loads(switch_filter.roce_switch(["a"], hosts, "sonic", wanted(pfc)))
    assert tables["DSCP_TO_TC_MAP"]["TRAINYARD"]["26"] == "3"
    assert tables["PORT_QOS_MAP"]["Ethernet0"].get("pfc_enable") == ("3" if pfc else None)
    assert ("PFC_WD" in tables) == pfc
    for queue in tables["QUEUE"].values():
        assert queue["scheduler"] in tables["SCHEDULER"]
        assert queue.get("wred_profile", "TRAINYARD") in tables["WRED_PROFILE"]


def test_sonic_pauses_nothing_before_it_has_its_own_buffers(repository):
    """Which depend on its model: the text cannot have them, and whoever applies it is told."""
    first = switch_filter.roce_switch_first
    assert "`sudo config qos reload`" in first("sonic", wanted(True)) and "on no switch" in first(
        "sonic", wanted(True)
    )
    assert first("sonic", wanted(False)) == first("cisco-nxos", wanted(True)) == ""
    (told,) = [
        task["tell"]["text"]
        for task in yaml.safe_load((repository / "roles/roce_qos/tasks/switch.yml").read_text())
        if "tell" in task
    ]
    read, _, applied = told.partition("{{ roce_qos_switch | roce_switch_first(_roce_qos_class) }}")
    assert "Read it" in read and applied.startswith("Apply it")
    assert "sudo config qos reload" in (repository / "docs/rdma.md").read_text()


def test_a_host_without_its_port_is_named():
    with pytest.raises(Exception, match="found none for b; expected the switch's port"):
        switch_filter.roce_switch(["a", "b"], {**HOSTS, "b": {}}, "cisco-nxos", wanted(True))


# ---- whose subnet manager runs ----


def test_one_that_is_there_manages_the_fabric_until_ours_is_ready():
    """What fails between leaves it a manager: all that may fail comes before it is stopped, and ours right after."""
    tasks = yaml.safe_load((ROOT / "roles/opensm/tasks/run.yml").read_text())
    (first, *_, last) = places = [place for place, task in enumerate(tasks) if "unit_mask" in task]
    assert len(places) == 2 and "replace" not in tasks[first]["unit_mask"]
    assert first == 0 and tasks[1]["vars"] == {"packages_names": ["opensm"]}
    assert tasks[last]["unit_mask"]["replace"] is True
    (run, stays, refuse) = tasks[last + 1 :]  # with nothing that could fail before it runs
    assert run["ansible.builtin.systemd_service"]["enabled"] is True
    assert stays["failed_when"] is False and "ansible.builtin.fail" in refuse


def test_those_that_come_with_other_drivers_give_way_too():
    values = yaml.safe_load((ROOT / "roles/opensm/vars/main.yml").read_text())
    names = [one["name"] for one in values["_opensm_masks"]]
    assert names == ["opensm.service", "opensmd.service"]  # the distribution's; MLNX_OFED's and DOCA's
    (notes,) = (one["inside"] for one in values["_opensm_made"] if "inside" in one)
    assert notes == names


def test_it_manages_the_fabric_again_when_ours_goes():
    """In this order: an earlier release's mask is known by our unit alone."""
    back, remove = yaml.safe_load((ROOT / "roles/opensm/tasks/remove.yml").read_text())
    assert back["unit_mask"]["state"] == "given_back" and remove["host_made"]["remove"] is True


@pytest.mark.parametrize(
    ("stat", "refused"),
    [
        ({"exists": False}, False),
        ({"exists": True, "islnk": True, "lnk_target": "/dev/null"}, False),
        ({"exists": True, "islnk": True, "lnk_target": "/opt/opensm.service"}, True),
        ({"exists": True, "islnk": False}, True),
    ],
)
def test_a_unit_of_somebodys_own_is_refused(stat, refused):
    (task,) = (
        task
        for task in yaml.safe_load((ROOT / "roles/opensm/tasks/precheck.yml").read_text())
        if task["name"].startswith("Refuse to write over it")
    )
    condition = jinja2.Environment().compile_expression(task["when"][-1])
    assert bool(condition(item={"stat": stat})) is refused
