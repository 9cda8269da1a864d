#!/usr/bin/python
"""One command of the trainer on a host, as the service user, behind a run that trains there."""

from __future__ import annotations

DOCUMENTATION = r"""
module: trainer_command
short_description: Run a command of the trainer to its end, without disturbing a run
description:
  - On a host with systemd it runs as a unit of its own, which may write below O(state_dir) alone. By its name a start
    of a run knows it where it would be in the way.
  - Without systemd it runs as the user that Ansible logs in as.
  - What it fetches comes by the proxy that the host's own environment names (C(/etc/environment)).
  - The kernel, if memory runs out, ends it before any rank.
options:
  program: {type: path, required: true, description: The trainer.}
  arguments: {type: list, elements: str, required: true, description: Words; no shell sees them.}
  user: {type: str, description: The service user; not given where there is no systemd.}
  state_dir: {type: path, required: true, description: The only place where it may write.}
  behind: {type: bool, default: false, description: "Whether it stands back: one thread, lowest priority, no GPU."}
  most: {type: int, default: 0, description: "Seconds after which its unit is ended; 0: never."}
  creates: {type: path, description: Where this is, nothing is done.}
  variables: {type: dict, default: {}, description: What its environment has besides.}
  credentials:
    type: dict
    default: {}
    description:
      - Secrets by name, which a unit reads below C($CREDENTIALS_DIRECTORY); in no command line and no log.
      - Only with O(user).
attributes:
  check_mode: {support: full, description: Runs nothing.}
author: [Trainyard]
"""

EXAMPLES = r"""
- name: Write a text
  trainer_command:
    program: /opt/trainyard/current/bin/trainer
    arguments: [generate, /var/lib/trainyard/runs/first, --prompt=She]
    user: trainyard
    state_dir: /var/lib/trainyard
"""

RETURN = r"""
text: {description: What it printed., type: str, returned: success}
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import tempfile
import time
import uuid

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.host_runs import WORK
from ansible.module_utils.way_out import way_out

PR_SET_PDEATHSIG = 1
OOM_FIRST = 1000  # of oom_score_adj: ended before all others
# Niceness does not count between units; their weights do.
BEHIND = {"CPUWeight": 1, "IOWeight": 1, "Nice": 19}
UNIT = {
    "OOMScoreAdjust": OOM_FIRST,
    "LimitMEMLOCK": "infinity",  # as a run's unit: with less RDMA fails, or NCCL goes by TCP without a word
    "UMask": "0027",
    "NoNewPrivileges": "yes",
    "CapabilityBoundingSet": "",
    "ProtectSystem": "strict",
    "ProtectHome": "yes",
    "PrivateTmp": "yes",
    "ProtectKernelTunables": "yes",
    "ProtectKernelModules": "yes",
    "ProtectControlGroups": "yes",
    "RestrictSUIDSGID": "yes",
    "LockPersonality": "yes",
}


LIGHT = ("fetch", "export")  # commands that no card is for, and that no run need wait for
OUT = "way-out"  # the file that a unit has it from: it may hold a proxy's password
# Below the state directory, the service user's home, of which a command may not touch the rest.
WRITTEN = ("runs", "cache")


def variables(behind: bool) -> dict[str, str]:
    """What the command's environment has besides."""
    few = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    return {"LANG": "C.UTF-8", **(few if behind else {})}


def environment_file(told: dict[str, str]) -> str:
    """Variables as systemd reads them of a file."""
    quoted = {name: value.replace("\\", "\\\\").replace('"', '\\"') for name, value in told.items()}
    return "".join(f'{name}="{value}"\n' for name, value in quoted.items())


def unit_name(verb: str, behind: bool) -> str:
    """Of a command of the trainer, another one each time."""
    kind = "trainyard-behind-" if behind or verb in LIGHT else WORK
    return f"{kind}{verb}-{uuid.uuid4().hex[:8]}"


