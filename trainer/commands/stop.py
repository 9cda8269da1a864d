"""`trainer stop`: ask a run's ranks to save and end. A file, so that it works under any keeper."""

import json
import os
from pathlib import Path

from trainer import environment
from trainer.errors import BadInput
from trainer.metrics import FINAL


def main(run_dir: Path, leave: bool = False) -> int:
    """Ask, and return; the run's status.json tells when it has ended. leave: only this host shall end its part."""
    try:
        status = json.loads((run_dir / "status.json").read_text())
        state = status["state"]
    except (OSError, ValueError, KeyError):
        raise BadInput(f"{run_dir}: not a run's directory (no status.json)") from None
    if state in FINAL:
        print(f"the run in {run_dir} is not active: it has {state}")
        return 0
    # Typed by hand it is not told the name that the run knows this host by.
    host = os.environ.get("TRAINYARD_HOST") or status.get("host") or environment.host()
    try:
        (environment.leave_file(run_dir, host) if leave else run_dir / "stop").touch()
    except PermissionError:
        owner = run_dir.owner()
        raise BadInput(
            f"{run_dir} belongs to {owner}: ask as that user (sudo -u {owner} …), or from the controller: "
            "playbooks/stop.yml"
        ) from None
    whose = f"{host}'s part of the run" if leave else "the run"
    print(f"asked {whose} in {run_dir} to save and end after its current step")
    return 0
