"""The distribution's units in whose place ours run: whose a mask is, and how they are given back."""

import os
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
NAME = "etcd.service"


class Ended(Exception):
    """The module has answered."""


class Host:
    """A host, its systemd, and dpkg as Ubuntu 22.04 has it: a package that is removed leaves its unit masked.

    `runs`, `enabled`: units that do, or are; `commands`: what systemctl was told; `fails`: its verbs that fail.
    """

    def __init__(self, root, module):
        self.module, self.root = module, root
        self.runs, self.enabled, self.commands, self.warned, self.fails = set(), set(), [], [], ()
        self.stale = False  # whether it has yet to read a mask
        for place in ("units", "apt", "packaged"):
            (root / place).mkdir()

    def path(self, place):
        return self.root / place / NAME

    @property
    def masked(self):
        return self.path("units").is_symlink() and os.readlink(self.path("units")) == "/dev/null"

    @property
    def note(self):
        return self.path("notes").read_text().strip() if self.path("notes").exists() else ""

    def mask(self):
        self.path("units").symlink_to("/dev/null")

    def bring_ours(self):
        (self.root / "units/ours@1.service").write_text("")

    def install(self):
        if self.path("apt").exists():
            self.path("apt").unlink()
            self.path("units").unlink()
        self.path("packaged").write_text("")
        self.enabled.add(NAME)
        if not self.path("units").is_symlink():
            self.runs.add(NAME)

    def uninstall(self):
        """Not purged."""
        self.path("packaged").unlink()
        self.runs.discard(NAME)
        if not self.path("units").is_symlink():
            self.mask()
            self.path("apt").write_text("")

    def run_command(self, words, check_rc=False):
        verb, *rest = words[1:]
        name = rest[0] if rest else ""
        if verb == "show":
            there = self.path("units").exists() or self.path("packaged").exists()
            load = "masked" if self.masked and not self.stale else "loaded" if there else "not-found"
            return 0, f"LoadState={load}\nActiveState={'active' if name in self.runs else 'inactive'}\n", ""
        self.commands.append(" ".join(words[1:]))
        if verb in self.fails:
            return 1, "", "no way"
        if verb == "start" and not self.masked:
            self.runs.add(name)
        if verb == "stop":
            self.runs.discard(name)
        if verb == "disable":
            self.enabled.discard(name)
        return 0, "", ""

    def have(self, state="masked", check=False, replace=False):
        """Whether the module changes something; what it fails with."""
        self.commands.clear()
        host, ours = self, f"{self.root}/units/ours@*.service"

        class Module:
            params = {"units": [{"name": NAME, "ours": ours}], "replace": replace, "state": state}
            check_mode, tmpdir, run_command = check, str(host.root), staticmethod(host.run_command)

            def __init__(self, **_):
                pass

            def atomic_move(self, source, target, **_):
                os.replace(source, target)

            def warn(self, text):
                host.warned.append(text)

            def exit_json(self, changed):
                raise Ended(changed)

            def fail_json(self, msg):
                raise Ended(msg)

        self.module.AnsibleModule = Module
        with pytest.raises(Ended) as ended:
            self.module.main()
        return ended.value.args[0]


@pytest.fixture
def host(tmp_path, load_module, monkeypatch):
    module = load_module("unit_mask")
    places = {"NOTES": "notes", "UNITS": "units", "APT": "apt"}
    for name, place in places.items():
        monkeypatch.setattr(module, name, str(tmp_path / place))
    monkeypatch.setattr(module, "PACKAGED", (str(tmp_path / "packaged"),))
    monkeypatch.setattr(module, "AnsibleModule", None)
    return Host(tmp_path, module)


def test_a_package_that_comes_does_not_run_and_is_left_disabled(host):
    assert host.have(check=True) is True and not host.masked and not host.note
    assert host.have() is True and host.masked and host.commands == ["daemon-reload"]
    assert host.have() is False and host.commands == []
    host.install()
    host.bring_ours()
    assert not host.runs and host.have() is False
    assert host.have("given_back", check=True) is True and host.masked and host.enabled
    assert host.have("given_back") is True
    assert not host.masked and not host.enabled and not host.runs
    assert host.commands == ["daemon-reload", f"disable {NAME}"]
    assert host.have("given_back") is False and host.commands == []


