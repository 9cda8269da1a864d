"""Names and ids: /etc/hosts, machine-id, and the list of hosts that both are made from."""

import sys
from pathlib import Path

import pytest

from plugins.filter.cluster import (
    ADOPTED_COMMENT,
    SERVICE_HOME_MODE,
    SERVICE_SHELL,
    cluster_hosts,
    host_name_fault,
    init_fault,
    mesh_login_fault,
    next_peers,
    release_fault,
    service_comment,
    service_user_fault,
    service_user_stands,
    shared_home_fault,
    without_root,
)
from plugins.module_utils import managed_block

ROOT = Path(__file__).resolve().parents[2]
HOSTS = [
    {"address": "192.168.1.100", "names": ["node1"]},
    {"address": "192.168.1.101", "names": ["node2", "big"]},
]


@pytest.fixture(scope="module")
def host_identity(load_module):
    load_module("etc_hosts")
    return sys.modules["ansible.module_utils.host_identity"]


def test_the_block_stands_after_the_owners_lines_and_is_written_once(host_identity):
    text, found = host_identity.hosts_file("127.0.0.1\tlocalhost\n# mine\n10.1.1.1 printer", HOSTS)
    assert text.startswith("127.0.0.1\tlocalhost\n# mine\n10.1.1.1 printer\n# BEGIN trainyard")
    assert "192.168.1.100 node1\n192.168.1.101 node2 big\n# END trainyard\n" in text
    assert found == []
    assert host_identity.hosts_file(text, HOSTS) == (text, [])


def test_a_removed_host_leaves_the_block(host_identity):
    text, _ = host_identity.hosts_file("", HOSTS)
    assert "node2" not in host_identity.hosts_file(text, HOSTS[:1])[0]


@pytest.mark.parametrize(
    ("line", "left"),
    [
        ("127.0.1.1 node1", None),
        ("127.0.1.1\tnode1.lan\tnode1", "127.0.1.1 node1.lan"),
        ("127.0.1.1 mybox node2 # set by the installer", "127.0.1.1 mybox  # set by the installer"),
        ("127.0.2.1 node1 node1", None),  # Vagrant's
        ("127.0.1.1 debian", "127.0.1.1 debian"),
        ("127.0.0.1 localhost node1", "127.0.0.1 localhost node1"),
        ("# 127.0.1.1 node1", "# 127.0.1.1 node1"),
        ("", ""),
    ],
)
def test_the_names_of_the_cluster_leave_a_machines_own_loopback_and_nothing_else_does(
    host_identity, line, left
):
    assert host_identity.without_loopback_names(line, {"node1", "node2"}) == left


NAMED = [
    {"name": name, "address": f"192.168.1.10{n}", "names": [name]}
    for n, name in enumerate(("node1", "node2"))
]
DEBIAN = "127.0.0.1\tlocalhost\n127.0.1.1\tnode1.example.com\tnode1\n\n# mine\n::1 localhost\n"


def rewritten(host_identity, text, own="node1", hosts=NAMED):
    """The hosts file of `own` after the role, by the survey's list of hosts; the role once more changes nothing."""
    after, found = host_identity.hosts_file(text, host_identity.with_full_name(hosts, own, text))
    again = host_identity.hosts_file(after, host_identity.with_full_name(hosts, own, after))
    assert again == (after, found) and found == []
    return after


def entries(text):
    """(address, names) of the lines that count."""
    return [
        (line.split()[0], line.split()[1:]) for line in text.splitlines() if line and not line.startswith("#")
    ]


def test_a_machines_full_name_comes_first_at_its_address_and_its_file_comes_back(
    host_identity, load_module, tmp_path
):
    after = rewritten(host_identity, DEBIAN)
    assert entries(after)[2:] == [
        ("192.168.1.100", ["node1.example.com", "node1"]),
        ("192.168.1.101", ["node2"]),
    ]
    assert not any(address == "127.0.1.1" for address, _ in entries(after))
    # Its address changes, a third host comes: it is read of the file that stands.
    more = [{**one, "address": one["address"].replace("1.10", "2.10")} for one in NAMED]
    more.append({"name": "node3", "address": "192.168.2.103", "names": ["node3"]})
    moved = rewritten(host_identity, after, hosts=more)
    assert ("192.168.2.100", ["node1.example.com", "node1"]) in entries(moved)
    made, file = load_module("host_made"), tmp_path / "hosts"
    for text in (after, moved):
        file.write_text(text)
        assert made.without_block(str(file), "node1") == DEBIAN


