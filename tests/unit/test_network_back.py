"""What gave way to network_interfaces comes back (plugins/filter/network_back.py). Sends nothing.

Most tests go there and back: the plan's files are written into a picture of the host, and what comes back is held
against the picture from before.
"""

import copy

import pytest
import yaml
from networks import ETH0, ETH1, STATIC, card, planned, survey, text

from plugins.filter.network_back import GUARD, narrowed, network_back, with_stanzas
from plugins.filter.network_plan import network_plan
from plugins.module_utils.network_files import IFUPDOWN_RECORD, OUR_FILE

CLOUD = "/etc/netplan/50-cloud-init.yaml"
NETPLAN = """# the installer's
network:
  version: 2
  ethernets:
    eth0:
      dhcp4: true
"""
TWO = NETPLAN + "    eth1: {addresses: [10.0.0.1/24]}\n"
STANZAS = """auto lo
iface lo inet loopback

auto eth0 eth1
# the installer wrote this
iface eth0 inet static
  address 192.168.1.50/24
  # by hand
  gateway 192.168.1.1
allow-hotplug eth0
iface eth1 inet dhcp
"""
WIRED = "[connection]\nid=Wired\ntype=ethernet\ninterface-name=eth0\nuuid=7c0e\n[ipv4]\naddress1=192.168.1.77/24\n"


def kind_of(path):
    """Among which of the survey's files a path is; None for one that it does not read."""
    if ".before-trainyard" in path:
        return "kept"
    for start, kind in {
        "/etc/netplan/": "netplan",
        "/lib/netplan/": "netplan",
        "/etc/systemd/network/": "networkd",
        "/etc/network/": "ifupdown",
        "/etc/NetworkManager/system-connections/": "networkmanager",
    }.items():
        if path.startswith(start) and not path.endswith(".nmmeta"):
            return kind
    return None


def files_of(seen):
    return {path: file["text"] for found in seen["files"].values() for path, file in found.items()}


def after(seen, changes):
    """The survey of the host once the changes are made."""
    everything = files_of(seen)
    for change in changes:
        content = everything.pop(change["path"], None)
        if "content" in change:
            everything[change["path"]] = change["content"]
        elif "move_to" in change:
            assert change["move_to"] not in everything, change
            everything[change["move_to"]] = content
        elif "link_to" in change:
            everything[change["path"]] = ""
    found = {kind: {} for kind in (*seen["files"], "kept")}
    for path, content in everything.items():
        if kind := kind_of(path) or (
            "networkmanager" if path.startswith("/usr/lib/NetworkManager") else None
        ):
            found[kind][path] = text(content)
    return {
        **seen,
        "files": found,
        "asides": sorted(path for path in everything if ".before-trainyard" in path),
        "hidden_profiles": [
            path.rsplit("/", 1)[1][: -len(".nmmeta")] for path in everything if path.endswith(".nmmeta")
        ],
        "resolv_conf": everything.get("/etc/resolv.conf", seen["resolv_conf"]),
    }


def there_and_back(wanted, **more):
    """(the survey from before, that of the host as it is ours, the change back)."""
    before = survey(**copy.deepcopy(more))
    ours = after(before, planned(wanted, **copy.deepcopy(more))["files"])
    return before, ours, network_back(ours)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"netplan": {CLOUD: NETPLAN}},
        {"netplan": {CLOUD: TWO}},
        {"netplan": {CLOUD: NETPLAN, "/etc/netplan/10-other.yaml": TWO}},
        {"netplan": {"/lib/netplan/10-package.yaml": TWO}},
        {"networkd": {"/etc/systemd/network/05-lan.network": "[Match]\nName=eth0\n[Network]\nDHCP=yes\n"}},
        {"networkd": {"/etc/systemd/network/05-all.network": "[Match]\nName=eth*\n[Network]\nDHCP=yes\n"}},
        {"ifupdown": {"/etc/network/interfaces": STANZAS}},
        {"ifupdown": {"/etc/network/interfaces": STANZAS.rstrip()}},
        {"ifupdown": {"/etc/network/interfaces": "source x\n", "/etc/network/interfaces.d/eth0": STANZAS}},
    ],
)
def test_all_files_are_as_before(files):
    before, ours, back = there_and_back([STATIC], files=files, cloud_init=True)
    assert back["fault"] == "" and back["left"] == []
    assert OUR_FILE in files_of(ours)
    assert files_of(after(ours, back["files"])) == files_of(before)