def test_a_mask_goes_whose_package_could_not_be_had_and_ours_never_came(host):
    host.have()
    assert host.have("given_back") is True and not host.masked
    assert host.commands == ["daemon-reload"]  # systemctl would fail to disable what is not there


def test_a_unit_that_is_gone_by_hand_is_no_fault(host):
    host.have()
    host.install()
    host.bring_ours()
    host.path("packaged").unlink()
    assert host.have("given_back") is True and not host.masked and host.commands == ["daemon-reload"]


@pytest.mark.parametrize("replace", [False, True])
def test_the_owners_own_mask_stays(host, replace):
    """Also where ours ran beside it, and where it comes later."""
    host.mask()
    assert host.have(replace=replace) is True and host.note == "left alone"
    host.bring_ours()
    host.install()
    assert host.have(replace=replace) is False
    assert host.have("given_back") is False and host.masked and host.enabled


def test_a_mask_that_the_owner_makes_on_a_host_without_ours_stays(host):
    host.mask()
    assert host.have("given_back") is False and host.masked


def test_one_that_is_there_is_left_alone_and_its_owner_may_mask_it_later(host):
    host.install()
    assert host.have() is True and not host.masked and host.runs
    host.bring_ours()
    host.mask()
    assert host.have() is False
    assert host.have("given_back") is False and host.masked and host.enabled


def test_an_owner_who_unmasks_it_keeps_it_so(host):
    host.have()
    host.install()
    host.path("units").unlink()
    host.runs.add(NAME)
    assert host.have() is False and not host.masked and host.runs
    assert host.have("given_back") is False and host.enabled and host.runs


@pytest.mark.parametrize("replace", [False, True])
def test_a_file_of_the_owners_own_in_its_place_stays(host, replace):
    host.path("units").write_text("[Service]\n")
    host.bring_ours()
    host.have(replace=replace)
    assert host.path("units").read_text() == "[Service]\n" and host.note == "left alone"
    host.have("given_back")
    assert host.path("units").read_text() == "[Service]\n"


def test_one_that_ran_is_stopped_and_runs_again(host):
    """In the order of the role opensm: the package first, which is there, and then ours."""
    host.install()
    assert host.have() is True and host.runs and not host.masked
    host.bring_ours()
    assert host.have(replace=True, check=True) is True and host.runs
    assert host.have(replace=True) is True and host.masked and not host.runs
    assert host.commands == [
        f"stop {NAME}",
        "daemon-reload",
    ]  # masked, systemd knows no more how it is stopped
    assert host.have() is False and host.have(replace=True) is False
    assert host.have("given_back", check=True) is True and host.masked
    assert host.have("given_back") is True and host.runs and host.enabled and not host.masked
    assert host.commands == ["daemon-reload", "stop ours@*.service", f"start {NAME}"]  # never two at once
    assert host.have("given_back") is False


def test_one_that_was_stopped_stays_stopped_and_as_enabled_as_it_was(host):
    for enabled in ({NAME}, set()):
        host.install()
        host.runs.clear()
        host.enabled = set(enabled)
        host.have(replace=True)
        assert host.masked
        assert host.have("given_back") is True
        assert host.enabled == enabled and not host.runs and not host.masked
        host.path("notes").unlink()


def test_one_that_ran_runs_again_wherever_it_was_interrupted(host):
    host.install()
    host.have()
    host.fails = ("stop",)
    said = host.have(replace=True)
    assert "`systemctl stop etcd.service`: no way; expected it to stop" in said and host.note == "running"
    host.fails = ()
    host.run_command(["systemctl", "stop", NAME])  # and killed before it was masked
    assert host.have() is False and not host.masked
    assert host.have("given_back", check=True) is True and not host.runs
    assert host.have("given_back") is True and host.runs
    host.have(replace=True)
    host.path("units").unlink()  # given back, and killed before it was started
    assert host.have("given_back") is True and host.runs


