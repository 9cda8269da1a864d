"""The guard without systemd or a network: on the host every way for a change to end, on the controller what it asks."""

import importlib.util
import json
import os
import stat
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from plugins.action import guarded_change

SOURCE = Path(__file__).parents[2] / "roles" / "guard" / "files" / "guard.py"


@pytest.fixture(scope="module")
def code():
    spec = importlib.util.spec_from_file_location("trainyard_guard", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.SETTLE = 0
    module.verify_limit, module.really = lambda timeout: 0, module.verify_limit
    module.UNDO_TRIES = 1
    return module


class NoSystemd:
    """Notes what the guard asks of the service manager; `broken` makes one request fail."""

    def __init__(self, code):
        self.code, self.asked, self.broken = code, [], None

    def __getattr__(self, request):
        def note(*arguments):
            self.asked.append(request)
            if request == self.broken:
                raise self.code.GuardError(f"{request} is broken")

        return note


@pytest.fixture
def guard(code, tmp_path):
    return code.Guard(str(tmp_path / "state"), NoSystemd(code))


def me():
    import grp
    import pwd

    return {"owner": pwd.getpwuid(os.getuid()).pw_name, "group": grp.getgrgid(os.getgid()).gr_name}


def change(files, **more):
    return {"why": "a test", "timeout": 45, "files": [{**me(), **item} for item in files], **more}


def snapshot(directory):
    """path -> (kind, mode, content or target) of everything below `directory`."""
    found = {}
    for path in sorted(directory.rglob("*")):
        mode = stat.S_IMODE(path.lstat().st_mode)
        if path.is_symlink():
            found[str(path)] = ("link", os.readlink(path))
        elif path.is_dir():
            found[str(path)] = ("dir", mode)
        else:
            found[str(path)] = ("file", mode, path.read_bytes())
    return found


@pytest.fixture
def etc(tmp_path):
    """A little /etc: a private file, a link, a file to be moved and one to be removed."""
    etc = tmp_path / "etc"
    etc.mkdir()
    (etc / "plan.yaml").write_bytes(b"old\xff\n")
    (etc / "plan.yaml").chmod(0o600)
    (etc / "resolv.conf").symlink_to("../run/stub.conf")
    (etc / "aside.yaml").write_text("aside")
    (etc / "gone.conf").write_text("gone")
    return etc


def all_kinds(etc):
    return [
        {"path": str(etc / "plan.yaml"), "content": "new\n", "mode": "0640"},
        {"path": str(etc / "resolv.conf"), "content": "nameserver 192.0.2.1\n"},
        {"path": str(etc / "aside.yaml"), "move_to": str(etc / "kept" / "aside.yaml.old")},
        {"path": str(etc / "gone.conf"), "state": "absent"},
        {
            "path": str(etc / "new" / "deep" / "file.conf"),
            "content": "made f\udcfcr\n",
        },  # somebody's, in Latin-1
    ]


def test_every_kind_of_change_is_written_and_undone(guard, etc):
    before = snapshot(etc)
    armed = guard.change("network", change(all_kinds(etc)))
    assert armed["state"] == "armed"
    assert (etc / "plan.yaml").read_text() == "new\n"
    assert stat.S_IMODE((etc / "plan.yaml").stat().st_mode) == 0o640
    assert not (etc / "resolv.conf").is_symlink()
    assert (etc / "kept" / "aside.yaml.old").read_text() == "aside"
    assert not (etc / "gone.conf").exists() and not (etc / "aside.yaml").exists()
    assert (etc / "new" / "deep" / "file.conf").read_bytes() == b"made f\xfcr\n"

    report = guard.restore("network")["report"]
    assert snapshot(etc) == before
    assert report["why"] == "no new connection from the controller confirmed it within 45 s"
    assert f"{etc}/plan.yaml put back" in report["undone"]
    assert f"{etc}/new/deep/file.conf removed" in report["undone"]
    assert guard.armed() == []


def test_the_timer_runs_before_anything_is_written(guard, etc):
    guard.systemd.broken = "start_timer"
    before = snapshot(etc)
    with pytest.raises(Exception, match="start_timer is broken"):
        guard.change("network", change(all_kinds(etc)))
    assert snapshot(etc) == before
    assert guard.armed() == []


def test_a_host_whose_boot_units_are_off_is_refused(guard, etc):
    guard.systemd.broken = "check_ready"
    before = snapshot(etc)
    with pytest.raises(Exception, match="check_ready is broken"):
        guard.change("network", change(all_kinds(etc)))
    assert snapshot(etc) == before


def test_a_failing_check_puts_everything_back_before_it_was_applied(guard, etc):
    before = snapshot(etc)
    refusal = ["sh", "-c", "echo line 3: bad; exit 1"]
    ran = etc.parent / "ran"
    end = guard.change("network", change(all_kinds(etc), check=[refusal], undo=[["touch", str(ran)]]))
    assert end["state"] == "restored"
    assert "line 3: bad" in end["report"]["why"]
    assert snapshot(etc) == before
    assert "start_apply" not in guard.systemd.asked
    assert not ran.exists()  # nothing was applied, so there is nothing to undo but the files


@pytest.mark.parametrize("fault", [{"owner": "no-such-user"}, {"move_to": "there.conf"}])
def test_a_file_that_cannot_be_written_puts_everything_back(guard, etc, fault):
    before, ran = snapshot(etc), etc.parent / "ran"
    if "move_to" in fault:  # of what is not there
        fault = {"move_to": str(etc / fault["move_to"])}
    files = [*all_kinds(etc), {"path": str(etc / "odd.conf"), "content": "x", **fault}]
    end = guard.change("network", change(files, undo=[["touch", str(ran)]]))
    assert end["state"] == "restored" and "writing failed" in end["report"]["why"]
    assert snapshot(etc) == before and guard.armed() == []
    assert "start_apply" not in guard.systemd.asked and not ran.exists()


def test_a_change_that_cannot_be_applied_puts_everything_back(guard, etc):
    guard.systemd.broken = "start_apply"
    before, ran = snapshot(etc), etc.parent / "ran"
    with pytest.raises(Exception, match="start_apply is broken"):
        guard.change("network", change(all_kinds(etc), undo=[["touch", str(ran)]]))
    assert snapshot(etc) == before and guard.armed() == [] and not ran.exists()


@pytest.fixture
def events(monkeypatch):
    """What is made safe on disk and what gets its name, in order: (what, path)."""
    told = []

    def fsync(handle, really=os.fsync):
        told.append(("sync", os.readlink(f"/proc/self/fd/{handle}")))
        really(handle)

    def rename(old, new, really=os.rename):
        told.append(("rename", str(new)))
        really(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    return told


def test_what_a_power_cut_leaves_is_the_old_file_or_the_new_one(code, etc, events, monkeypatch):
    path = str(etc / "plan.yaml")
    code.write_file(path, b"new", 0o600, os.getuid(), os.getgid())
    (written, temporary), named, (synced, directory) = events
    assert written == synced == "sync" and temporary.startswith(f"{etc}/.plan.yaml.guard-")
    assert named == ("rename", path) and directory == str(etc)

    def full(old, new):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(OSError, match="No space"):
        code.write_file(path, b"newer", 0o600, os.getuid(), os.getgid())
    assert (etc / "plan.yaml").read_bytes() == b"new"
    assert not [name for name in os.listdir(etc) if "guard-" in name]


def test_the_old_state_is_safe_on_disk_before_anything_new_is(guard, etc, events):
    guard.change("network", change(all_kinds(etc)))
    armed = events.index(("rename", os.path.join(guard.state_dir, "network")))
    assert events[armed - 1] == ("sync", os.path.join(guard.state_dir, ".network.new"))
    assert events[armed + 1] == ("sync", guard.state_dir)
    assert not [path for _, path in events[: armed + 2] if path.startswith(str(etc))]
    after = events[armed + 2 :]
    moved = after.index(("rename", str(etc / "kept" / "aside.yaml.old")))
    assert after[moved + 1 : moved + 3] == [("sync", str(etc / "kept")), ("sync", str(etc))]


def test_a_change_that_is_undone_while_it_is_applied_is_not_called_applied(code, guard, etc, monkeypatch):
    ran = etc.parent / "ran"
    armed = guard.change("network", change(all_kinds(etc), apply=[["touch", str(ran)]]))
    monkeypatch.setattr(code.time, "sleep", lambda _: guard.restore("network", commands="later"))
    assert guard.apply("network") == {"state": "none"} and ran.exists()
    monkeypatch.undo()
    assert guard.confirm("network", armed["token"])["state"] == "pending"
    ran.unlink()
    assert guard.apply("network") == {"state": "none"} and not ran.exists()  # nor is it begun once more
    assert guard.restore("network")["state"] == "restored"
    assert guard.apply("network") == {"state": "none"}


def test_the_timer_is_stopped_at_each_end_and_what_applies_before_files_go_back(guard, etc):
    armed = guard.change("network", change(all_kinds(etc)))
    guard.apply("network")
    proof = guard.confirm("network", armed["token"])["proof"]
    assert "stop_timer" not in guard.systemd.asked
    guard.confirm("network", armed["token"], proof)
    assert guard.systemd.asked[-1] == "stop_timer"
    guard.change("network", change([{"path": str(etc / "plan.yaml"), "content": "newer\n"}]))
    guard.systemd.asked.clear()
    guard.restore("network")
    assert guard.systemd.asked == ["stop_apply", "stop_timer"]


def test_an_undo_command_is_tried_again(code, guard, etc, monkeypatch):
    monkeypatch.setattr(code, "UNDO_TRIES", 3)
    monkeypatch.setattr(code.time, "sleep", lambda _: None)
    once = ["sh", "-c", 'test -e "$0" || { touch "$0"; exit 1; }', str(etc.parent / "tried")]
    guard.change("network", change(all_kinds(etc), undo=[once, ["false"]]))
    report = guard.restore("network")["report"]
    assert [one["rc"] for one in report["commands"]] == [0, 1]


def test_a_mode_and_an_owner_go_back_where_the_content_is_the_same(guard, etc):
    path = etc / "plan.yaml"
    if os.geteuid() == 0:
        os.chown(path, 1234, 1235)
    before = path.stat()
    guard.change("network", change([{"path": str(path), "content": "old\udcff\n", "mode": "0644"}]))
    assert stat.S_IMODE(path.stat().st_mode) == 0o644 and path.read_bytes() == b"old\xff\n"
    assert path.stat().st_uid == os.getuid()
    assert guard.restore("network")["report"]["undone"] == [f"{path} put back"]
    after = path.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)


def test_all_that_waits_is_put_back_though_one_cannot_be(code, guard, etc, monkeypatch, capsys):
    """As at boot, by the unit that calls for it."""
    monkeypatch.setattr(code, "Guard", lambda: guard)
    for name, path in (("firewall", "gone.conf"), ("network", "plan.yaml")):
        guard.change(name, change([{"path": str(etc / path), "content": "new\n"}]))
    (etc / "gone.conf").unlink()
    (etc / "gone.conf").mkdir()
    with pytest.raises(Exception, match=r"firewall could not be put back: .*gone\.conf"):
        code.main(["restore", "--all"])
    assert (etc / "plan.yaml").read_bytes() == b"old\xff\n" and guard.armed() == ["firewall"]
    (etc / "gone.conf").rmdir()
    code.main(["restore", "--all"])
    assert json.loads(capsys.readouterr().out)["firewall"]["state"] == "restored"


@pytest.mark.parametrize(
    ("neighbour", "answers"),
    [
        ({"lladdr": "52:54:00:00:00:01", "state": ["REACHABLE"]}, True),
        ({"lladdr": "52:54:00:00:00:01", "state": ["FAILED"]}, False),  # it did once
        ({"state": ["INCOMPLETE"]}, False),
        ({}, False),
    ],
)
def test_whether_a_neighbour_answers(code, monkeypatch, neighbour, answers):
    asked = []

    def run(command):
        asked.append(command)
        return {"rc": 0, "output": json.dumps([neighbour])}

    monkeypatch.setattr(code, "run", run)
    monkeypatch.setattr(code.time, "sleep", lambda _: None)
    assert code.reachable("127.0.0.1", "lo", limit=0.01) is answers
    assert asked[0][-4:] == ["to", "127.0.0.1", "dev", "lo"]


def test_confirmed_only_after_it_was_applied_and_by_its_token(guard, etc):
    armed = guard.change(
        "network", change([{"path": str(etc / "plan.yaml"), "content": "new\n"}], apply=[["true"]])
    )
    assert guard.confirm("network", armed["token"])["state"] == "pending"
    assert guard.apply("network") == {"state": "applied"}
    assert guard.confirm("network", "another")["state"] == "restored"
    # A connection from before the change can ask, but only one that was opened after the answer can have the proof.
    learned = guard.confirm("network", armed["token"])
    assert learned["state"] == "applied"
    assert guard.confirm("network", armed["token"], "no proof") == learned
    assert guard.armed() == ["network"]
    assert guard.confirm("network", armed["token"], learned["proof"])["state"] == "confirmed"
    assert guard.armed() == []
    assert guard.restore("network") == {"state": "none"}
    assert (etc / "plan.yaml").read_text() == "new\n"
    assert not [name for name in os.listdir(guard.state_dir) if "confirmed" in name]


@pytest.mark.parametrize(("timeout", "seconds"), [(20, 10), (30, 12), (45, 20), (90, 65), (600, 575)])
def test_a_longer_guard_waits_longer_for_a_switch(code, timeout, seconds):
    assert code.really(timeout) == seconds


@pytest.mark.parametrize(
    ("commands", "said"),
    [
        ({"apply": [["sh", "-c", "echo no such interface; exit 3"]]}, "no such interface"),
        ({"apply": [["true"]], "verify": [["sh", "-c", "echo gateway silent; exit 1"]]}, "gateway silent"),
        ({"apply": [["/nowhere/command"]]}, "/nowhere/command"),
    ],
)
def test_a_failing_command_is_undone_at_once_with_its_words(guard, etc, commands, said):
    before = snapshot(etc)
    guard.change("network", change(all_kinds(etc), undo=[["true"]], **commands))
    assert guard.apply("network")["state"] == "failed"
    assert guard.systemd.asked[-1] == "start_restore"
    report = guard.restore("network")["report"]
    assert said in report["why"]
    assert snapshot(etc) == before


def test_nothing_is_confirmed_while_it_is_being_undone(guard, etc):
    armed = guard.change("network", change(all_kinds(etc)))
    guard.apply("network")
    proof = guard.confirm("network", armed["token"])["proof"]
    assert guard.restore("network", commands="later") == {"state": "armed"}
    assert guard.confirm("network", armed["token"], proof)["state"] == "pending"
    assert guard.restore("network")["report"]["undone"]  # what the first half did is reported by the second


def test_a_restart_is_the_reason_after_a_restart(code, guard, etc, tmp_path, monkeypatch):
    guard.change("network", change(all_kinds(etc)))
    other = tmp_path / "boot_id"
    other.write_text("another boot\n")
    monkeypatch.setattr(code, "BOOT_ID", str(other))
    assert guard.status()["armed"]["network"]["seconds_left"] == 0
    assert "restarted" in guard.restore("network")["report"]["why"]


def test_no_line_of_netplans_files_is_reported(code, tmp_path, monkeypatch):
    said = "9.yaml:6:13: Error in network definition: unknown key"
    (tmp_path / "netplan").write_text(
        f"#!/bin/sh\nprintf '{said}\\n    pasword: hunter2\\n    ^\\n'; exit 78\n"
    )
    (tmp_path / "netplan").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert code.run(["netplan", "apply"]) == {"command": "netplan apply", "rc": 78, "output": said}


def test_undo_commands_run_after_the_files_are_back_and_their_failure_is_reported(guard, etc):
    seen = etc.parent / "seen"
    undo = [["cp", str(etc / "plan.yaml"), str(seen)], ["sh", "-c", "echo broken; exit 9"]]
    guard.change("network", change(all_kinds(etc), undo=undo))
    report = guard.restore("network")["report"]
    assert seen.read_bytes() == b"old\xff\n"
    assert report["commands"][1]["rc"] == 9 and report["commands"][1]["output"] == "broken"
    assert guard.armed() == []


def test_a_file_that_cannot_be_put_back_keeps_the_guard_armed_and_the_others_go_back(guard, etc):
    guard.change("network", change(all_kinds(etc)))
    blocker = etc / "gone.conf"
    blocker.mkdir()
    with pytest.raises(Exception, match=r"gone\.conf"):
        guard.restore("network")
    assert (etc / "plan.yaml").read_bytes() == b"old\xff\n"
    assert guard.armed() == ["network"]
    blocker.rmdir()
    assert guard.restore("network")["state"] == "restored"
    assert blocker.read_text() == "gone"


def test_a_second_change_waits_for_the_first(guard, etc):
    guard.change("network", change(all_kinds(etc)))
    with pytest.raises(Exception, match="waiting to be confirmed"):
        guard.change("network", change(all_kinds(etc)))


@pytest.mark.parametrize("path", ["relative", "/etc/../etc/passwd", "/etc/x/", None])
def test_odd_paths_are_refused_before_anything_is_written(guard, path):
    with pytest.raises(Exception, match="cannot be guarded"):
        guard.change("network", change([{"path": path or guard.state_dir + "/x", "content": "x"}]))
    assert guard.armed() == []


@pytest.mark.parametrize("name", ["", "../etc", "Network", ".lock"])
def test_odd_names_are_refused(guard, name):
    with pytest.raises(Exception, match="cannot name a guard"):
        guard.change(name, change([]))


def test_the_old_state_is_for_its_owner_alone(guard, etc):
    guard.change("network", change(all_kinds(etc)))
    for directory, _, files in os.walk(guard.state_dir):
        assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700
        for name in files:
            if name != ".lock":
                assert stat.S_IMODE(os.stat(os.path.join(directory, name)).st_mode) == 0o600


def test_what_is_on_disk_is_enough_for_another_process(code, guard, etc):
    """The timer's process knows nothing but the state directory."""
    before = snapshot(etc)
    guard.change("network", change(all_kinds(etc)))
    other = code.Guard(guard.state_dir, NoSystemd(code))
    other.restore("network")
    assert snapshot(etc) == before
    assert json.dumps(guard.status())


def test_a_power_cut_before_arming_or_after_the_end_leaves_nothing_armed_and_is_swept(
    code, load_module, guard, etc
):
    """guard_host, which asks first, and the guard itself agree on what is armed, and on what was undone."""
    module = load_module("guard_host")
    for half in (".network.new", ".network.confirmed", ".network.restored"):
        directory = Path(guard.state_dir, half)
        directory.mkdir(parents=True)
        (directory / "manifest.json").write_text("{}")
    assert guard.armed() == module.armed(guard.state_dir) == []
    guard.sweep()
    assert os.listdir(guard.state_dir) == [".lock"]
    guard.change("network", change(all_kinds(etc)))
    assert guard.armed() == module.armed(guard.state_dir) == ["network"]
    guard.sweep()
    assert module.untold(guard.state_dir) == []
    assert guard.restore("network", why="test")["state"] == "restored"
    assert [one["why"] for one in module.untold(guard.state_dir)] == ["test"]
    module.tell(guard.state_dir)
    assert module.untold(guard.state_dir) == []
    guard.change("network", change(all_kinds(etc)))
    assert guard.report("network") is None  # what was undone before says nothing of this one
    guard.restore("network", why="again")
    assert [one["why"] for one in module.untold(guard.state_dir)] == ["again"]


def test_a_directory_without_a_manifest_is_no_change_that_waits(guard, etc):
    Path(guard.state_dir, "network").mkdir(parents=True)
    assert guard.change("network", change(all_kinds(etc)))["state"] == "armed"


def test_a_daemon_that_a_command_leaves_behind_is_not_waited_for(code):
    """ifup starts one: it may hold the output open as long as it lives."""
    started = time.monotonic()
    done = code.run(["sh", "-c", "echo started; sleep 9 &"])
    assert time.monotonic() - started < 5
    assert (done["rc"], done["output"]) == (0, "started")
    assert code.run(["sleep", "9"], limit=0.2) == {
        "command": "sleep 9",
        "rc": 124,
        "output": "still running after 0 s",
    }


def ip(flags, *addresses):
    """`ip -json address show` of one interface."""
    listed = [dict(zip(("local", "prefixlen"), address.split("/"), strict=True)) for address in addresses]
    return json.dumps([{}, {"ifname": "eth0", "flags": flags, "addr_info": listed}])


@pytest.mark.parametrize(
    ("shown", "address", "said"),
    [
        (ip(["UP", "LOWER_UP"], "192.168.1.50/24", "fd00::1/64"), "192.168.1.50/24", None),
        (ip(["UP", "LOWER_UP"], "192.168.1.50/24", "fd00::1/64"), "fd00:0::1/64", None),
        (ip(["UP"]), "192.168.1.50/24", None),  # no cable: its manager sets no address either
        (ip([]), "192.168.1.50/24", "eth0 is down"),  # nobody manages it
        (ip(["UP", "LOWER_UP"]), "192.168.1.50/24", "does not have 192.168.1.50/24 but no address"),
        (ip(["UP", "LOWER_UP"], "192.168.1.50/16"), "192.168.1.50/24", "but 192.168.1.50/16"),
        (None, "192.168.1.50/24", "there is no interface eth0"),
    ],
)
def test_whether_an_interface_holds_an_address(code, monkeypatch, shown, address, said):
    answer = {"rc": int(shown is None), "output": shown or "Device does not exist"}
    monkeypatch.setattr(code, "run", lambda command: {"command": " ".join(command), **answer})
    if said is None:
        assert code.main(["holds", address, "eth0"]) is None
    else:
        with pytest.raises(Exception, match=said):
            code.main(["holds", address, "eth0"])


def test_a_name_is_given_back_once(code, monkeypatch):
    ran, there = [], ["lan0"]

    def run(command):
        ran.append(" ".join(command))
        gone = "show" in command and command[-1] not in there
        return {"command": ran[-1], "rc": int(gone), "output": ip(["UP"])}

    monkeypatch.setattr(code, "run", run)
    code.main(["rename", "lan0", "eth1"])
    assert ran[1:] == [
        "ip link set dev lan0 down",
        "ip link set dev lan0 name eth1",
        "ip link set dev eth1 up",
    ]
    there[:], ran[:] = ["eth1"], []
    code.main(["rename", "lan0", "eth1"])
    assert len(ran) == 1


@pytest.mark.parametrize(
    ("kind", "removed"),
    [("bond", True), ("bridge", True), ("vlan", True), ("veth", False), (None, False)],
)
def test_devices_that_netplan_makes_are_removed_and_no_others(code, monkeypatch, kind, removed):
    ran = []
    shown = {
        "ifname": "x0",
        "flags": [],
        "addr_info": [],
        **({"linkinfo": {"info_kind": kind}} if kind else {}),
    }

    def run(command):
        ran.append(" ".join(command))
        return {"command": ran[-1], "rc": 0, "output": json.dumps([shown])}

    monkeypatch.setattr(code, "run", run)
    code.main(["remove", "x0"])
    assert ran[1:] == ["ip link delete dev x0"] * removed


def test_a_device_that_is_gone_already_is_no_fault(code, monkeypatch):
    monkeypatch.setattr(code, "run", lambda command: {"command": "", "rc": 1, "output": "does not exist"})
    code.main(["remove", "x0"])


ENABLED = "UnitFileState=enabled\nNeedDaemonReload=no\n"


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (f"{ENABLED}\n{ENABLED}", True),
        (f"{ENABLED}\nUnitFileState=disabled\nNeedDaemonReload=no\n", False),  # a power cut before `enable`
        (f"{ENABLED}\nUnitFileState=enabled\nNeedDaemonReload=yes\n", False),  # killed before `daemon-reload`
        ("UnitFileState=\nNeedDaemonReload=no\n\nUnitFileState=\nNeedDaemonReload=no\n", False),
        ("", False),
    ],
)
def test_a_guard_whose_boot_units_are_off_is_not_current(load_module, shown, expected):
    class Module:
        def run_command(self, command):
            return 0, shown, ""

    assert load_module("guard_host").enabled(Module()) is expected