@pytest.mark.parametrize(
    ("line", "own", "names", "others"),
    [
        ("127.0.1.1 node1.example.com node1 # installer", "node1", ["node1.example.com", "node1"], []),
        ("127.0.1.1 node1.lan node1 box", "node1", ["node1.lan", "node1"], ["box"]),
        ("127.0.1.1 node1.lan", "node1", ["node1.lan", "node1"], []),  # as an earlier release left it
        ("127.0.1.1\tnode1", "node1", ["node1"], []),
        ("127.0.1.1 node1 node1.lan", "node1", ["node1"], ["node1.lan"]),  # its first name is no full one
        ("127.0.1.1 debian.lan debian", "node1", ["node1"], ["debian.lan", "debian"]),  # it gets another name
        ("127.0.1.1 node2.lan node2", "node1", ["node1"], ["node2.lan"]),  # a peer's
        ("# 127.0.1.1 node1.lan node1", "node1", ["node1"], []),
        ("10.0.0.7 node1.lan", "node1", ["node1"], []),
    ],
)
def test_which_name_is_the_full_one(host_identity, load_module, tmp_path, line, own, names, others):
    text = f"127.0.0.1 localhost\n{line}\n"
    after = rewritten(host_identity, text, own)
    found = entries(after)
    assert ("192.168.1.100", names) in found and ("192.168.1.101", ["node2"]) in found
    assert [one for address, all_ in found if address == "127.0.1.1" for one in all_] == others
    file = tmp_path / "hosts"
    file.write_text(after)
    back = load_module("host_made").without_block(str(file), own)
    assert (
        back == text
        if own in line.partition("#")[0].split()
        else (own in back and line.split("\t")[0] in back)
    )


def test_the_look_has_the_hosts_with_the_full_name(load_module, call_main, monkeypatch, host_identity):
    survey, there = load_module("identity_survey"), {}
    monkeypatch.setattr(survey, "read", lambda path: there.get(path, ""))
    monkeypatch.setattr(survey.os.path, "exists", lambda path: False)
    monkeypatch.setattr(survey, "sshd", lambda *_: {})
    monkeypatch.setattr(survey, "own_key", lambda *_: "")
    monkeypatch.setattr(survey, "init", lambda: "none")

    def look(text):
        there["/etc/hosts"] = text
        found = call_main(survey, user="nobody", home="/nowhere", login="root", hosts=NAMED, own="node1")[
            "survey"
        ]
        return found["hosts"][0]["names"], found["hosts_lacking"]

    full = ["node1.example.com", "node1"]
    assert look(DEBIAN) == (full, ["/etc/hosts"])
    assert look(rewritten(host_identity, DEBIAN)) == (full, [])
    assert look(host_identity.hosts_file("", NAMED)[0]) == (["node1"], [])
    tasks = (ROOT / "roles/identity/tasks/main.yml").read_text()
    assert 'hosts: "{{ __identity_survey.survey.hosts }}"\n' in tasks


SHOWN = """\
ActiveState={}
Id=trainyard-etcd.service
NeedDaemonReload={}
UnitFileState={}

ActiveState=active
Id=trainyard-tell.path
NeedDaemonReload=no
UnitFileState=enabled
"""


@pytest.mark.parametrize(
    ("states", "etcd"),
    [
        (("active", "no", "enabled"), True),
        (("activating", "no", "enabled"), False),  # starts again and again
        (("inactive", "no", "enabled"), False),
        (("active", "yes", "enabled"), False),  # its file is another since
        (("active", "no", "disabled"), False),
        (("inactive", "no", ""), False),  # there is none
    ],
)
def test_the_look_knows_the_units_that_need_nothing(load_module, states, etcd):
    units_up = load_module("identity_survey").units_up
    up = [*["trainyard-etcd.service"] * etcd, "trainyard-tell.path"]
    assert units_up(lambda command: (0, SHOWN.format(*states), "")) == up
    assert units_up(lambda command: (1, "", "no bus")) == []


def test_a_domain_of_the_inventorys_own_and_a_name_of_anothers_count_more(host_identity):
    hosts = [
        {"name": "a", "address": "10.0.0.1", "names": ["node1.lab", "a", "node1"]},
        {"name": "node1.lan", "address": "10.0.0.2", "names": ["node1.lan"]},
        {"name": "b", "address": "10.0.0.3", "names": ["node1"]},
    ]
    text = "127.0.1.1 node1.lan node1\n"
    assert host_identity.with_full_name(hosts, "a", text) == hosts
    assert host_identity.with_full_name(hosts, "b", text) == hosts
    assert host_identity.with_full_name(hosts, "c", text) == hosts


