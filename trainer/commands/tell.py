"""`trainer tell`: ends of runs that their store could not be told when they came, told to it once it answers.

A launcher that is stopped while the store is silent (a lone worker, a minority) leaves a note. Hosts that come back ask
the store whether the run has ended meanwhile, and wait a while for that word (cluster/membership.py).
"""

import json
import sys
import time
from pathlib import Path

from trainer.cluster import membership, store
from trainer.errors import BadInput

PAUSE = 2.0  # seconds between two tries; the hosts that come back wait for longer
KEPT = 90 * 86400  # seconds that a note is kept whose store never answers


def main(directory: Path) -> int:
    """Tell what is noted in `directory`, and return once nothing is left there."""
    # What is hidden is being written.
    while notes := sorted(path for path in directory.iterdir() if not path.name.startswith(".")):
        for note in notes:
            tell(note)
        time.sleep(PAUSE)
    return 0


def tell(note: Path) -> None:
    """Tell the store of one note, which is then gone; it stays where the store does not answer."""
    try:
        known = json.loads(note.read_text())
        place, end = store.connect(*known["store"]), membership.End(**known["end"])
    except (OSError, ValueError, LookupError, TypeError, BadInput) as error:
        said = f"not a note of how a run ended: {error}"
    else:
        try:
            first = place.put_if("end", membership.pack(end), 0)
        except store.Unreachable as error:
            if time.time() - note.stat().st_mtime < KEPT:
                return
            said = f"given up: {error}"
        else:
            said = f"told the others: {end.reason}" if first else "the others know its end"
    print(f"{note.stem}: {said}", file=sys.stderr, flush=True)
    note.unlink(missing_ok=True)
