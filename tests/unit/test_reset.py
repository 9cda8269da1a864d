"""reset.yml: what is found of ours, what goes and what stays, and whether the names are the right ones."""

import getpass
import os
import pwd
import re
from pathlib import Path

import pytest
import yaml
from ansible.errors import AnsiblePromptNoninteractive

from plugins.action import reset_consent
from plugins.action.reset_consent import consent_fault
from plugins.filter.reset import reset_fault, reset_needs, reset_stays, reset_text

ROOT = Path(__file__).resolve().parents[2]
ITEM = {
    "inside": None,
    "user": None,
    "block": False,
    "own_name": "",
    "account": None,
    "what": "it",
}


class Module:
    """What Host needs of an AnsibleModule; `commands`: what was run."""

    def __init__(self, **params):
        self.params, self.commands, self.tmpdir = {"keep": [], **params}, [], None

    def run_command(self, words):
        self.commands.append(words)
        return 0, "", ""


@pytest.fixture
def made(load_module):
    return load_module("host_made")


@pytest.fixture
def go(made):
    """`go(*items, keep=…)`: look, then remove; (found paths, left)."""

    def run(*items, keep=()):
        host = made.Host(Module(keep=[str(path) for path in keep]))
        items = [{**ITEM, **item, "path": str(item["path"])} for item in items]
        host.look(items)
        for item in items:
            host.remove(item)
        again = made.Host(Module(keep=[str(path) for path in keep]))
        again.look(items)
        assert again.found == []
        return [one["path"] for one in host.found], host.left

    return run


def test_only_what_is_ours_goes_from_a_directory_and_then_the_directory(go, tmp_path):
    (tmp_path / "opt/releases/a").mkdir(parents=True)
    (tmp_path / "opt/current").symlink_to("releases/a")
    item = {"path": tmp_path / "opt", "inside": ["releases", "current"]}
    (tmp_path / "opt/mine").write_text("x")
    found, left = go(item)
    assert found == [f"{tmp_path}/opt/current", f"{tmp_path}/opt/releases"] and left == [f"{tmp_path}/opt"]
    assert os.listdir(tmp_path / "opt") == ["mine"]
    (tmp_path / "opt/mine").unlink()
    (tmp_path / "opt/releases").mkdir()
    go(item)
    assert not (tmp_path / "opt").exists()


def test_a_directory_of_which_nothing_is_named_goes_if_it_is_empty(go, tmp_path):
    for name, found in (("full", []), ("empty", [f"{tmp_path}/empty"])):
        (tmp_path / name).mkdir()
        (tmp_path / "full/x").write_text("x")
        assert go({"path": tmp_path / name, "inside": []})[0] == found
    assert os.listdir(tmp_path) == ["full"]