LAN1, LAN2 = ({"name": f"eth{number}", "addresses": [f"10.{number}.0.1/24"]} for number in (1, 2))
THREE = TWO + "    eth2: {dhcp4: true}\n  renderer: networkd\n"


def in_steps(steps, **more):
    """(the survey from before, that of the host as it is ours) where network_interfaces grew by `steps`."""
    before = ours = survey(
        interfaces=[copy.deepcopy(ETH0), copy.deepcopy(ETH1), card("eth2")], **copy.deepcopy(more)
    )
    for count in range(len(steps)):
        plan = network_plan(copy.deepcopy(ours), steps[: count + 1])
        assert plan["errors"] == []
        ours = after(ours, plan["files"])
    return before, ours


@pytest.mark.parametrize(
    "files",
    [
        {"netplan": {CLOUD: TWO}},
        {"netplan": {CLOUD: THREE}},
        {"netplan": {CLOUD: THREE, "/etc/netplan/60-more.yaml": TWO}},
        {"netplan": {CLOUD: THREE.replace("    eth1:", "  ethernets:\n    eth1:")}},
        {"netplan": {CLOUD: TWO.replace("ethernets:", "ethernets:\n    renderer: networkd")}},
        {"netplan": {"/lib/netplan/10-package.yaml": TWO}},
        {"netplan": {"/lib/netplan/10-package.yaml": THREE}},
        {"netplan": {"/lib/netplan/10-package.yaml": "x: [", "/etc/netplan/10-package.yaml": TWO}},
        {"netplan": {"/lib/netplan/10-package.yaml": THREE, "/etc/netplan/10-package.yaml": TWO}},
        {"ifupdown": {"/etc/network/interfaces": STANZAS}},
        {"ifupdown": {"/etc/network/interfaces": STANZAS.replace("auto eth0 eth1", "auto eth0 eth1 eth2")}},
    ],
)
@pytest.mark.parametrize("steps", [[STATIC, LAN1], [LAN1, STATIC], [STATIC, LAN2, LAN1]])
def test_what_gave_way_in_several_steps_comes_back_whole(steps, files):
    before, ours = in_steps(steps, files=files)
    back = network_back(ours)
    assert back["fault"] == "" and back["left"] == []
    assert files_of(after(ours, back["files"])) == files_of(before)
    if "ifupdown" in files:  # by which the undoing takes them down
        record = files_of(ours)[IFUPDOWN_RECORD].split("\n")
        assert sorted(line for line in record if "iface" in line) == [
            "iface eth0 inet static",
            "iface eth1 inet dhcp",
        ]
        assert "  gateway 192.168.1.1" in record and not any("auto" in line for line in record)


def test_of_a_file_that_gave_way_in_steps_nothing_is_lost_where_another_stands():
    _, ours = in_steps([STATIC, LAN1], files={"netplan": {CLOUD: TWO}})
    ours["files"]["netplan"][CLOUD] = text(NETPLAN)
    back = network_back(ours)
    assert back["left"] == [f"{CLOUD}.before-trainyard", f"{CLOUD}.before-trainyard.2"]
    assert set(back["left"]) <= set(files_of(after(ours, back["files"])))

    # What its owner has changed between the steps is what the host was set up with.
    _, ours = in_steps([STATIC, LAN1], files={"netplan": {CLOUD: TWO}})
    mine = ours["files"]["kept"][f"{CLOUD}.before-trainyard.2"]["text"].replace("10.0.0.1", "10.0.0.2")
    ours["files"]["kept"][f"{CLOUD}.before-trainyard.2"] = text(mine)
    back = network_back(ours)
    assert back["left"] == [f"{CLOUD}.before-trainyard"]
    assert files_of(after(ours, back["files"]))[CLOUD] == mine