# The controller's end (plugins/action/guarded_change.py), with a host that answers as told.

CHANGE = {"name": "network", "why": "a test", "files": [{"path": "/etc/x", "content": "new"}], "timeout": 20}
FOUND = {
    "files": [{"path": "/etc/x", "differs": True}],
    "armed": [],
    "untold": [],
    "host_keys": ["ssh-ed25519 AAAA"],
    "guard_current": True,
    "from_elsewhere": True,
    "logins": [],
}


class Connection:
    """As Ansible's ssh connection reaches 192.168.1.50, with its user's known_hosts in `settings`; sends nothing."""

    def __init__(self, transport="ssh", settings=()):
        self.transport, self.settings, self._options = transport, settings, {}
        self._shell = SimpleNamespace(tmpdir="unused")

    def get_option(self, name):
        return {"host": "192.168.1.50", "ssh_executable": "ssh"}.get(name)

    def set_option(self, name, value):
        pass

    def reset(self):
        pass

    def _build_command(self, program, subsystem, *words):
        return [word.encode() for word in (program, "-F", "none", *self.settings, *words)]


@pytest.fixture
def action(monkeypatch):
    """`action(found, connection, **arguments)`: the result of the task on a host that compares as `found` and confirms
    whatever it is asked; beside it what was shown, and `asked`, the operations.
    """
    said = []
    monkeypatch.setattr(guarded_change.display, "display", lambda text, **_: said.append(text))
    monkeypatch.setattr(guarded_change.display, "warning", said.append)
    monkeypatch.setattr(guarded_change.time, "sleep", lambda seconds: None)

    def run(found=(), connection=None, check=False, **arguments):
        asked = []
        task = SimpleNamespace(args={**CHANGE, **arguments}, check_mode=check, diff=False, async_val=0)
        module = guarded_change.ActionModule(task, connection or Connection(), None, None, None, None)

        def host(operation, **_):
            asked.append(operation)
            known = {**FOUND, **dict(found)}
            answers = {"change": {"state": "armed", "token": "t"}, "confirm": {"state": "confirmed"}}
            armed = {} if "restore" in asked else dict.fromkeys(known["armed"])
            return {"compare": known, "status": {"armed": armed, "reports": {}}, **answers}.get(operation, {})

        monkeypatch.setattr(module, "_host", host)
        result = module.run(None, {"inventory_hostname": "node1"})
        return SimpleNamespace(**{"undone": [], **result}, said=" ".join(said), asked=asked)

    return run


