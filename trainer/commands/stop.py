"""`trainer stop`: ask a run's ranks to save and end. A file, so that it works under any keeper."""

from pathlib import Path

from trainer.errors import BadInput


def main(run_dir: Path) -> int:
    """Ask, and return; the run's status.json tells when it has ended."""
    if not (run_dir / "status.json").exists():
        raise BadInput(f"{run_dir}: not a run's directory (no status.json)")
    (run_dir / "stop").touch()
    print(f"asked the run in {run_dir} to save and end after its current step")
    return 0