ACTIVE = {"systemd-networkd": False, "NetworkManager": True, "systemd-resolved": False, "networking": False}


@pytest.mark.parametrize("folder", ["/etc", "/usr/lib"])
def test_profiles_of_network_manager_are_read_again(folder):
    path = f"{folder}/NetworkManager/system-connections/Wired.nmconnection"
    before, ours, back = there_and_back([STATIC], files={"networkmanager": {path: WIRED}}, active=ACTIVE)
    assert ours["hidden_profiles"] == ([] if folder == "/etc" else ["7c0e"])
    again = after(ours, back["files"])
    assert files_of(again) == files_of(before) and again["hidden_profiles"] == []
    assert back["apply"] == [
        ["nmcli", "connection", "reload"],
        ["ip", "address", "flush", "dev", "eth0", "scope", "global"],
        ["netplan", "apply"],
    ]


def test_a_profile_that_somebody_else_has_hidden_stays_so():
    path = "/usr/lib/NetworkManager/system-connections/Other.nmconnection"
    profile = WIRED.replace("eth0", "eth9").replace("7c0e", "9d11")
    seen = survey(
        files={"netplan": {OUR_FILE: yaml.safe_dump({"network": {"ethernets": {"eth0": {}}}})}, "kept": {}},
        hidden_profiles=["9d11"],
    )
    seen["files"]["networkmanager"] = {path: text(profile)}
    assert not any(change["path"].endswith(".nmmeta") for change in network_back(seen)["files"])


def test_name_servers_are_as_before():
    more = {"resolv_conf": "nameserver 10.0.0.53\n", "active": {**ACTIVE, "NetworkManager": False}}
    before, ours, back = there_and_back([{**STATIC, "nameservers": ["192.168.1.1"]}], **more)
    assert "192.168.1.1" in ours["resolv_conf"]
    again = after(ours, back["files"])
    assert again["resolv_conf"] == before["resolv_conf"] and again["asides"] == []

    ours["resolv_conf"] = "nameserver 192.168.1.7\n"  # somebody's own by now
    back = network_back(ours)
    assert back["left"] == ["/etc/resolv.conf.before-trainyard"]
    assert not [change for change in back["files"] if "resolv" in change["path"]]


def test_name_servers_are_resolvconfs_again():
    link = {"resolv_conf": "nameserver 10.0.0.53\n", "resolv_link": "../run/resolvconf/resolv.conf"}
    more = {**link, "active": {**ACTIVE, "NetworkManager": False}}
    wanted = [{**STATIC, "nameservers": ["192.168.1.1"]}]
    _, ours, _ = there_and_back(wanted, **more)
    assert "192.168.1.1" in ours["resolv_conf"]
    kept = "/etc/resolv.conf.before-trainyard"
    made = {change["path"]: change for change in planned(wanted, **more)["files"]}
    assert made[kept]["link_to"] == link["resolv_link"]
    ours = {**ours, "resolv_link": None}  # a plain file by now
    ours["files"]["kept"][kept]["link"] = link["resolv_link"]
    changes = {change["path"]: change for change in network_back(ours)["files"]}
    assert changes["/etc/resolv.conf"] == {"path": "/etc/resolv.conf", "link_to": link["resolv_link"]}
    assert changes[kept]["state"] == "absent"
    # Resolvconf is gone since, and the link leads nowhere: better ours than none.
    del ours["files"]["kept"][kept]
    back = network_back(ours)
    assert back["left"] == [kept]
    assert not [change for change in back["files"] if "resolv" in change["path"]]