SAME = {"files": [{"path": "/etc/x", "differs": False}]}


@pytest.mark.parametrize(
    ("before", "mode", "after", "shown"),
    [
        ("old\n", "0644", "new\n", True),
        (None, "0644", "new\n", False),
        ("old\n", "0600", "new\n", False),
        # Netplan's and ifupdown's files were everybody's to read for years, wireless keys and all.
        ("access-points: {home: {password: hunter2}}\n", "0644", "{}\n", False),
        ("{}\n", "0644", "  wpa-psk hunter2\n", False),
    ],
)
def test_a_diff_shows_no_file_with_a_key_in_it(before, mode, after, shown):
    files = [{"path": "/etc/x", "mode": mode, "content": after}]
    (diff,) = guarded_change.diffs(files, [{"differs": True, "before": before}])
    assert diff["before_header"] == "/etc/x" and "hunter2" not in str(diff)
    assert ((diff["before"], diff["after"]) == (before, after)) == shown


def test_what_is_equal_is_left_alone_unless_it_is_not_in_force(action):
    assert action(SAME).asked == ["compare"]
    done = action(SAME, live=False)
    assert done.changed and done.asked == ["compare", "change", "confirm"] and done.paths == []
    assert action(SAME, live=False, check=True).asked == ["compare"]


