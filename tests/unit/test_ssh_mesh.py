"""The mesh's files: who is let in, whose host key is pinned, and what a run over some hosts leaves alone."""

import base64
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from ansible.errors import AnsibleFilterError

from plugins.filter import cluster

ROOT = Path(__file__).resolve().parents[2]
HOSTS = [
    {"name": "node1", "address": "10.0.0.1", "names": ["node1"]},
    {"name": "node2", "address": "10.0.0.2", "names": ["big.lan", "node2"]},
]


def facts(port="22", **keys):
    found = {"env": {"SSH_CONNECTION": f"10.0.0.9 50000 10.0.0.1 {port}"}}
    for kind, key in keys.items():
        found[f"ssh_host_key_{kind}_public"] = key
        found[f"ssh_host_key_{kind}_public_keytype"] = f"ssh-{kind}"
    return {"ansible_facts": found}


def test_a_key_is_good_from_its_own_host_and_for_commands_alone():
    lines = cluster.peer_authorized_keys(HOSTS, {"node1": "ssh-ed25519 AAAA old comment", "node2": ""})
    assert lines == {"node1": ['from="10.0.0.1",restrict ssh-ed25519 AAAA trainyard@node1']}


def test_a_key_that_was_found_or_made_is_the_hosts():
    seen = {"__identity_survey": {"survey": {"public_key": "ssh-ed25519 OLD"}}}
    made = {
        "__identity_survey": {"survey": {"public_key": ""}},
        "__ssh_mesh_key": {"public_key": "ssh-ed25519 NEW"},
    }
    skipped = {**seen, "__ssh_mesh_key": {"skipped": True}}
    hostvars = {"node1": seen, "node2": made, "node3": skipped, "node4": {}}
    assert cluster.mesh_keys(hostvars, hostvars, "later") == {
        "node1": "ssh-ed25519 OLD",
        "node2": "ssh-ed25519 NEW",
        "node3": "ssh-ed25519 OLD",
        "node4": "later",
    }


def test_the_memory_of_runs_begins_anew_with_another_machine_or_other_members():
    members = [{"name": "node1", "address": "10.0.0.1"}, {"name": "node2", "address": "10.0.0.2"}]
    hostvars = {name: {"__identity_survey": {"survey": {"machine_id": name}}} for name in ("node1", "node2")}
    token = cluster.etcd_token(members, hostvars, 2390)
    assert len(token) == 12 and token == cluster.etcd_token(members, hostvars, 2390)
    anew = {**hostvars, "node2": {**hostvars["node2"], "__identity_machine": {"machine_id": "new"}}}
    others = [{**members[0], "address": "10.0.0.9"}, members[1]]
    asked = [
        (members, anew, 2390),
        (members[:1], hostvars, 2390),
        (others, hostvars, 2390),
        (members, hostvars, 1),
    ]
    assert len({token, *(cluster.etcd_token(*one) for one in asked)}) == 5


NAMES = ("node1", "node2", "node3")
MEMBERS = [{"name": name, "address": f"10.0.0.{name[4:]}"} for name in NAMES]
WELL = {"content": '{"health":"true","reason":""}', "status": 200, "msg": "OK (29 bytes)"}
GONE = {
    "content": "",
    "status": -1,
    "msg": "Status code was -1 and not [200]: Request failed: <urlopen error [Errno 111] Connection refused>",
}
ALONE = {"content": '{"health":"false"}\n', "status": 503, "msg": "Status code was 503 and not [200]"}
TOKEN = cluster.etcd_token(
    MEMBERS, {name: {"__identity_survey": {"survey": {"machine_id": name}}} for name in NAMES}, 1
)


def member(name, token=TOKEN, well=WELL):
    """What a member's host said, with a unit of that token; "": it has none."""
    unit = (
        f"ExecStart=/usr/bin/etcd --initial-cluster-token={token} --initial-cluster-state=new \\\n"
        if token
        else ""
    )
    survey = {"survey": {"machine_id": name, "etcd_unit": unit}}
    return {"__identity_survey": survey, "__etcd_well": well}


def hosts(**said):
    return {name: said.get(name) or member(name) for name in NAMES}