def test_a_peer_that_is_gone_gives_no_host_its_name(host_identity):
    """Its line is in the block still, and begins as the host's own name does."""
    host = {"name": "node1", "address": "10.0.0.5", "names": ["node1"]}
    peer = {"name": "gpu", "address": "10.0.0.9", "names": ["node1.gpu"]}
    text, _ = host_identity.hosts_file("127.0.0.1 localhost\n", [host, peer])
    assert "10.0.0.9 node1.gpu" in text
    assert host_identity.with_full_name([host], "node1", text) == [host]


def test_a_line_that_cloud_init_writes_anew_at_boot_is_not_gathered(host_identity, load_module, tmp_path):
    after = rewritten(host_identity, DEBIAN) + "127.0.1.1\tnode1.example.com\tnode1\n"
    again = rewritten(host_identity, after)
    assert again.count("127.0.1.1") == 1
    # From a template with the block the file has no such line at all, and the name all the same.
    template = "127.0.1.1 {{fqdn}} {{hostname}} box\n"
    known = host_identity.with_full_name(NAMED, "node1", DEBIAN)
    written, _ = host_identity.hosts_file(template, known)
    assert (
        written.startswith("127.0.1.1 box\n")
        and "{{" not in written
        and written == host_identity.hosts_file(written, known)[0]
    )
    assert rewritten(host_identity, written) == written


def test_names_that_wsl_would_forget_are_told(host_identity):
    text = "# This file was automatically generated by WSL. To stop automatic generation of this file, add\n"
    assert "generateHosts = false" in host_identity.written_at_start(text, "[boot]\nsystemd=true\n")
    assert host_identity.written_at_start(text, "[network]\n generateHosts=False\n") == ""
    assert host_identity.written_at_start("127.0.0.1 localhost\n", "") == ""


def test_an_owners_line_with_another_address_is_reported(host_identity):
    text, (conflict,) = host_identity.hosts_file(
        "192.168.1.55 node2\n::1 node1\n192.168.1.100 node1\n", HOSTS
    )
    assert "192.168.1.55 node2" in conflict
    assert "192.168.1.101" in conflict
    assert text.startswith("192.168.1.55 node2\n")


def test_a_name_is_the_same_in_capitals(host_identity, load_module, tmp_path):
    """The C library finds Node1 for node1, and an installer may have written that; peers were told 127.0.1.1."""
    text = "127.0.0.1 localhost\n127.0.1.1\tNode1.Example.com Node1 other # mine\n10.9.9.9 NODE2\n"
    after, (conflict,) = host_identity.hosts_file(text, HOSTS)
    kept, ours = after.split("# BEGIN")
    assert "\n# trainyard: 127.0.1.1\tNode1.Example.com Node1 other # mine\n" in kept
    assert "\n127.0.1.1 Node1.Example.com other  # mine\n" in ours and "Node1 " not in ours
    assert conflict == "'10.9.9.9 NODE2'; the cluster has 192.168.1.101 for NODE2"
    assert host_identity.hosts_file(after, HOSTS)[0] == after
    text = text.replace("10.9.9.9 NODE2\n", "")
    after = rewritten(host_identity, text)
    assert "\n192.168.1.100 Node1.Example.com node1\n" in after
    assert rewritten(host_identity, after) == after
    (tmp_path / "hosts").write_text(after)
    assert load_module("host_made").without_block(str(tmp_path / "hosts"), "node1") == text


def test_a_hosts_file_that_is_kept_elsewhere_stays_there(run_module, tmp_path):
    (tmp_path / "kept").write_text("127.0.0.1 localhost\n")
    (tmp_path / "hosts").symlink_to("kept")
    path = str(tmp_path / "hosts")
    assert run_module("etc_hosts", path=path, hosts=HOSTS)["changed"]
    assert not run_module("etc_hosts", path=path, hosts=HOSTS)["changed"]
    assert (tmp_path / "hosts").is_symlink() and "192.168.1.101" in (tmp_path / "kept").read_text()
    made = [{"what": "x", "path": path, "block": True}]
    assert run_module("host_made", made=made, remove=True)["changed"]
    assert (tmp_path / "hosts").is_symlink() and (tmp_path / "kept").read_text() == "127.0.0.1 localhost\n"


def test_strange_bytes_and_line_ends_of_the_owner_survive(tmp_path, host_identity):
    file = tmp_path / "hosts"
    file.write_bytes(b"10.0.0.1 caf\xe9 \x0c\n\n10.0.0.2 x\n")
    text, _ = host_identity.hosts_file(managed_block.read(str(file)), HOSTS)
    assert text.encode(errors="surrogateescape").startswith(b"10.0.0.1 caf\xe9 \x0c\n\n10.0.0.2 x\n# BEGIN")