@pytest.mark.parametrize(
    ("found", "connection", "refused"),
    [
        ({"logins": ["192.168.1.9"]}, Connection("local"), True),
        ({"logins": ["192.168.1.9"], "from_elsewhere": False}, Connection(), True),  # ssh to 127.0.0.1
        ({"logins": ["192.168.1.9"]}, Connection(), False),  # Ansible's own, which a new one stands for
        ({"logins": []}, Connection("local"), False),  # at its own screen
    ],
)
def test_a_machine_does_not_confirm_to_itself_what_may_cut_off_who_is_logged_in(
    action, found, connection, refused
):
    if refused:
        with pytest.raises(Exception, match=r"by SSH, from 192\.168\.1\.9.* Run it from another machine"):
            action(found, connection, cuts_logins=True)
    else:
        assert action(found, connection, cuts_logins=True).changed
    assert action(found, connection).changed  # a change that leaves logins alone
    assert not action({**found, **SAME}, connection, cuts_logins=True).changed


def test_a_change_that_waits_is_put_back_without_files_and_in_the_way_of_a_change(action):
    waits = {"armed": ["network"]}
    with pytest.raises(Exception, match="A change of network waits to be confirmed on this host"):
        action({**waits, **SAME})
    done = action({**waits, "files": []}, files=[])
    assert done.changed and done.asked == ["compare", "status", "restore", "status", "tell"]
    assert "earlier run" in done.warnings[0]
    seen = action({**waits, "files": []}, files=[], check=True)
    assert seen.changed and seen.asked == ["compare"] and "would be put back first" in seen.warnings[0]
    assert not action({"files": []}, files=[]).changed
    report = {
        "at": "2026-11-27",
        "change": "addresses",
        "why": "nobody came",
        "undone": ["a put back"],
        "commands": [],
    }
    told = action({"untold": [report], "files": []}, files=[])
    assert not told.changed and told.asked == ["compare", "tell"]
    assert told.warnings == ["of an earlier run, 2026-11-27: addresses: nobody came. Undone: a put back."]
    damaged = action({**waits, "files": [], "guard_current": False}, files=[])
    assert damaged.asked.index("install") < damaged.asked.index("restore")