@pytest.mark.parametrize(
    ("said", "lost"),
    [
        ({}, {}),
        # It was reset: its machine is the same, and so is the others' token, but etcd refuses it as who it was.
        ({"node2": member("node2", "", {"skipped": True})}, {"node2": "it is not set up there"}),
        # A power cut, a bad sector: its unit is as it is wanted.
        ({"node3": member("node3", well=GONE)}, {"node3": "<urlopen error [Errno 111] Connection refused>"}),
        # They have no majority any more.
        (
            {
                "node1": member("node1", well=ALONE),
                "node2": member("node2", ""),
                "node3": member("node3", well=GONE),
            },
            {
                "node1": '{"health":"false"}',
                "node2": "it is not set up there",
                "node3": "<urlopen error [Errno 111] Connection refused>",
            },
        ),
        # Nobody has been set up, or all are by other members: they begin anew in any case.
        ({name: member(name, "", {"skipped": True}) for name in NAMES}, {}),
        ({name: member(name, "0123456789ab", {"skipped": True}) for name in NAMES}, {}),
        # The last time began anew on one of them alone, and was cut short.
        (
            {
                "node1": member("node1", f"{TOKEN}-20261126100000"),
                "node3": member("node3", f"{TOKEN}-20261125100000"),
            },
            {"node2": "it is not set up there", "node3": "it is not set up there"},
        ),
        # -l node2,node3: what is wanted is not known, but who is not well says so.
        ({"node1": {}}, {}),
        ({"node1": {}, "node2": member("node2", "")}, {}),
        (
            {"node1": {}, "node3": member("node3", well=GONE)},
            {"node3": "<urlopen error [Errno 111] Connection refused>"},
        ),
    ],
)
def test_a_member_that_has_lost_its_part_of_the_memory_is_found(said, lost):
    assert cluster.etcd_lost(MEMBERS, {**hosts(), **said}, 1) == lost


def test_members_that_began_anew_stay_as_they_are_then():
    began = cluster.etcd_token(MEMBERS, hosts(), 1, "20261126100000")
    assert began == f"{TOKEN}-20261126100000"
    assert cluster.etcd_token(MEMBERS, hosts(), 1) == TOKEN
    again = {name: member(name, began) for name in NAMES}
    assert cluster.etcd_token(MEMBERS, again, 1) == began and cluster.etcd_lost(MEMBERS, again, 1) == {}
    later = {**again, "node2": member("node2", f"{TOKEN}-20261127100000")}
    assert cluster.etcd_token(MEMBERS, later, 1) == f"{TOKEN}-20261127100000"
    anew = {**again, "node3": {**again["node3"], "__identity_machine": {"machine_id": "new"}}}
    other = cluster.etcd_token(MEMBERS, anew, 1)
    assert not other.startswith(TOKEN) and "-" not in other


def test_what_is_said_of_a_member_that_has_lost_its_part():
    lost = {"node2": "refused"}
    told = cluster.etcd_lost_text(lost, list(NAMES), True, False)
    assert told.endswith("is not well on node2 (refused). All its members begin anew: no run lives by them.")
    told = cluster.etcd_lost_text(lost, list(NAMES), True, True)
    assert told.startswith("WARNING: ") and "site.yml again once no run is active" in told
    assert told.endswith("Until then fewer hosts may be lost.")
    told = cluster.etcd_lost_text({**lost, "node3": "refused"}, list(NAMES), False, False)
    assert (
        told.startswith("WARNING: ")
        and "without -l, or for all its members at once: node1, node2, node3." in told
    )
    assert told.endswith("Until then no run goes on.")


def test_each_member_is_asked_itself_however_its_unit_looks():
    """The neighbour's word says nothing of it: two of three suffice for that one to be well."""
    tasks = yaml.safe_load((ROOT / "roles/etcd/tasks/main.yml").read_text())
    (asked,) = [task for task in tasks if task.get("register") == "__etcd_well"]
    assert (
        asked["ansible.builtin.uri"]["url"] == "{{ _etcd_url }}/health"
        and "_etcd_differs" not in asked["when"]
    )
    member = yaml.safe_load((ROOT / "roles/etcd/tasks/member.yml").read_text())
    (asked,) = [task for task in member if task.get("register") == "__etcd_health"]
    assert asked["loop"] == "{{ [_etcd_address, _etcd_asked.address] | unique }}"


def keys(*names):
    return {"json": {"kvs": [{"key": base64.b64encode(name.encode()).decode()} for name in names]}}