ENDLESS = "127.0.0.1 localhost\n# BEGIN trainyard: x\n192.168.1.100 node1\n10.1.1.1 printer\n"


def test_a_hosts_file_whose_block_lost_its_end_is_refused_before_a_line_of_the_owners_is_lost(
    load_module, call_main, monkeypatch, run_module, tmp_path
):
    said = "line 2: found '# BEGIN trainyard' without '# END trainyard' below it"
    file = tmp_path / "hosts"
    file.write_text(ENDLESS)
    assert said in run_module("etc_hosts", path=str(file), hosts=HOSTS)["msg"]
    made = [{"what": "x", "path": str(file), "block": True, "own_name": "host"}]
    for remove in (False, True):
        assert said in run_module("host_made", made=made, remove=remove)["msg"]
    assert file.read_text() == ENDLESS
    survey = load_module("identity_survey")
    monkeypatch.setattr(survey, "read", lambda path: ENDLESS if path == "/etc/hosts" else "")
    assert call_main(survey, user="nobody", home="/nowhere", login="root")["msg"].startswith(
        f"/etc/hosts, {said}"
    )
    assert (
        managed_block.endless("x", ENDLESS + "# END trainyard\n") == managed_block.endless("x", "a\n") == ""
    )


def test_a_block_whose_end_was_lost_is_replaced_whole():
    outside, inside = managed_block.split("a\n# BEGIN trainyard: x\nb\nc\n")
    assert (outside, inside) == (["a"], ["b", "c"])
    assert managed_block.join(outside, []) == "a\n"


@pytest.mark.parametrize(
    ("current", "taken", "new"),
    [
        ("a" * 32, [], False),
        ("a" * 32, ["b" * 32], False),
        ("a" * 32, ["a" * 32], True),
        ("", [], True),
        ("uninitialized", [], True),
        ("A" * 32, [], True),
    ],
)
def test_an_id_is_replaced_only_if_it_is_missing_or_taken(host_identity, current, taken, new):
    assert host_identity.needs_new(current, taken) is new


def test_machine_id_on_files(run_module, tmp_path):
    path, dbus = tmp_path / "machine-id", tmp_path / "dbus-machine-id"
    arguments = {"path": str(path), "dbus_path": str(dbus), "taken": ["a" * 32]}
    path.write_text("a" * 32 + "\n")
    dbus.write_text("a" * 32 + "\n")
    result = run_module("machine_id", check=True, **arguments)
    assert result["changed"]
    assert path.read_text() == "a" * 32 + "\n"
    result = run_module("machine_id", **arguments)
    assert result["changed"]
    assert result["previous"] == "a" * 32
    assert path.read_text() == dbus.read_text() == result["machine_id"] + "\n" != "a" * 32 + "\n"
    assert "Reboot" in result["output"]
    assert not run_module("machine_id", **arguments)["changed"]


def test_a_look_says_whether_the_modules_have_anything_to_do(load_module, monkeypatch, tmp_path):
    survey = load_module("identity_survey")
    text, _ = sys.modules["ansible.module_utils.host_identity"].hosts_file("127.0.0.1 localhost\n", HOSTS)
    for found, stands in (
        (text, True),
        (text.replace("node2", "node3"), False),
        (f"10.9.9.9 node1\n{text}", False),
    ):
        file, template = tmp_path / "hosts", tmp_path / "hosts.debian.tmpl"
        file.write_text(found)
        template.unlink(missing_ok=True)
        lacking = [] if stands else [str(file)]
        assert survey.hosts_lacking(HOSTS, str(file), str(template)) == lacking
        template.write_text("127.0.0.1 localhost\n")
        assert survey.hosts_lacking(HOSTS, str(file), str(template)) == [*lacking, str(template)]


def test_what_cloud_init_writes_at_boot_has_the_block_and_gets_its_own_line_back(load_module, tmp_path):
    """As on Proxmox, whose user-data has cloud-init write /etc/hosts anew at each boot."""
    made, template = load_module("host_made"), tmp_path / "hosts.debian.tmpl"
    stock = "## template:jinja\n127.0.0.1 localhost\n127.0.1.1 {{fqdn}} {{hostname}}\n::1 localhost\n"
    text, _ = sys.modules["ansible.module_utils.host_identity"].hosts_file(stock, HOSTS)
    assert "127.0.1.1" not in text and text.startswith("## template:jinja\n")
    assert "192.168.1.100 node1\n" in text
    template.write_text(text)
    line = "127.0.0.1 localhost\n127.0.1.1 {{fqdn}} {{hostname}}\n"
    back = made.without_block(str(template), made.own_name("template"))
    assert back == stock and line in back
    template.write_text(stock)
    assert made.without_block(str(template), made.own_name("template")) == stock


