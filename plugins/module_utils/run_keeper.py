"""What keeps a run on a host (systemd, or a group of processes), asked by a shell command over a connection."""

from __future__ import annotations

import shlex


def state_command(keeper: str, run: str, run_dir: str) -> str:
    """The shell command, in `run_dir`, that shows the run's ActiveState, Result and ExecMainStatus as systemd does."""
    if keeper == "systemd":
        unit = shlex.quote(f"trainyard@{run}.service")
        return f"systemctl show {unit} --property=ActiveState,Result,ExecMainStatus"
    variable = shlex.quote(f"TRAINYARD_RUN_DIR={run_dir}")
    return (
        f"if grep -qszxF {variable} /proc/[0-9]*/environ; then echo ActiveState=active; "
        "else echo ActiveState=inactive; echo ExecMainStatus=$(cat exit 2>/dev/null); fi"
    )


def read_state(output: str) -> dict[str, str]:
    """The answer to `state_command`, and `state`: active or ended."""
    found = dict(line.split("=", 1) for line in output.splitlines() if "=" in line)
    return {**found, "state": "ended" if found.get("ActiveState") in ("inactive", "failed") else "active"}