def test_one_that_does_not_run_again_stops_nothing(host):
    host.install()
    host.have(replace=True)
    host.fails = ("start",)
    assert host.have("given_back") is True and not host.masked
    (warned,) = host.warned
    assert warned.startswith("`systemctl start etcd.service`: no way; expected it to run again")


def test_a_package_that_was_removed_and_comes_again_does_not_run(host):
    """Ubuntu 22.04: apt would undo the mask that it left."""
    host.install()
    host.uninstall()
    assert host.have() is True and host.masked and not host.path("apt").exists()
    host.install()
    assert host.masked and not host.runs
    host.bring_ours()
    assert host.have("given_back") is True and not host.masked and not host.enabled and not host.runs


def test_a_mask_that_a_package_has_left_is_apts_again_where_that_did_not_come(host):
    host.install()
    host.uninstall()
    host.have()
    assert host.have("given_back") is True and host.masked and host.path("apt").exists()
    assert host.have("given_back") is False
    host.install()
    assert host.runs and not host.masked


def test_a_package_that_its_owner_has_removed_is_masked_when_it_comes_with_ours(host):
    host.install()
    host.have()
    assert host.note == "left alone"
    host.uninstall()
    assert host.have() is True
    host.install()
    assert host.masked and not host.runs


@pytest.mark.parametrize("ours", [True, False])
def test_a_mask_without_a_note_beside_ours_is_an_earlier_releases(host, ours):
    host.mask()
    host.install()
    if ours:
        host.bring_ours()
    assert host.have("given_back", check=True) is ours and host.masked
    assert host.have("given_back") is ours
    assert host.masked is not ours and (NAME in host.enabled) is not ours


def test_a_mask_of_an_earlier_releases_stays_ours_when_ours_changes(host):
    host.mask()
    host.install()
    host.bring_ours()
    assert host.have(replace=True) is True and host.note == "absent"
    assert host.have(replace=True) is False
    (host.root / "units/ours@1.service").unlink()
    assert host.have("given_back") is True and not host.masked


def test_check_mode_disables_nothing_where_systemd_has_yet_to_read_the_mask(host):
    host.have()
    host.path("packaged").write_text("")
    host.stale = True
    assert host.have("given_back", check=True) is True and host.commands == []


def test_a_fault_names_the_file(host):
    (host.root / "notes").write_text("")
    assert host.have() == f"{host.root}/notes/{NAME}: Not a directory"
    assert not host.masked


# ---- the roles ----


def tasks(items):
    for item in items:
        yield item
        for key in ("block", "rescue", "always"):
            yield from tasks(item.get(key, ()))


def uses():
    """Every use of the module: (role, state)."""
    for path in sorted(ROOT.glob("roles/*/tasks/*.yml")):
        for task in tasks(yaml.safe_load(path.read_text())):
            if "unit_mask" in task:
                yield path.parts[-3], task["unit_mask"].get("state", "masked")


def dicts(value):
    """All dictionaries in a value."""
    if isinstance(value, dict):
        yield value
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from dicts(one)


def test_every_role_that_masks_gives_back_and_removes_its_notes(load_module):
    masking = {role for role, state in uses() if state == "masked"}
    assert masking == {"etcd", "monitoring", "opensm", "storage"}
    assert masking == {role for role, state in uses() if state == "given_back"}
    for role in masking:
        variables = yaml.safe_load((ROOT / f"roles/{role}/vars/main.yml").read_text())
        units = {one["name"] for one in dicts(variables) if one.keys() == {"name", "ours"}}
        places = (load_module("unit_mask").NOTES, f"{{{{ _{role}_notes }}}}")
        noted = {unit for one in dicts(variables) if one.get("path") in places for unit in one["inside"]}
        assert units == noted != set(), role
        assert variables.get(f"_{role}_notes", places[0]) == places[0]


def test_nothing_else_masks_a_unit():
    """What has no note would not be given back."""
    for path in sorted(ROOT.glob("roles/*/tasks/*.yml")):
        for task in tasks(yaml.safe_load(path.read_text())):
            assert task.get("ansible.builtin.file", {}).get("src") != "/dev/null", path
            assert "masked" not in task.get("ansible.builtin.systemd_service", {}), path