def test_hosts_have_their_names_the_canonical_one_first():
    hostvars = {
        "node1": {"ansible_host": "192.168.1.100"},
        "node2": {"ansible_host": "gate", "cluster_address": "10.0.0.2", "identity_hostname": "big.lan"},
    }
    assert cluster_hosts(hostvars, hostvars) == [
        {"name": "node1", "address": "192.168.1.100", "names": ["node1"]},
        {"name": "node2", "address": "10.0.0.2", "names": ["big.lan", "node2", "big"]},
    ]


def test_a_short_name_that_two_hosts_would_have_is_nobodys():
    hostvars = {name: {"ansible_host": "x"} for name in ("a.one", "a.two", "b.two")}
    assert [host["names"] for host in cluster_hosts(hostvars, hostvars)] == [
        ["a.one"],
        ["a.two"],
        ["b.two", "b"],
    ]


def test_each_host_begins_with_itself_and_all_are_asked_equally_often():
    peers = [f"n{i}" for i in range(20)]
    rounds = [next_peers(peers, peer) for peer in peers]
    assert [asked[0] for asked in rounds] == peers
    assert {len(asked) for asked in rounds} == {16}
    assert {sum(peer in asked for asked in rounds) for peer in peers} == {16}


HOME = "/var/lib/trainyard"


def account(uid, home=HOME, comment="", shell="/bin/bash"):
    return {"uid": uid, "gid": uid, "comment": comment, "home": home, "shell": shell}


def place(owner, uid=0, directory=True, mode="0750", holds=""):
    return {"directory": directory, "owner": owner, "uid": uid, "gid": uid, "mode": mode, "holds": holds}


@pytest.mark.parametrize(
    ("entry", "home", "words"),
    [
        (None, None, ""),
        (None, place("root"), ""),  # made by hand, or a disk's
        (account(998), place("trainyard", 998), ""),
        (account(998, "/elsewhere", "Trainyard"), None, ""),  # trainer_state_dir has changed since
        # It would be taken over, and be gone after a reset.
        (None, place("root", holds="models, data"), "a directory with models, data in it already"),
        (account(998), place("trainyard", 998, holds=".ssh"), "a directory with .ssh in it already"),
        (account(998, comment="Trainyard"), place("root", holds="models"), "with models in it already"),
        (account(998, comment="Trainyard"), place("trainyard", 998, holds="runs, …"), ""),
        (account(998, comment=ADOPTED_COMMENT), place("trainyard", 998, holds="runs, …"), ""),
        (account(0, "/root"), None, "uid 0"),
        (account(1000, "/home/me/x"), None, "uid 1000, home /home/me/x"),
        (account(1000), place("trainyard", 1000), "uid 1000"),  # a person, with the home named, too
        (account(65534), None, "uid 65534"),
        (account(33, "/var/www"), None, "uid 33, home /var/www"),  # another service's
        (None, place("anna", 1000), "is anna's on"),
        (account(997), place("998", 998), "is 998's on"),
        (None, place("root", directory=False), "no directory"),
    ],
)
def test_only_a_user_of_the_trainers_own_is_made_the_service_user(entry, home, words):
    fault = service_user_fault({"account": entry, "place": home}, "trainyard", HOME)
    assert words in fault and bool(fault) == bool(words)
    if fault:
        assert fault.startswith(("trainer_user: found", "trainer_state_dir: found")) and "expected" in fault


def test_a_home_whose_user_was_deleted_is_not_taken_from_it_but_given_back():
    fault = service_user_fault({"account": None, "place": place("998", 998)}, "trainyard", HOME)
    assert "is 998's, a user's that is no more, on this host" in fault
    assert (
        "groupadd --force --system --gid 998 trainyard; useradd --system --uid 998 --gid trainyard" in fault
    )


def test_hosts_that_have_one_home_are_refused_and_named():
    def seen(disk):
        return {"__identity_survey": {"survey": {"disk": disk}}}

    hostvars = {
        "node1": seen("s:/x/trainyard"),
        "node2": seen(""),
        "node3": seen("s:/x/trainyard"),
        "node4": {},
    }
    fault = shared_home_fault(hostvars, list(hostvars), HOME)
    assert f"found {HOME}, which is s:/x/trainyard on node1, node3; expected" in fault
    assert shared_home_fault(hostvars | {"node3": seen("s:/x/node3")}, list(hostvars), HOME) == ""