def test_the_last_of_several_that_gave_way_comes_back_and_nothing_is_written_over():
    _, ours, _ = there_and_back([STATIC], files={"netplan": {CLOUD: NETPLAN}})
    written_again = NETPLAN.replace("installer", "admin")
    ours["files"]["netplan"][CLOUD] = text(written_again)
    second = copy.deepcopy(ours)
    second["files"]["netplan"].pop(CLOUD)
    second["files"]["kept"][f"{CLOUD}.before-trainyard.2"] = text(written_again)
    second["asides"] = sorted(second["files"]["kept"])
    back = network_back(second)
    assert back["left"] == [f"{CLOUD}.before-trainyard"]
    assert files_of(after(second, back["files"]))[CLOUD] == written_again

    back = network_back(ours)  # it stands where the other one was
    assert back["left"] == [f"{CLOUD}.before-trainyard"]
    assert files_of(after(ours, back["files"]))[CLOUD] == written_again


@pytest.mark.parametrize("word", ["yes", "off", "2024-01-02", "1_000"])
def test_what_an_earlier_version_left_of_a_file_is_recognised(word):
    """It read a netplan file as YAML 1.1 has it, and wrote true for yes."""
    whole = TWO.replace("dhcp4: true", "dhcp4: yes") + f"    eth2: {{optional: {word}}}\n"
    left = yaml.safe_load(whole)
    del left["network"]["ethernets"]["eth0"]
    _, ours, _ = there_and_back([STATIC], files={"netplan": {CLOUD: whole}})
    ours["files"]["netplan"][CLOUD] = text(yaml.safe_dump(left, sort_keys=False))
    back = network_back(ours)
    assert back["left"] == [] and files_of(after(ours, back["files"]))[CLOUD] == whole
    assert not narrowed("network: {x: !!int word}\n", whole)


def test_a_copy_that_somebody_made_stays_where_it_is():
    _, ours, _ = there_and_back([STATIC])
    ours["files"]["kept"][f"{CLOUD}.before-trainyard-mine"] = text(NETPLAN)
    ours["asides"] = sorted(ours["files"]["kept"])
    back = network_back(ours)
    assert back["left"] == [] and not any("mine" in change["path"] for change in back["files"])


def test_the_tenth_is_later_than_the_ninth():
    _, ours, _ = there_and_back([STATIC], files={"netplan": {CLOUD: NETPLAN}})
    for number in range(2, 11):
        ours["files"]["kept"][f"{CLOUD}.before-trainyard.{number}"] = text(f"# {number}\n{NETPLAN}")
    ours["asides"] = sorted(ours["files"]["kept"])
    back = network_back(ours)
    assert {"path": f"{CLOUD}.before-trainyard.10", "move_to": CLOUD} in back["files"]
    assert len(back["left"]) == 9


def test_a_netplan_file_that_somebody_has_changed_since_is_not_overwritten():
    _, ours, _ = there_and_back([STATIC], files={"netplan": {CLOUD: TWO}})
    left = ours["files"]["netplan"][CLOUD]["text"]
    for mine in (left.replace("10.0.0.1", "10.0.0.2"), "# mine\n" + left, left + "    eth9: {dhcp4: true}\n"):
        ours["files"]["netplan"][CLOUD] = text(mine)
        back = network_back(ours)
        assert back["left"] == [f"{CLOUD}.before-trainyard"], mine
        assert files_of(after(ours, back["files"]))[CLOUD] == mine
    assert not narrowed("network: [", TWO) and not narrowed(TWO, "x")


def test_a_connection_afterwards_owes_nothing_to_the_addresses_of_now():
    _, _, back = there_and_back([STATIC], files={"netplan": {CLOUD: NETPLAN}})
    flush = ["ip", "address", "flush", "dev", "eth0", "scope", "global"]
    assert back["apply"] == [
        flush,
        ["netplan", "apply"],
        ["networkctl", "reload"],
        ["networkctl", "reconfigure", "eth0"],
    ]
    assert flush not in back["undo"] and ["netplan", "apply"] in back["undo"]


