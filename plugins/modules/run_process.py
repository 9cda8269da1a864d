#!/usr/bin/python
"""Keeps a run as plain background processes, where there is no systemd to do it."""

from __future__ import annotations

DOCUMENTATION = r"""
module: run_process
short_description: Start or stop a run on a host without systemd
description:
  - Starts the command that the unit trainyard@RUN would start, in a session of its own, so that it outlives the
    controller and does not hear its Ctrl-C.
  - Stops it by a TERM to the launcher, which lets the ranks save; after O(patience) seconds by a KILL to every
    process of the run.
  - Where the launcher was killed, C(status.json) has the last word of who kept it, once no process of the run is left.
options:
  state: {type: str, choices: [started, stopped], default: started, description: Whether the run shall live.}
  run_dir: {type: path, required: true, description: The run's directory.}
  env_file: {type: path, description: "RUN.env; needed to start."}
  command: {type: list, elements: str, description: The launcher and its arguments; needed to start.}
  patience: {type: int, default: 60, description: Seconds between the TERM and the KILL.}
attributes:
  check_mode: {support: full, description: Says what would change.}
author: [Trainyard]
"""

EXAMPLES = r"""
- name: Start the run
  run_process:
    run_dir: /home/me/trainyard/.trainyard/node1/var/runs/first
    env_file: /home/me/trainyard/.trainyard/node1/etc/runs/first.env
    command: [/home/me/trainyard/.trainyard/node1/opt/current/bin/trainer, launch, /home/me/first.yaml]
"""

RETURN = r"""
pids: {description: The run's processes after the module, type: list, elements: int, returned: always}
"""

import os
import signal
import subprocess
import sys
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.host_runs import VARIABLE, run_processes, run_variables

LAST_CALL = 30.0  # seconds for a launcher that is asked a second time
KILLED = 30  # seconds for the kernel to end what was killed


class Unkillable(Exception):
    """Processes that nothing ends, in words."""


# The shell outlives a TERM (its child hears it, too) to leave the exit code beside the run, as systemd would
# keep it. A launcher that is killed comes back under systemd; here it does not, and the run has ended once the ranks,
# which save meanwhile, have. The processes are listed before grep is one of them.
KEEPER = r"""
trap : TERM
python=$1 last_word=$2; shift 2
"$@" & child=$!
echo $child > "$0/launch.pid"
wait $child; code=$?
while kill -0 $child 2>/dev/null; do wait $child; code=$?; done
set -- /proc/[0-9]*/environ
while env -u VARIABLE grep -lszxF "VARIABLE=$0" "$@" | env -u VARIABLE grep -qvxF "/proc/$$/environ"; do
    sleep 0.2
    set -- /proc/[0-9]*/environ
done
case $code in
    0) ;;
    75 | 143) "$python" -c "$last_word" "$0" stopped "stopped on request";;
    137) "$python" -c "$last_word" "$0" failed "its launcher was killed; its last checkpoint counts";;
    *) "$python" -c "$last_word" "$0" failed "its launcher ended with $code; logs/launch.log says more";;
esac
echo $code > "$0/.exit" && mv "$0/.exit" "$0/exit"
""".replace("VARIABLE", VARIABLE)
# Has status.json say how a run has ended whose launcher could not, for who looks at it, and for the run behind it in
# the queue, which would wait for ever.
LAST_WORD = """
import json, os, sys, time

run_dir, state, reason = sys.argv[1:]
path, new = (os.path.join(run_dir, name) for name in ("status.json", ".status.json"))
try:
    with open(path, encoding="utf-8") as file:
        status = dict(json.load(file))
except (OSError, ValueError, TypeError):
    status = {}
if status.get("state") not in ("finished", "stopped", "failed"):
    # The launch: another launcher of this very start may yet come to be.
    status.update(state=state, reason=reason, launch=None, updated=time.time())
    with open(new, "w", encoding="utf-8") as file:
        file.write(json.dumps(status) + "\\n")
    os.replace(new, path)
"""


def start(run_dir: str, env_file: str, command: list[str]) -> None:
    """Start the keeper and return once it runs."""
    if os.path.exists(os.path.join(run_dir, "exit")):
        os.unlink(os.path.join(run_dir, "exit"))
    environment = {**os.environ, **run_variables(env_file), VARIABLE: run_dir}
    with open(os.path.join(run_dir, "logs", "launch.log"), "ab") as log:
        subprocess.Popen(
            ["/bin/sh", "-c", KEEPER, run_dir, sys.executable, LAST_WORD, *command],
            env=environment,
            cwd=run_dir,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def stop(run_dir: str, patience: float) -> None:
    """Ask the launcher to end, wait, and then end whatever is left."""
    try:
        with open(os.path.join(run_dir, "launch.pid"), encoding="ascii") as file:
            launcher = int(file.read())
    except (OSError, ValueError):
        launcher = -1
    alone = launcher not in run_processes(run_dir)
    # Asked twice, it ends its ranks and says so: what SIGKILL ends has no last word.
    for seconds in (patience, LAST_CALL):
        if launcher not in run_processes(run_dir):
            break
        os.kill(launcher, signal.SIGTERM)
        deadline = time.monotonic() + seconds
        while run_processes(run_dir) and time.monotonic() < deadline:
            time.sleep(0.2)
    deadline = time.monotonic() + KILLED
    while left := run_processes(run_dir):
        if time.monotonic() > deadline:
            raise Unkillable(
                f"processes {', '.join(map(str, left))} were killed {KILLED} s ago, and do not end: a disk or a driver "
                "hangs. See what the kernel says of it (dmesg); it may take a reboot"
            )
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.1)
    ended = "its launcher was gone" if alone else f"it had not ended after {patience:g} s and was killed"
    why = f"stopped on request; {ended}: its last checkpoint counts"
    subprocess.run([sys.executable, "-c", LAST_WORD, run_dir, "stopped", why], check=False)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["started", "stopped"], "default": "started"},
            "run_dir": {"type": "path", "required": True},
            "env_file": {"type": "path"},
            "command": {"type": "list", "elements": "str"},
            "patience": {"type": "int", "default": 60},
        },
        required_if=[("state", "started", ("env_file", "command"))],
        supports_check_mode=True,
    )
    p = module.params
    alive = bool(run_processes(p["run_dir"]))
    changed = alive != (p["state"] == "started")
    if changed and not module.check_mode:
        if p["state"] == "started":
            start(p["run_dir"], p["env_file"], p["command"])
        else:
            try:
                stop(p["run_dir"], p["patience"])
            except Unkillable as fault:
                module.fail_json(msg=str(fault))
    module.exit_json(changed=changed, pids=sorted(run_processes(p["run_dir"])))


if __name__ == "__main__":
    main()