MADE = {
    "account": account(998, comment="Trainyard"),
    "group": 998,
    "login_lacks": [],
    "place": place("trainyard", 998),
}


def test_the_user_that_the_role_made_stands():
    assert service_user_stands(MADE, HOME)


def test_one_that_was_made_by_hand_stands_once_it_is_marked_and_is_left_by_a_reset(load_module, monkeypatch):
    assert service_comment(None) == service_comment(account(998, comment="Trainyard")) == "Trainyard"
    mark = service_comment(account(998, comment="llm of ours"))
    assert mark == service_comment(account(998, comment=mark)) == ADOPTED_COMMENT
    assert service_user_stands(MADE | {"account": account(998, comment=mark)}, HOME)
    made = load_module("host_made")
    for comment, ours in (("Trainyard", True), (mark, False)):
        entry = made.pwd.struct_passwd(("trainyard", "x", 998, 998, comment, HOME, "/bin/bash"))
        monkeypatch.setattr(made.pwd, "getpwnam", lambda name, entry=entry: entry)
        assert (made.account_of("trainyard") is not None) == ours


def test_what_a_directory_holds_but_for_what_is_new(load_module, tmp_path):
    survey = load_module("identity_survey")
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "models").mkdir()
    (tmp_path / "runs/lost+found").mkdir(parents=True)
    (tmp_path / ".bashrc").write_text("")
    assert survey.place(str(tmp_path))["holds"] == ""
    (tmp_path / "models/llama").mkdir()
    (tmp_path / "a").write_text("")
    assert survey.place(str(tmp_path))["holds"] == "a, models"
    (tmp_path / "z").symlink_to("/")
    assert survey.place(str(tmp_path))["holds"] == "a, models, …"


@pytest.mark.parametrize(
    "change",
    [
        {"account": None},
        {"account": account(998)},  # another's comment
        {"account": account(998, "/elsewhere", "Trainyard")},
        {"account": account(998, comment="Trainyard", shell="/usr/sbin/nologin")},
        {"group": None},
        {"group": 997},
        {"login_lacks": ["systemd-journal"]},
        {"place": None},
        {"place": place("root")},
        {"place": place("trainyard", 998, mode="0755")},
        {"place": place("trainyard", 998, directory=False)},
    ],
)
def test_whatever_differs_is_made_anew(change):
    assert not service_user_stands(MADE | change, HOME)


def test_what_the_role_makes_is_what_it_takes_for_made():
    tasks = (ROOT / "roles/identity/tasks/make_service_user.yml").read_text()
    assert 'comment: "{{ __identity_survey.survey.account | service_comment }}"\n' in tasks
    assert f"shell: {SERVICE_SHELL} " in tasks
    assert f'mode: "{SERVICE_HOME_MODE}"\n' in tasks
    assert "update_password: on_create" in tasks


def test_a_look_at_a_host_tells_what_is_there(load_module, tmp_path):
    """On this very machine, where root and its group are."""
    survey = load_module("identity_survey")
    assert survey.account("root")["uid"] == 0 and survey.account("no-such-user") is None
    assert survey.group_of("root") == 0 and survey.group_of("no-such-group") is None
    # root may anyway; nobody is in its own group as its first, and in no other.
    assert not survey.lacks("root", "nogroup") and not survey.lacks("nobody", "nogroup")
    assert survey.lacks("nobody", "root") and not survey.lacks("nobody", "no-such-group")
    here = tmp_path.stat()
    tmp_path.chmod(0o750)
    assert survey.place(str(tmp_path)) == {
        "directory": True,
        "owner": tmp_path.owner(),
        "uid": here.st_uid,
        "gid": here.st_gid,
        "mode": "0750",
        "holds": "",
    }
    (tmp_path / "link").symlink_to(tmp_path)
    assert survey.place(str(tmp_path / "link"))["directory"] is False
    assert survey.place(str(tmp_path / "nothing")) is None


@pytest.mark.parametrize(
    ("system", "version", "refused"),
    [
        ("Debian", "12.8", False),
        ("Debian", "13", False),
        ("Debian", "trixie/sid", False),
        ("Ubuntu", "22.04", False),
        ("Ubuntu", "26.04", False),
        ("Linux Mint", "21.3", False),
        (None, None, False),
        ("Debian", "11.9", True),
        ("Ubuntu", "20.04", True),  # a Jetson's JetPack 5, DGX OS 5
        ("Ubuntu", "9.10", True),
    ],
)
def test_a_release_that_is_too_old_is_refused(system, version, refused):
    fault = release_fault({"distribution": system, "distribution_version": version})
    assert (f"found {system} {version}; expected Debian 12 or later" in fault) if refused else fault == ""