def test_stanzas_come_up_by_ifup_and_networkd_ends_where_it_has_nothing_else():
    _, ours, back = there_and_back([STATIC], files={"ifupdown": {"/etc/network/interfaces": STANZAS}})
    assert back["apply"][-2:] == [
        ["systemctl", "stop", "systemd-networkd.socket", "systemd-networkd.service"],
        ["ifup", "--force", "eth0"],
    ]
    assert back["undo"][0] == ["ifdown", "--force", f"--interfaces={IFUPDOWN_RECORD}", "eth0"]
    assert back["addresses"] == []  # the stanza has the address in use
    ours["files"]["networkd"]["/etc/systemd/network/50-eth1.network"] = text("[Match]\nName=eth1\n")
    assert not any("stop" in command for command in network_back(ours)["apply"])


def test_lines_of_ifupdown_that_are_nobodys_but_ours_are_taken_for_it():
    mine = "# trainyard is fine\nauto eth0\nauto eth0 eth1\n"
    assert with_stanzas(mine) == (mine, [])


def test_a_bridge_of_ours_goes_and_one_that_was_there_stays():
    bridge = {
        "name": "br0",
        "kind": "bridges",
        "addresses": ["192.168.1.100/24"],
        "options": {"interfaces": ["eth0"]},
    }
    wanted = [{"name": "eth0"}, {**bridge, "gateway": "192.168.1.1"}]
    _, ours, _ = there_and_back(wanted, files={"netplan": {CLOUD: NETPLAN}})
    ours["interfaces"].append({**copy.deepcopy(ETH0), "name": "br0", "kind": "bridge"})
    assert network_back(ours)["apply"][0] == [GUARD, "remove", "br0"]
    theirs = "network:\n  version: 2\n  bridges:\n    br0: {interfaces: [eth0], dhcp4: true}\n"
    ours["files"]["kept"][f"{CLOUD}.before-trainyard"] = text(theirs)
    apply = network_back(ours)["apply"]
    assert [GUARD, "remove", "br0"] not in apply
    assert ["ip", "address", "flush", "dev", "br0", "scope", "global"] in apply


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"netplan": {CLOUD: NETPLAN}}, []),  # a lease: where it is now, or nowhere
        (
            {"netplan": {CLOUD: NETPLAN.replace("dhcp4: true", "addresses: [10.1.1.1/24, 192.168.1.77/24]")}},
            ["192.168.1.77", "10.1.1.1", "192.168.1.50"],
        ),
        ({"netplan": {CLOUD: NETPLAN.replace("dhcp4: true", "addresses: [192.168.1.50/24]")}}, []),
        (
            {"ifupdown": {"/etc/network/interfaces": STANZAS.replace("1.50/24", "1.77")}},
            ["192.168.1.77", "192.168.1.50"],
        ),
        (
            {
                "networkd": {
                    "/etc/systemd/network/05.network": "[Match]\nName=eth0\n[Network]\nAddress=192.168.1.77/24\n"
                }
            },
            ["192.168.1.77", "192.168.1.50"],
        ),
        (
            {"networkmanager": {"/etc/NetworkManager/system-connections/Wired.nmconnection": WIRED}},
            ["192.168.1.77", "192.168.1.50"],
        ),
    ],
)
def test_it_is_looked_for_where_it_was(files, expected):
    active = ACTIVE if "networkmanager" in files else survey()["active"]
    _, _, back = there_and_back([STATIC], files=files, active=active)
    assert back["addresses"] == expected


def test_a_host_without_ssh_is_looked_for_nowhere_else():
    _, _, back = there_and_back([STATIC], session=None)
    assert back["addresses"] == []


def test_a_name_that_only_our_file_gives_stays():
    wanted = [{**STATIC, "macaddress": ETH0["mac"], "name": "lan0"}]
    _, _, back = there_and_back(wanted, files={"netplan": {CLOUD: NETPLAN}})
    assert back["fault"].startswith(f"lan0 has its present name from {OUR_FILE}")
    named = NETPLAN + f"      match: {{macaddress: '{ETH0['mac']}'}}\n      set-name: eth0\n"
    _, _, back = there_and_back([STATIC], files={"netplan": {CLOUD: named}})
    assert back["fault"] == ""
