"""The guard on the host (roles/guard/files/guard.py), without systemd: every way for a change to end."""

import importlib.util
import json
import os
import stat
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "roles" / "guard" / "files" / "guard.py"


@pytest.fixture(scope="module")
def code():
    spec = importlib.util.spec_from_file_location("trainyard_guard", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.SETTLE = 0
    module.VERIFY_LIMIT = 0
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
        {"path": str(etc / "new" / "deep" / "file.conf"), "content": "made\n"},
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
    assert (etc / "new" / "deep" / "file.conf").read_text() == "made\n"

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


@pytest.mark.parametrize("path", ["relative", "/etc/../etc/passwd", "/etc/x/"])
def test_odd_paths_are_refused_before_anything_is_written(guard, path):
    with pytest.raises(Exception, match="cannot be guarded"):
        guard.change("network", change([{"path": path, "content": "x"}]))
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
