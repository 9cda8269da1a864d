#!/usr/bin/python
"""Mask units of the distribution's, in whose place ours run, and give them back as they were."""

from __future__ import annotations

DOCUMENTATION = r"""
module: unit_mask
short_description: Mask units of the distribution's, and give them back as they were
description:
  - What a unit was is noted in C(/var/lib/trainyard-units) before it is masked. A mask without a note is its owner's,
    and stays; but for an earlier release's, which made none.
  - A unit that somebody has put into C(/etc/systemd/system) is left alone. So is one that is there already, unless
    O(replace).
  - A package that was removed and not purged leaves its unit masked on Ubuntu 22.04, until it is installed again. That
    mask becomes ours, which apt does not undo, and apt's again when it is given back without the package.
  - Notes stay when units are given back, since they tell a run that goes on after an interrupted one that there is
    nothing more to undo. host_made removes them, last.
options:
  units:
    description: The units.
    type: list
    elements: dict
    required: true
    options:
      name: {type: str, required: true, description: "Its name, with its kind."}
      ours:
        description:
          - A path, perhaps with wildcards, that comes after the mask. Where it is there, and no note, an earlier
            release has masked the unit.
          - A unit of ours is stopped before the one in whose place it ran runs again.
        type: str
        required: true
  replace: {type: bool, default: false, description: Whether one that is there already is stopped and masked.}
  state: {type: str, choices: [masked, given_back], default: masked, description: What becomes of them.}
author: [Trainyard]
"""

EXAMPLES = r"""
- name: Keep the distribution's own instance from starting
  unit_mask:
    units: [{name: etcd.service, ours: /etc/systemd/system/trainyard-etcd.service}]
"""

import contextlib
import glob
import os

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.managed_block import read, write

NOTES = "/var/lib/trainyard-units"
UNITS = "/etc/systemd/system"
# A file for each mask that a package has left (deb-systemd-helper), and undoes when it comes again.
APT = "/var/lib/systemd/deb-systemd-helper-masked"
PACKAGED = ("/usr/lib/systemd/system", "/lib/systemd/system")

# What a unit was, as a note says it: REMOVED with its package, which left the mask; THEIRS is left alone.
ABSENT, REMOVED, STOPPED, RUNNING, THEIRS = "absent", "removed", "stopped", "running", "left alone"


class Unit:
    """A unit of the distribution's on this host."""

    def __init__(self, module: AnsibleModule, name: str, ours: str):
        self.module, self.name, self.ours = module, name, ours
        self.mask, self.apts = f"{UNITS}/{name}", f"{APT}/{name}"
        self.note = read(f"{NOTES}/{name}").strip()
        self.unmasked = False
        self.early = not self.note and bool(glob.glob(ours))  # of an earlier release

    @property
    def masked(self) -> bool:
        return os.path.islink(self.mask) and os.readlink(self.mask) == "/dev/null"

    def systemctl(self, *words: str) -> str:
        """What is wrong; "" where it went well."""
        rc, out, err = self.module.run_command(["systemctl", *words])
        return f"`systemctl {' '.join(words)}`: {(err or out).strip()}" if rc else ""

    def known(self) -> tuple[str, bool]:
        """What systemd knows of it: not-found, masked or loaded, and whether it runs."""
        show = ["systemctl", "show", self.name, "--property=LoadState,ActiveState"]
        _, out, _ = self.module.run_command(show, check_rc=True)
        said = dict(line.split("=", 1) for line in out.splitlines())
        return said["LoadState"], said["ActiveState"] not in ("inactive", "failed")

    def now(self, replace: bool) -> str:
        """What it is, as a note says it."""
        if self.masked and os.path.exists(self.apts):
            return REMOVED
        if os.path.lexists(self.mask):
            return ABSENT if self.masked and self.early else THEIRS
        load, runs = self.known()
        if load == "not-found":
            return ABSENT
        if load == "masked" or not replace:
            return THEIRS
        return RUNNING if runs else STOPPED

    def have_masked(self, replace: bool) -> bool:
        """Note what it was, and mask it; whether that changes something."""
        now = self.now(replace)
        note = now if self.note in ("", THEIRS) else self.note
        masks = now != THEIRS and (not self.masked or os.path.exists(self.apts))
        if not self.module.check_mode:
            if note != self.note:
                os.makedirs(NOTES, mode=0o755, exist_ok=True)
                write(self.module, f"{NOTES}/{self.name}", f"{note}\n")
            if masks:
                self._mask(now)
        return masks or note != self.note

    def _mask(self, now: str) -> None:
        # Before it is masked: how it is stopped is said in its own file.
        if now == RUNNING and (fault := self.systemctl("stop", self.name)):
            self.module.fail_json(
                msg=f"{fault}; expected it to stop, so that ours runs in its place. Stop it there."
            )
        if not self.masked:
            os.symlink("/dev/null", self.mask)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.apts)

    def was(self) -> str:
        """What it is to be again, as a note says it."""
        return self.note or (ABSENT if self.early else THEIRS)

    def unmask(self) -> bool:
        """Undo our mask; whether there was one."""
        if not self.masked or self.was() == THEIRS or os.path.exists(self.apts):
            return False
        left = self.was() == REMOVED and not any(os.path.exists(f"{place}/{self.name}") for place in PACKAGED)
        if not self.module.check_mode:
            if left:
                os.makedirs(APT, exist_ok=True)
                with open(self.apts, "w", encoding="ascii"):
                    pass
            else:
                os.unlink(self.mask)
        self.unmasked = True
        return True

    def settle(self) -> bool:
        """Have an unmasked unit disabled, or run again; whether that changes something."""
        if not self.unmasked and self.was() != RUNNING:
            return False
        load, runs = self.known()
        if load != "loaded":
            return False
        if self.was() == RUNNING and not runs:
            if not self.module.check_mode:
                self.systemctl("stop", os.path.basename(self.ours))
                self._tell(self.systemctl("start", self.name), "run again, as it did before")
            return True
        # By its package, which came beside our mask. One that was there before is enabled or not, as it was: a mask
        # leaves the links that say so.
        if self.was() in (ABSENT, REMOVED) and not self.module.check_mode:
            self._tell(self.systemctl("disable", self.name), "be disabled, as its package stays")
        return False

    def _tell(self, fault: str, expected: str) -> None:
        if fault:
            self.module.warn(f"{fault}; expected it to {expected}. See `systemctl status {self.name}`.")


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "units": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {name: {"type": "str", "required": True} for name in ("name", "ours")},
            },
            "replace": {"type": "bool", "default": False},
            "state": {"type": "str", "choices": ["masked", "given_back"], "default": "masked"},
        },
        supports_check_mode=True,
    )
    masked = module.params["state"] == "masked"
    try:
        units = [Unit(module, **one) for one in module.params["units"]]
        done = [unit.have_masked(module.params["replace"]) if masked else unit.unmask() for unit in units]
    except OSError as error:
        module.fail_json(msg=f"{error.filename}: {error.strerror}")
    if any(done) and not module.check_mode:
        module.run_command(["systemctl", "daemon-reload"], check_rc=True)
    if not masked:
        done += [unit.settle() for unit in units]
    module.exit_json(changed=any(done))


if __name__ == "__main__":
    main()