@pytest.mark.parametrize(
    ("kept", "runs"),
    [
        ({}, []),  # not asked, as a host is not that was no member
        ({"status": -1, "msg": "timed out"}, []),  # its majority is lost
        ({"json": {"header": {}}}, []),
        (keys("/trainyard/first/plan", "/trainyard/first/end", "/else"), []),
        (
            keys("/trainyard/b/plan", "/trainyard/b/hosts/1", "/trainyard/a.1.20261125T153246389618/hosts/0"),
            ["a.1", "b"],
        ),
    ],
)
def test_a_run_lives_by_the_memory_where_it_has_its_hosts_records(kept, runs):
    assert cluster.etcd_runs_of(["node1", "node2"], {"node1": {}, "node2": {"__etcd_kept": kept}}) == runs


@pytest.mark.parametrize(
    ("answer", "path"),
    [
        ({"json": {"etcdserver": "3.3.25", "etcdcluster": "3.3.0"}}, "v3beta"),  # Ubuntu 22.04's
        ({"json": {"etcdserver": "3.4.30", "etcdcluster": "3.4.0"}}, "v3"),
        ({"json": {"etcdserver": "3.30.1", "etcdcluster": "3.30.0"}}, "v3"),
        ({"status": -1, "msg": "timed out"}, "v3"),
    ],
)
def test_the_memory_of_runs_is_asked_where_its_release_answers(answer, path):
    from ansible.parsing.dataloader import DataLoader
    from ansible.template import Templar, trust_as_template

    words = yaml.safe_load((ROOT / "roles/etcd/vars/main.yml").read_text())["_etcd_api"]
    variables = {"__etcd_version": answer}
    assert Templar(loader=DataLoader(), variables=variables).template(trust_as_template(words)) == path
    (asked,) = [
        task["ansible.builtin.uri"]["url"]
        for task in yaml.safe_load((ROOT / "roles/etcd/tasks/as_it_is.yml").read_text())
        if task.get("register") == "__etcd_kept"
    ]
    assert asked == "{{ _etcd_url }}/{{ _etcd_api }}/kv/range"


def test_host_keys_are_pinned_under_every_name_and_address():
    hostvars = {"node1": facts(ed25519="E", rsa="R"), "node2": {}}
    assert cluster.peer_known_hosts(HOSTS, hostvars) == {
        "node1": [
            "node1,10.0.0.1 ssh-ed25519 E trainyard@node1",
            "node1,10.0.0.1 ssh-rsa R trainyard@node1",
        ]
    }


def test_another_port_is_pinned_and_told_to_ssh(tmp_path):
    hostvars = {"node1": facts("2222", ed25519="E"), "node2": facts(ed25519="F")}
    lines = cluster.peer_known_hosts(HOSTS, hostvars)
    assert lines["node1"] == ["[node1]:2222,[10.0.0.1]:2222 ssh-ed25519 E trainyard@node1"]
    ports = cluster.peer_ssh_ports(HOSTS, hostvars)
    assert {name: len(those) for name, those in ports.items()} == {"node1": 2, "node2": 0}
    file = tmp_path / "config"
    file.write_text("\n".join(ports["node1"]) + "\n")
    for name, port in {"node1": "2222", "10.0.0.1": "2222", "node2": "22"}.items():
        settings = subprocess.run(
            ["ssh", "-G", "-F", str(file), name], check=True, capture_output=True, text=True
        ).stdout
        assert f"\nport {port}\n" in f"\n{settings}"


def test_a_port_that_is_22_again_is_forgotten_and_that_of_a_host_not_asked_is_not(load_module):
    before = cluster.peer_ssh_ports(HOSTS, {"node1": facts("2222"), "node2": facts("2222")})
    old = [line for lines in before.values() for line in lines]
    now = cluster.peer_ssh_ports(HOSTS, {"node1": facts("22"), "node2": {}})
    assert load_module("peer_lines").merge(old, now, ["node1", "node2"]) == before["node2"]


UNKNOWN = "UNKNOWN 65535 UNKNOWN 65535"  # sshd's words for one by AF_VSOCK, or from inetd on a socket of this host's


@pytest.mark.parametrize(
    "connection",
    [{}, {"env": {}}, {"env": {"SSH_CONNECTION": ""}}, {"env": None}, {"env": {"SSH_CONNECTION": UNKNOWN}}],
)
def test_without_a_connection_by_ssh_the_port_is_22(connection):
    assert cluster.ssh_port({"ansible_facts": connection}) == 22
    assert cluster.ssh_port({}) == 22