def test_a_link_goes_and_what_it_leads_to_stays(go, tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/a").write_text("x")
    (tmp_path / "state").mkdir()
    (tmp_path / "state/runs").symlink_to(tmp_path / "theirs")
    go({"path": tmp_path / "state", "inside": ["runs"]})
    (tmp_path / "state").symlink_to(tmp_path / "theirs")
    found, _ = go({"path": tmp_path / "state", "inside": ["a"]})
    assert found == [] and (tmp_path / "theirs/a").exists()


def test_all_of_the_service_users_goes_from_its_home_and_nobody_elses(go, tmp_path, made, monkeypatch):
    home = tmp_path / "home"
    (home / ".cache/hub").mkdir(parents=True)
    (home / "lost+found").mkdir()
    (home / "runs").mkdir()
    uid = (home / ".cache").stat().st_uid
    entry = pwd.getpwuid(uid)
    monkeypatch.setattr(made.pwd, "getpwnam", lambda name: entry)
    real = os.lstat

    def lstat(path, **options):
        found = real(path, **options)
        return (
            os.stat_result((*found[:4], uid + 1, *found[5:10])) if str(path).endswith("lost+found") else found
        )

    monkeypatch.setattr(made.os, "lstat", lstat)
    found, left = go({"path": home, "inside": ["runs"], "user": getpass.getuser()})
    assert found == [f"{home}/.cache", f"{home}/runs"] and left == [str(home)]


def test_what_is_kept_is_not_even_named(go, tmp_path):
    for name in ("runs", "data"):
        (tmp_path / "var" / name).mkdir(parents=True)
    found, left = go({"path": tmp_path / "var", "inside": ["runs", "data"]}, keep=[tmp_path / "var/runs"])
    assert found == [f"{tmp_path}/var/data"] and left == [f"{tmp_path}/var"]
    assert (tmp_path / "var/runs").is_dir()


def test_nothing_is_named_twice_where_one_directory_lies_in_another(go, tmp_path):
    (tmp_path / "opt/env/ab").mkdir(parents=True)
    (tmp_path / "opt/releases").mkdir()
    found, left = go(
        {"path": tmp_path / "opt/env", "inside": ["[0-9a-f]*[0-9a-f]"]},
        {"path": tmp_path / "opt", "inside": ["releases", "env"]},
    )
    assert left == [] and not (tmp_path / "opt").exists()
    assert len(found) == len(set(found))


def test_a_mount_is_named(made, tmp_path):
    table = tmp_path / "mountinfo"
    table.write_text(
        "1 0 8:1 / / rw - ext4 x rw\n2 1 8:2 / /v/runs/with\\040space rw - nfs x rw\n3 1 8:3 / /v/runs2 rw\n"
    )
    assert made.mounts_below("/v/runs", str(table)) == ["/v/runs/with space"]
    assert made.mounts_below("/v/data", str(table)) == []


def test_our_block_goes_and_the_host_still_knows_its_name(made):
    def text(content, name, path="hosts"):
        Path(path).write_text(content)
        return made.without_block(path, name)

    block = "# BEGIN trainyard: x\n10.0.0.1 node1\n# END trainyard\n"
    path = os.path.join(os.path.dirname(__file__), ".hosts-of-a-test")
    try:
        stock = "127.0.0.1 localhost\n::1 localhost\n"
        assert text(stock + block, "node1", path) == "127.0.0.1 localhost\n127.0.1.1 node1\n::1 localhost\n"
        assert text("127.0.1.1 node1 # mine\n" + block, "node1", path) == "127.0.1.1 node1 # mine\n"
        assert text(block, "", path) == ""
        # An earlier release took the name from beside the one with a domain.
        left = stock + "127.0.1.1\tnode1.lan # mine\n"
        assert text(left + block, "node1", path) == stock + "127.0.1.1\tnode1.lan\tnode1 # mine\n"
        assert text("127.0.1.1 3box.lan\n" + block, "3box", path) == "127.0.1.1 3box.lan 3box\n"
        assert text("127.0.1.1 node12.lan\n" + block, "node1", path).startswith("127.0.1.1 node1\n")
    finally:
        os.unlink(path)


def test_a_block_counts_as_found_and_an_empty_file_goes(made, tmp_path):
    file = tmp_path / "known_hosts"
    file.write_text("# BEGIN trainyard\nnode2 ssh-ed25519 A trainyard@node2\n# END trainyard\n")
    host = made.Host(Module())
    host.look([{**ITEM, "path": str(file), "block": True}])
    assert [one["path"] for one in host.found] == [str(file)]
    host.remove({**ITEM, "path": str(file), "block": True})
    assert not file.exists()


def test_a_persons_account_is_not_ours(made, monkeypatch):
    def account(comment, uid):
        return pwd.struct_passwd(("x", "*", uid, uid, comment, "/x", "/bin/sh"))

    for entry, ours in (
        (account("Trainyard", 990), True),
        (account("Anna", 1000), False),
        (account("", 990), False),
    ):
        monkeypatch.setattr(made.pwd, "getpwnam", lambda name, entry=entry: entry)
        assert bool(made.account_of("x")) is ours


def test_it_says_what_it_would_do_and_does_it_once(run_module, tmp_path):
    (tmp_path / "a.conf").write_text("x")
    options = {"made": [{"what": "a file", "path": f"{tmp_path}/a.*"}]}
    look = run_module("host_made", **options)
    assert look["changed"] is False and look["found"] == [
        {"what": "a file", "path": f"{tmp_path}/a.conf", "bytes": 1}
    ]
    assert run_module("host_made", check=True, remove=True, **options)["changed"] is True
    assert (tmp_path / "a.conf").exists()
    assert run_module("host_made", remove=True, **options)["changed"] is True
    assert run_module("host_made", remove=True, **options)["changed"] is False


def test_every_role_of_site_yml_that_makes_something_can_undo_it():
    called = set(
        re.findall(r"(?:import|include)_role: \{name: (\w+)", (ROOT / "playbooks/site.yml").read_text())
    )
    undone = {path.parts[-3] for path in (ROOT / "roles").glob("*/tasks/remove.yml")}
    # The guard comes with the first change that needs it.
    assert called == undone - {"guard"}
    text = (ROOT / "playbooks/reset.yml").read_text()
    tasks = [name for name in re.findall(r"import_role: \{name: (\w+), tasks_from: remove", text)]
    assert set(tasks) == undone and tasks[-1] == "guard"


def test_what_a_role_writes_stands_in_its_list():
    """A destination of a role's tasks that reset.yml would leave behind."""
    for role in ("identity", "time_sync", "tuning", "etcd", "nvidia", "firewall", "monitoring"):
        files = [*(ROOT / "roles" / role / "vars").rglob("*.yml")]
        known = "".join(file.read_text() for file in files)
        for tasks in (ROOT / "roles" / role / "tasks").glob("*.yml"):
            for item in yaml.safe_load(tasks.read_text()) or []:
                for value in item.values():
                    place = (
                        str(value.get("dest") or value.get("path") or "") if isinstance(value, dict) else ""
                    )
                    if place.startswith("/etc/") and "nvidia-persistenced" not in place:
                        assert place in known, f"{tasks}: {place}"


def test_of_the_role_nvidia_only_what_its_driver_needs_stays_and_is_named():
    values = yaml.safe_load((ROOT / "roles/nvidia/vars/main/paths.yml").read_text())
    gone = [item["path"].strip("{ }") for item in values["_nvidia_made"]]
    assert {name for name in values if name.endswith("_file")} - set(gone) == {"_nvidia_modprobe_file"}
    assert gone[-1] == "_nvidia_held_file"  # by which the pin is known to be of this release
    told = (ROOT / "docs/operations.md").read_text()
    assert values["_nvidia_modprobe_file"] in told and "nvidia-persistenced.service.d" in told
    said = (ROOT / "playbooks/reset.yml").read_text().partition("- name: Say what stays")[2]
    assert "nouveau kept out and its daemon's settings" in " ".join(said.split())


# ---- words ----


def found(*rows):
    return [{"path": path, "bytes": size, "what": what} for path, size, what in rows]


def test_a_run_and_a_mount_stand_against_it():
    seen = {"n1": {"host_status": {"active": ["a"]}}, "n2": {"host_status": {"active": ["a"]}}}
    fault = reset_fault(seen, {"n1": {"mounts": ["/v/data"]}, "n2": {"mounts": []}}, "STOP")
    run, mount = fault.splitlines()
    assert run == "run a: found it active on n1, n2; expected no run there. Stop it first: STOP -e run=a"
    assert mount.startswith("n1: found mounted: /v/data;")
    assert reset_fault({"n1": {"host_status": {"active": []}}}, {"n1": {"mounts": []}}, "STOP") == ""


def test_what_runs_on_other_hosts_live_by_stays():
    members = ["n1", "n2", "n3"]
    assert (
        reset_needs(["n2"], "", members) == [] == reset_needs(["n4"], "n1", members)
    )  # two of three are enough
    assert reset_needs(["n2", "n4"], "n4", members) == ["the directory that n4 shares"]
    (memory,) = reset_needs(["n1", "n3"], "", members)
    assert memory == "the memory of runs, which n1, n3 must not lose"
    assert reset_needs(["n1"], "", ["n1"]) and not reset_needs(["n1"], "", [])
    idle, made = {"n1": {"host_status": {"active": []}}}, {"n1": {"mounts": []}}
    elsewhere = [
        {"item": "n2", "host_status": {"active": ["a"]}},
        {"item": "n3", "host_status": {"active": ["a"]}},
        {"item": "n5", "unreachable": True},
    ]
    fault = reset_fault(idle, made, "STOP", ["the directory that n1 shares"], elsewhere)
    assert fault == (
        "run a: found it active on n2, n3, where it may need the directory that n1 shares; expected no run that does. "
        "Stop it first: STOP -e run=a"
    )
    assert reset_fault(idle, made, "STOP", [], elsewhere) == ""
    # One that is off, for good maybe, keeps nobody from it; but it is told before anything goes.
    nothing = {"n1": {"found": [], "left": []}}
    told = reset_text(nothing, ["the directory that n1 shares"], elsewhere)
    assert told.endswith("No answer: n5. A run that is active there may need the directory that n1 shares.")
    assert "n5" not in reset_text(nothing, [], elsewhere)


def test_equal_hosts_are_told_of_once_with_their_sizes():
    def host(size):
        return {
            "found": found(("/v/runs", size, "runs"), ("/v", 0, "runs"), ("/etc/x", 0, "a file")),
            "left": [],
        }

    text = reset_text({"n1": host(2e9), "n2": host(3_400_000), "n3": {"found": [], "left": []}})
    assert text.splitlines() == [
        "n1, n2:",
        "  /v/runs  3.4 MB to 2.0 GB  runs",
        "  /etc/x                     a file",
        "",
        "n3: nothing of Trainyard's is there.",
    ]
    left = reset_text({"n1": {"found": found(("/v/runs", 1, "runs")), "left": ["/v"]}})
    assert left.splitlines()[-1] == "  /v stays: more is in it"


@pytest.mark.parametrize(
    ("typed", "right"),
    [
        ("n1,n2", True),
        (" n2, n1 ", True),
        ("n1", False),
        ("", False),
        ("n1,n2,n3", False),
        ("all", False),
        ("yes", False),
    ],
)
def test_just_the_hosts_of_the_play_must_be_named(typed, right):
    fault = consent_fault(typed, ["n1", "n2"], "reset")
    assert (fault == "") is right
    assert right or (
        "expected just the hosts of this play: n1,n2." in fault and "Nothing was changed." in fault
    )


@pytest.mark.parametrize(
    ("sure", "typed", "answers", "asked", "words"),
    [
        (None, None, ["yes", "n1,n2"], 2, ""),
        (
            None,
            None,
            ["Yes ", "n1"],
            2,
            "your answer: found n1; expected just the hosts of this play: n1,n2.",
        ),
        (None, None, ["n1,n2"], 1, "Not asked for by yes"),
        (None, None, [""], 1, "Not asked for by yes"),
        (True, None, ["n2,n1"], 1, ""),
        (None, "n1,n2", ["yes"], 1, ""),
        (None, "n1,n2", ["no"], 1, "Not asked for by yes"),
        (False, "n1,n2", [], 0, "Not asked for by yes"),
        (True, "n1,n2", [], 0, ""),
        (True, "n1", [], 0, "reset: found n1; expected just the hosts of this play: n1,n2."),
        (None, "n1", [], 0, "reset: found n1;"),
    ],
)
def test_it_asks_twice_and_both_answers_count(monkeypatch, sure, typed, answers, asked, words):
    left = list(answers)
    monkeypatch.setattr(reset_consent, "ask", lambda question: left.pop(0))
    fault = reset_consent.fault(["n1", "n2"], sure, typed)
    assert words in fault and bool(fault) == bool(words)
    assert len(answers) - len(left) == asked and (not fault or "Nothing was changed." in fault)


@pytest.mark.parametrize(("sure", "typed"), [(None, None), (True, None), (None, "n1,n2")])
def test_one_answer_without_a_terminal_is_none(monkeypatch, sure, typed):
    def nobody(question):
        raise AnsiblePromptNoninteractive("no terminal")

    monkeypatch.setattr(reset_consent, "ask", nobody)
    fault = reset_consent.fault(["n1", "n2"], sure, typed)
    assert fault.endswith("-e reset=n1,n2 -e sure=true. Nothing was changed.")


def test_the_static_addresses_that_stay_are_named_with_their_hosts_and_why():
    netplan = {"found": found(("/etc/netplan/90-trainyard.yaml", 1, "static addresses"))}
    first, second = reset_stays(
        {"n1": netplan, "n2": netplan, "n3": {"found": []}, "n4": {"skipped": True}, "n5": netplan},
        {"n1": "It was undone.", "n2": "It was undone.", "n3": "", "n5": "lan0 has its name from it."},
    ).splitlines()[1:]
    assert first.startswith("n1, n2: /etc/netplan/90-trainyard.yaml stays. It was undone. At its console: ")
    assert second.startswith("n5: ") and "lan0 has its name from it." in second and "netplan apply" in second
    assert reset_stays({"n1": {"found": []}}, {}) == ""