def test_a_new_address_is_told_before_and_as_soon_as_it_is_confirmed(action, tmp_path):
    file = tmp_path / "a b" / "known_hosts"
    connection = Connection(settings=["-o", f'UserKnownHostsFile="{file}"'])
    done = action({}, connection, addresses=["192.168.1.100"])
    assert done.address == "192.168.1.100"
    assert "node1 moves from 192.168.1.50 to 192.168.1.100" in done.said
    assert "node1 is at 192.168.1.100 now." in done.said and "ansible_host: 192.168.1.100" in done.said
    assert file.read_text() == "192.168.1.100 ssh-ed25519 AAAA\n"


def test_a_host_says_its_own_keys_and_nothing_else_for_known_hosts(action, tmp_path):
    """One in other hands would make its authority that of all hosts."""
    connection = Connection(settings=["-o", f"UserKnownHostsFile={tmp_path / 'known_hosts'}"])
    keys = [
        "ssh-ed25519 AAAA\n@cert-authority * ssh-ed25519 BBBB",
        "* ssh-ed25519 BBBB",
        "",
        "ssh-rsa CCCC me\n",
    ]
    action({"host_keys": keys}, connection, addresses=["192.168.1.100"])
    assert (tmp_path / "known_hosts").read_text() == "192.168.1.100 ssh-rsa CCCC\n"


@pytest.mark.parametrize("file", ["none", "/dev/null", "/proc/nowhere/known_hosts"])
def test_a_confirmed_change_does_not_fail_where_no_key_can_be_kept(action, file):
    """The host has moved by then: the play must go on at its new address."""
    connection = Connection(settings=["-o", f"UserKnownHostsFile={file}"])
    done = action({}, connection, addresses=["192.168.1.100"])
    assert done.address == "192.168.1.100"
    assert ("cannot be written" in done.said) == file.startswith("/proc")


def test_a_local_connection_has_no_address_to_move_to(action):
    done = action({}, Connection("local"), addresses=["192.168.1.100"])
    assert done.address == "localhost" and done.said == ""