def line(peer, key="K"):
    return f"restrict ssh-ed25519 {key} trainyard@{peer}"


def test_lines_of_peers_that_this_run_did_not_ask_stay(load_module):
    merge = load_module("peer_lines").merge
    old = [line("node1", "old"), line("node2", "old"), line("node22", "old"), line("gone", "old")]
    new = merge(old, {"node1": [line("node1", "new")]}, ["node1", "node2", "node22", "node3"])
    assert new == [line("node1", "new"), line("node2", "old"), line("node22", "old")]


@pytest.mark.parametrize("end", ["# END trainyard\n", ""])
def test_a_key_that_its_owner_wrote_into_the_block_stays(run_module, load_module, tmp_path, end):
    """An editor may have taken the block's end, and every line after it was ours then: the owner's way in, too."""
    path = tmp_path / "authorized_keys"
    mine = "ssh-ed25519 MINE me@laptop\n"
    path.write_text(f"# BEGIN trainyard: x\n{line('node1', 'old')}\n\n{mine}{end}")
    have = {"path": str(path), "lines": {"node1": [line("node1", "new")]}, "mode": "0600"}
    assert run_module("peer_lines", files=[have], keep=["node1"])["changed"]
    ours = f"# BEGIN trainyard: written by the role ssh_mesh\n{line('node1', 'new')}\n# END trainyard\n"
    assert path.read_text() == f"{mine}{ours}"
    assert not run_module("peer_lines", files=[have], keep=["node1"])["changed"]
    path.write_text(f"# BEGIN trainyard\n{line('node1')}\n{mine}{end}")
    assert load_module("host_made").without_block(str(path), "") == mine


@pytest.mark.parametrize("after", [" ", "\t", " \r"])
def test_a_removed_peers_key_goes_with_white_space_after_it_too(run_module, load_module, tmp_path, after):
    """As an editor leaves it: the line was the owner's then, and let the peer in for good."""
    path = tmp_path / "authorized_keys"
    mine = "ssh-ed25519 MINE me-trainyard@laptop\n"
    block = [line("node1", "old"), line("gone"), line("node2"), mine.removesuffix("\n")]
    path.write_text("".join(f"{one}{after}\n" for one in ["# BEGIN trainyard", *block, "# END trainyard"]))
    have = {"path": str(path), "lines": {"node1": [line("node1", "new")]}, "mode": "0600"}
    assert run_module("peer_lines", files=[have], keep=["node1", "node2"])["changed"]
    text = path.read_text()
    assert "trainyard@gone" not in text and " old " not in text and text.count("trainyard@node2") == 1
    assert text.startswith(mine.removesuffix("\n"))
    path.write_text(f"# BEGIN trainyard\n{line('node1')}{after}\n# END trainyard\n")
    assert load_module("host_made").without_block(str(path), "") == ""


def test_a_file_that_its_owner_keeps_elsewhere_stays_there(run_module, tmp_path):
    """As somebody has his files in a repository; the link was replaced, and the repository's file forgotten."""
    kept, home = tmp_path / "dotfiles", tmp_path / "home/.ssh"
    kept.mkdir(mode=0o755)
    home.mkdir(parents=True)
    (kept / "keys").write_text("ssh-ed25519 MINE me@laptop\n")
    (home / "authorized_keys").symlink_to("../../dotfiles/keys")
    lines = {"controller": ["ssh-ed25519 K trainyard@controller"]}
    have = {"path": str(home / "authorized_keys"), "lines": lines, "mode": "0600", "directory_mode": "0700"}
    assert run_module("peer_lines", files=[have], keep=["controller"])["changed"]
    assert not run_module("peer_lines", files=[have], keep=["controller"])["changed"]
    assert (home / "authorized_keys").is_symlink() and not (kept / "keys").is_symlink()
    text = (kept / "keys").read_text()
    assert text.startswith("ssh-ed25519 MINE me@laptop\n# BEGIN") and "trainyard@controller" in text
    assert (kept.stat().st_mode & 0o777, home.stat().st_mode & 0o777) == (0o755, 0o700)