def as_unit(
    command: list[str],
    user: str,
    state_dir: str,
    behind: bool,
    more: dict[str, str],
    secrets: dict[str, str],
    environment: str = "",
    most: int = 0,
) -> list[str]:
    """The command line that runs `command` as a unit of its own, and waits for it.

    secrets: the files of its credentials, by their names. environment: a file of variables. most: seconds, or 0.
    """
    # What is fetched is linked from the cache to incoming/, which systemd's mounts of each alone would not let through.
    written = [state_dir] if command[1:2] == ["fetch"] else [f"-{state_dir}/{name}" for name in WRITTEN]
    properties = {**UNIT, **(BEHIND if behind else {}), "ReadWritePaths": " ".join(written)}
    properties["InaccessiblePaths"] = f"-{state_dir}/.ssh"
    if environment:
        properties["EnvironmentFile"] = environment
    if most:
        properties["RuntimeMaxSec"] = most
    return [
        *("systemd-run", "--quiet", "--wait", "--pipe", "--collect", f"--uid={user}", f"--gid={user}"),
        f"--unit={unit_name(command[1], behind)}",
        f"--working-directory={state_dir}",
        *(f"--property={name}={value}" for name, value in properties.items()),
        *(f"--property=LoadCredential={name}:{path}" for name, path in secrets.items()),
        f"--setenv=HOME={state_dir}/cache",
        *(f"--setenv={name}={value}" for name, value in {**variables(behind), **more}.items()),
        "--",
        # systemd puts variables into a unit's words, except where the mark is doubled.
        *(word.replace("$", "$$") for word in command),
    ]


@contextlib.contextmanager
def secret_files(credentials: dict[str, str]):
    """The credentials as files in memory that root alone reads, gone with the command: {name: path}."""
    with tempfile.TemporaryDirectory(
        prefix="trainyard-", dir="/run" if os.path.isdir("/run") else None
    ) as folder:
        paths = {}
        for name, value in credentials.items():
            paths[name] = os.path.join(folder, name)
            with open(
                os.open(paths[name], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8"
            ) as file:
                file.write(value)
        yield paths


def in_child(behind: bool) -> None:
    """Be the first to go when memory runs out, and live no longer than the parent."""
    if behind:
        os.nice(19)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write(str(OOM_FIRST))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def reason(code: int, said: str) -> str:
    """Why a command failed: its last `error:`, or its last lines."""
    if code in (-signal.SIGKILL, 128 + signal.SIGKILL, 255) and not said.strip():
        return "it was killed: the host's memory ran out, or somebody ended it; see `journalctl -k` there"
    _, mark, text = said.rpartition("error: ")
    return text.strip() if mark else "\n".join(said.strip().splitlines()[-5:]) or f"it ended with {code}"


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "program": {"type": "path", "required": True},
            "arguments": {"type": "list", "elements": "str", "required": True},
            "user": {"type": "str"},
            "state_dir": {"type": "path", "required": True},
            "behind": {"type": "bool", "default": False},
            "most": {"type": "int", "default": 0},
            "creates": {"type": "path"},
            "variables": {"type": "dict", "default": {}},
            "credentials": {"type": "dict", "default": {}, "no_log": True},
        },
        supports_check_mode=True,
    )
    p = module.params
    if p["creates"] and os.path.exists(p["creates"]):
        module.exit_json(changed=False, text="")
    if module.check_mode:
        module.exit_json(changed=bool(p["creates"]), text="")
    if not os.access(p["program"], os.X_OK):
        module.fail_json(msg=f"{p['program']}: the trainer is not deployed there; run site.yml first")
    command = [p["program"], *p["arguments"]]
    more = {name: str(value) for name, value in p["variables"].items()}
    environment = {**os.environ, **variables(p["behind"]), **more}
    options = {"env": environment, "preexec_fn": lambda: in_child(p["behind"])}
    with contextlib.ExitStack() as kept:
        if p["user"]:
            told = environment_file(way_out()) if p["arguments"][:1] == ["fetch"] else ""
            files = {**p["credentials"], **({OUT: told} if told else {})}
            secrets = kept.enter_context(secret_files(files)) if files else {}
            out = secrets.pop(OUT, "")
            command = as_unit(command, p["user"], p["state_dir"], p["behind"], more, secrets, out, p["most"])
            options = {}
        begin = time.monotonic()
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, cwd="/", **options)
    said = done.stderr.decode(errors="replace")
    if done.returncode and p["user"] and 0 < p["most"] <= time.monotonic() - begin:
        module.fail_json(
            msg=f"it had not ended after {p['most']} s, and was ended: a disk or a driver may hang there (`dmesg`)",
            rc=done.returncode,
        )
    if done.returncode:
        module.fail_json(msg=reason(done.returncode, said), rc=done.returncode)
    module.exit_json(changed=bool(p["creates"]), text=done.stdout.decode(errors="replace"))


if __name__ == "__main__":
    main()
