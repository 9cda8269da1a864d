#!/usr/bin/python
"""Removes runs from a host, with no more rights than the service user has where that user could have put links."""

from __future__ import annotations

DOCUMENTATION = r"""
module: run_retire
short_description: Remove runs from a host
description: >-
  Removes the directories of runs that have ended, as their owner, and what the runs were told. A unit that would start
  one at the next boot, without its files, is disabled first.
options:
  runs: {type: list, elements: str, required: true, description: Their names.}
  keeper: {type: str, choices: [systemd, process], required: true, description: What keeps runs alive on this host.}
  etc_dir: {type: path, required: true, description: "Where runs/RUN.yaml is kept."}
  state_dir: {type: path, required: true, description: "Where runs/RUN lies."}
  user: {type: str, description: The service user; not given where there is no systemd.}
attributes:
  check_mode: {support: full, description: Says what would go.}
author: [Trainyard]
"""

EXAMPLES = r"""
- name: Remove an old run
  run_retire:
    runs: [first]
    keeper: systemd
    etc_dir: /etc/trainyard
    state_dir: /var/lib/trainyard
    user: trainyard
"""

RETURN = r"""
removed: {description: "Name to bytes of each run that was there.", type: dict, returned: always}
"""

import contextlib
import os
import shutil

from ansible.module_utils.as_user import acting_as
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.host_runs import UNIT, active_runs, runs_at_boot


def size(path: str) -> int:
    """Bytes of all files below a directory; links are not followed."""
    found = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # another host that shares it is at it, too
                found += os.lstat(os.path.join(folder, name)).st_size
    return found


def _kept(function, path, why) -> None:
    """Of what cannot be removed, what is gone already is no fault."""
    if not isinstance(why[1], FileNotFoundError):
        raise why[1]


def retire(runs: list[str], state_dir: str, remove: bool) -> dict[str, int]:
    """The runs that were there, with their bytes. Raises OSError."""
    removed = {}
    for run in runs:
        path = os.path.join(state_dir, "runs", run)
        if (
            os.path.basename(run) != run
            or run in ("", ".", "..")
            or os.path.islink(path)
            or not os.path.isdir(path)
        ):
            continue
        removed[run] = size(path)
        if remove:
            shutil.rmtree(path, onerror=_kept)
    return removed


def disable(run_command, keeper: str, runs: list[str]) -> str:
    """Keep these runs from starting at boot, as those would that nobody followed to their end; why it failed, or ""."""
    units = [f"{UNIT}{run}.service" for run in runs if run in runs_at_boot(keeper)]
    rc, out, error = run_command(["systemctl", "disable", *units]) if units else (0, "", "")
    return f"systemctl disable {' '.join(units)}: {(error or out).strip()}" if rc else ""


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "runs": {"type": "list", "elements": "str", "required": True},
            "keeper": {"type": "str", "choices": ["systemd", "process"], "required": True},
            "etc_dir": {"type": "path", "required": True},
            "state_dir": {"type": "path", "required": True},
            "user": {"type": "str"},
        },
        supports_check_mode=True,
    )
    p = module.params
    active = active_runs(module.run_command, p["keeper"], p["state_dir"])
    runs = [run for run in p["runs"] if run not in active]  # one may have been started since the look
    why = "" if module.check_mode else disable(module.run_command, p["keeper"], runs)
    if why:
        module.fail_json(
            msg=f"{why}. No run was removed: its unit would fail at each boot. Cure what systemd names; then again."
        )
    try:
        with acting_as(p["user"]) if p["user"] else contextlib.nullcontext():
            removed = retire(runs, p["state_dir"], not module.check_mode)
    except KeyError:
        module.fail_json(msg=f"There is no user {p['user']} on this host; run site.yml, which makes it.")
    except OSError as error:
        module.fail_json(
            msg=f"{error.filename}: {error.strerror} for the service user. See whose it is: namei -l {error.filename}"
        )
    for run in removed if not module.check_mode else ():
        for ending in ("env", "yaml"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(p["etc_dir"], "runs", f"{run}.{ending}"))
    module.exit_json(changed=bool(removed), removed=removed)


if __name__ == "__main__":
    main()
