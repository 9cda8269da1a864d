"""Both commands on this machine as two nodes: a run from nothing, and a machine that stays as it was."""

import os
import stat
from pathlib import Path

import pytest
import yaml
from yard import ROOT, SMALL, Yard, changed, failures, said

pytestmark = pytest.mark.full  # the short form has test_house_demo, which goes the same way

KEPT = ("/etc", "/usr/local", "/opt", "/srv")


class Machine(Yard):
    """Two nodes that site.yml is still to deploy; the environment is the checkout's, so that it is made once."""

    def __init__(self, path):
        super().__init__(path)
        inventory = yaml.safe_load(self.inventory.read_text())
        inventory["all"]["children"]["cluster"]["vars"]["python_env_dir"] = str(ROOT / ".trainyard/env")
        self.inventory.write_text(yaml.safe_dump(inventory, sort_keys=False))
        self.home = path / "home"
        self.home.mkdir()

    def deploy(self, node, **_):
        """Leave it to site.yml."""

    def environment(self):
        # pip asks rustc for its version; where that is rustup's, it would make a home for itself.
        return {**super().environment(), "HOME": str(self.home), "RUSTUP_HOME": str(self.path / "rustup")}


@pytest.fixture
def machine(tmp_path):
    path = tmp_path / "my machine"
    path.mkdir()
    machine = Machine(path)
    yield machine
    machine.clear()


def snapshot(top):
    """{path: (mode, owner, size, time of change)} of all that lies below `top`, links not followed."""
    found = {}
    for directory, names, files in os.walk(top):
        for name in [*names, *files]:
            path = os.path.join(directory, name)
            try:
                facts = os.lstat(path)
            except FileNotFoundError:
                continue
            size = 0 if stat.S_ISDIR(facts.st_mode) else facts.st_size
            found[path] = (facts.st_mode, facts.st_uid, size, facts.st_mtime_ns)
    return found


def test_from_nothing_to_a_model_and_the_machine_stays_as_it_was(machine):
    before = {top: snapshot(top) for top in KEPT}
    units = sorted(Path("/etc/systemd/system").glob("trainyard*"))

    site = machine.play("site.yml")
    assert site.rc == 0, said(site)
    again = machine.play("site.yml")
    assert again.rc == 0 and changed(again) == 0, said(again)
    run = machine.play(run="first", **SMALL)
    assert run.rc == 0 and not failures(run), said(run)

    assert {top: snapshot(top) for top in KEPT} == before
    assert sorted(Path("/etc/systemd/system").glob("trainyard*")) == units
    assert (machine.results / "first/model/model.safetensors").exists()
    # Where a user's programs keep what can go: Ansible's and pip's caches.
    assert {entry.name for entry in machine.home.iterdir()} <= {".ansible", ".cache", ".config"}
    assert {entry.name for entry in machine.path.iterdir() if entry.is_dir()} >= {"nodes", "runs"}


def test_the_default_inventory_asks_for_no_root_and_stays_in_the_checkout(repository):
    shown = yaml.safe_load((repository / "inventory/local/hosts.yml").read_text())
    variables = shown["all"]["children"]["cluster"]["vars"]
    assert variables["local_mode"] is True and variables["ansible_connection"] == "local"
    assert "ansible_become" not in variables
    places = [value for key, value in variables.items() if key.endswith("_dir")]
    assert len(places) >= 5
    for place in places:
        assert place.startswith(("{{ local_root }}", "{{ python_env_dir }}")), place
    assert variables["local_root"].endswith("/.trainyard")