@pytest.mark.parametrize(
    ("reason", "cure"),
    [
        ("Task failed: Missing sudo password", "-K asks for it) or without. Nothing was changed."),
        # Where Debian's installer was given a password for root, there is no sudo.
        (
            "Premature end of stream waiting for become success.\n/bin/sh: 1: sudo: not found",
            "adduser ops sudo",
        ),
        ("ops is not in the sudoers file.", "adduser ops sudo"),
        ("sudo: sorry, you must have a tty to run sudo", "Defaults:ops !requiretty"),
    ],
)
def test_who_cannot_become_root_is_told_what_helps(reason, cure):
    said = without_root(reason, "node1", "ops")
    assert said.startswith("node1: ops cannot become root there (") and cure in said


def test_a_machine_without_systemd_is_refused_at_the_first_look(load_module, tmp_path):
    survey = load_module("identity_survey")
    for name, text in (("proc/1/comm", "init(Ubuntu)\n"), ("run/systemd/notify", "")):  # WSL, as it comes
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    fault = init_fault({"init": survey.init(f"{tmp_path}/")})
    assert "found init(Ubuntu) as the first process; expected systemd" in fault and "/etc/wsl.conf" in fault
    (tmp_path / "run/systemd/system").mkdir()
    assert init_fault({"init": survey.init(f"{tmp_path}/")}) == ""


def test_a_machine_that_others_know_by_its_name_keeps_it(load_module, tmp_path):
    """A kubelet or slurmd that starts again under another host name is no node of its cluster any more."""
    survey = load_module("identity_survey")
    for pid, name, space in (
        ("self", "python3", 1),
        ("10", "kubelet", 1),
        ("11", "slurmd", 1),
        ("12", "pmxcfs", 2),  # in a container, as kind's kubelet is
        ("13", "sshd", 1),
        ("14", "ceph-osd", 1),
    ):
        (tmp_path / pid / "ns").mkdir(parents=True)
        (tmp_path / pid / "comm").write_text(f"{name}\n")
        (tmp_path / pid / "ns/pid").symlink_to(f"pid:[{space}]")
        # With ProtectHostname a service has names of its own, which are the machine's.
        (tmp_path / pid / "ns/uts").symlink_to(f"uts:[{pid}]")
    found = survey.named_by(str(tmp_path))
    assert found == ["Ceph (ceph-osd)", "Kubernetes (kubelet)", "Slurm (slurmd)"]
    found = found[1:]
    fault = host_name_fault({"host_names": ["gpu07", "gpu07"], "named_by": found}, "node1")
    assert "found node1 for a machine that Kubernetes (kubelet) and Slurm (slurmd) knows as gpu07" in fault
    assert "Set identity_hostname: gpu07 for this host" in fault
    assert host_name_fault({"host_names": ["gpu07", "gpu07"], "named_by": found}, "gpu07") == ""
    # Slurm takes such a name, the inventory does not.
    fault = host_name_fault({"host_names": ["gpu_07"] * 2, "named_by": ["Slurm (slurmd)"]}, "gpu-07")
    assert (
        "gpu_07 can be no host's name here (an underscore)" in fault and "Set identity_hostname" not in fault
    )
    assert "sudo hostnamectl set-hostname gpu-07" in fault
    assert host_name_fault({"host_names": ["gpu07", "gpu07"], "named_by": []}, "node1") == ""


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"allowusers": ["admin"]}, "AllowUsers: found admin, by which trainyard"),
        ({"allowusers": ["admin", "train*"]}, ""),
        ({"allowusers": ["trainyard@10.0.0.0/8"]}, ""),  # sshd's own matter
        ({"allowusers": ["admin@10.0.0.0/8"]}, "AllowUsers: found admin@10.0.0.0/8"),
        ({"allowusers": ["admin", "root@10.0.0.*"]}, "AllowUsers: found admin root@10.0.0.*"),
        ({"allowusers": ["*", "!trainyard"]}, "AllowUsers"),
        ({"allowusers": ["train[xy]ard"]}, "AllowUsers"),
        ({"allowusers": ["train??rd"]}, ""),
        ({"allowgroups": ["sudo", "ssh"]}, "AllowGroups: found sudo ssh"),
        ({"allowgroups": ["trainyard"]}, ""),
        ({"allowgroups": ["trainyard@corp.example"]}, "AllowGroups"),
        ({"denyusers": ["trainyard"]}, "expected none that is trainyard"),
        ({"denyusers": ["!trainyard", "*"]}, "DenyUsers: found !trainyard *"),  # it knows no "!" there
        ({"denyusers": ["trainyard@10.9.*", "!root"]}, ""),
        ({"denygroups": ["other"]}, ""),
        ({"pubkeyauthentication": ["no"]}, "PubkeyAuthentication: found no"),
        ({"authenticationmethods": ["publickey,keyboard-interactive"]}, "AuthenticationMethods"),
        ({"authenticationmethods": ["publickey,password", "publickey"]}, ""),
        ({"authenticationmethods": ["any"]}, ""),
        ({"authorizedkeysfile": ["/etc/ssh/keys/%u"]}, "expected .ssh/authorized_keys among them"),
        ({"authorizedkeysfile": [".ssh/authorized_keys", ".ssh/authorized_keys2"]}, ""),
        ({"authorizedkeysfile": ["/home/%u/.ssh/authorized_keys"]}, "AuthorizedKeysFile"),
        ({"authorizedkeysfile": ["/etc/ssh/keys/%u", "%h//.ssh/authorized_keys"]}, ""),
        ({"authorizedkeysfile": ["none"]}, "AuthorizedKeysFile: found none"),
        ({"pubkeyacceptedalgorithms": ["rsa-sha2-512,ssh-ed25519"]}, ""),
        ({"pubkeyacceptedalgorithms": ["rsa-sha2-512,rsa-sha2-256"]}, "expected ssh-ed25519 among them"),
        (
            {"forcecommand": ["internal-sftp", "-l", "VERBOSE"]},
            "ForceCommand: found internal-sftp -l VERBOSE",
        ),
        ({"forcecommand": ["/usr/sbin/nologin"]}, "ForceCommand"),
        ({"forcecommand": ["/usr/local/bin/log-it"], "chrootdirectory": ["none"]}, ""),
        ({"forcecommand": ["none"]}, ""),
        ({"chrootdirectory": ["/srv/sftp"]}, "ChrootDirectory: found /srv/sftp"),
        ({}, ""),
    ],
)
def test_an_sshd_that_would_not_let_the_other_hosts_in_is_told_before_any_change(settings, said):
    fault = mesh_login_fault({"sshd": settings, "groups": []}, "trainyard", HOME)
    assert (said in fault and "Match User trainyard" in fault) if said else fault == ""