def test_peer_lines_on_files(run_module, tmp_path):
    path = tmp_path / ".ssh" / "authorized_keys"
    arguments = {
        "path": str(path),
        "lines": {"node1": [line("node1")]},
        "mode": "0600",
        "directory_mode": "0700",
    }

    def have(**more):
        return run_module("peer_lines", files=[arguments], keep=["node1", "node2"], **more)

    assert have(check=True)["changed"]
    assert not path.parent.exists()
    assert have()["changed"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert not have()["changed"]

    path.write_text("ssh-ed25519 MINE me@laptop\n" + path.read_text())
    path.chmod(0o644)
    arguments["lines"] = {"node2": [line("node2")]}
    result = have()
    assert result["changed"]
    text = path.read_text()
    assert text.startswith("ssh-ed25519 MINE me@laptop\n")
    assert line("node1") in text
    assert line("node2") in text
    assert path.stat().st_mode & 0o777 == 0o600
    assert not have()["changed"]


def test_a_login_that_fails_is_told_with_the_peer_and_ssh_s_words(load_module, monkeypatch, tmp_path):
    """The real module with a `runuser` that answers for every peer in its own way."""
    fake = tmp_path / "runuser"
    fake.write_text(
        "#!/bin/sh\nfor word; do case $word in\n  good) exit 0;;\n"
        '  closed) echo "x" >&2; echo "Permission denied (publickey)." >&2; exit 255;;\n'
        '  adopt) echo "Access denied by pam_slurm_adopt: you have no active jobs on this node" >&2; '
        'echo "Connection closed by 10.9.0.1 port 22" >&2; exit 255;;\n'
        f"  flaky) [ -e {tmp_path}/tried ] && exit 0; touch {tmp_path}/tried; exit 255;;\nesac; done\n"
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    log_in = load_module("peer_login").log_in
    assert log_in("trainyard", "good", 5) == ""
    assert log_in("trainyard", "flaky", 5) == ""
    assert log_in("trainyard", "closed", 5) == "Permission denied (publickey)."
    assert log_in("trainyard", "adopt", 5).startswith("Access denied by pam_slurm_adopt")


@pytest.mark.parametrize(
    ("hosts", "members"), [(0, 0), (1, 0), (2, 1), (3, 3), (4, 3), (5, 5), (6, 5), (16, 5)]
)
def test_the_memory_of_runs_outlives_a_minority_of_its_members(hosts, members):
    names = [f"node{number}" for number in range(1, hosts + 1)]
    found = cluster.etcd_members(names, {name: {"cluster_address": f"10.0.0.{name[4:]}"} for name in names})
    assert [member["name"] for member in found] == names[:members]
    assert all(member["address"] == f"10.0.0.{member['name'][4:]}" for member in found)


def test_in_check_mode_a_key_that_is_not_made_yet_stands_for_itself():
    text = (ROOT / "roles/ssh_mesh/vars/main.yml").read_text()
    (key,) = re.findall(r"mesh_keys\(hostvars, '(.+?)' if ansible_check_mode", text)
    assert cluster.peer_authorized_keys(HOSTS, {"node1": key})["node1"][0].split()[1:-1] == key.split()


@pytest.mark.parametrize(
    "forged",
    [
        "ssh-ed25519 AAAA x\nssh-ed25519 BBBB",
        "x\nssh-ed25519 AAAA",
        'command="sh" ssh-ed25519 AAAA',
        "ssh-ed25519",
        "ssh-ed25519 AAAA\r\n@cert-authority * ssh-ed25519 BBBB",
    ],
)
def test_what_a_host_says_is_its_key_is_one_key(forged):
    """A second line would be a key without from= on every peer, or a host key for another's name."""
    with pytest.raises(AnsibleFilterError, match="node1: found a public key that is none"):
        cluster.peer_authorized_keys(HOSTS, {"node1": forged})
    kind, _, key = forged.partition(" ")
    facts = {"ssh_host_key_rsa_public_keytype": kind, "ssh_host_key_rsa_public": key}
    hostvars = {host["name"]: {"ansible_facts": facts} for host in HOSTS}
    if key not in ("", "AAAA"):
        with pytest.raises(AnsibleFilterError, match="found a public key that is none"):
            cluster.peer_known_hosts(HOSTS, hostvars)


def test_a_line_with_an_end_of_line_in_it_is_no_line(run_module, tmp_path):
    file = {
        "path": str(tmp_path / "keys"),
        "mode": "0600",
        "lines": {"node2": ["restrict ssh-rsa A\nssh-rsa B trainyard@node2"]},
    }
    told = run_module("peer_lines", files=[file], keep=["node2"])
    assert told["failed"] and "a line of node2's with an end of line in it" in told["msg"]
    assert not (tmp_path / "keys").exists()