def test_a_service_user_that_was_put_into_the_group_of_those_who_log_in_gets_in():
    survey = {"sshd": {"allowgroups": ["ssh"]}, "groups": ["trainyard", "ssh"]}
    assert mesh_login_fault(survey, "trainyard", HOME) == ""
    assert "DenyGroups" in mesh_login_fault(survey | {"sshd": {"denygroups": ["ssh"]}}, "trainyard", HOME)


def test_sshds_settings_are_read_as_it_tells_them(load_module, monkeypatch):
    text = (
        "port 22\n\nallowusers admin\nallowusers root\nauthenticationmethods any\npubkeyauthentication yes\n"
    )
    asked = []

    class Module:
        def get_bin_path(self, name, opt_dirs=()):
            return f"/usr/sbin/{name}"

        def run_command(self, command):
            asked.append(command)
            return 0, text, ""

    hosts = [{"name": "a", "address": "192.0.2.1"}, {"name": "b", "address": "192.0.2.2"}]
    survey = load_module("identity_survey")
    monkeypatch.setattr(survey, "ssh_session", lambda: None)
    found = survey.sshd(Module(), "trainyard", hosts)
    assert found == {
        "allowusers": ["admin", "root"],
        "authenticationmethods": ["any"],
        "pubkeyauthentication": ["yes"],
    }
    # Whole: with `Match LocalPort` in its file sshd would else tell nothing.
    came = "user=trainyard,host=192.0.2.2,addr=192.0.2.2,laddr={},lport={}"
    assert asked == [["/usr/sbin/sshd", "-T", "-C", came.format("127.0.0.1", 22)]]
    assert survey.sshd(Module(), "trainyard", hosts[:1]) == {}
    monkeypatch.setattr(survey, "ssh_session", lambda: {"port": 2222})
    survey.sshd(Module(), "trainyard", hosts, "a")
    assert asked[1:] == [["/usr/sbin/sshd", "-T", "-C", came.format("192.0.2.1", 2222)]]
