"""How figures are said, by the trainer and by what shows its runs. No torch here."""

import itertools
from collections.abc import Collection


def span(seconds: float) -> str:
    """A span of time by its two largest units: 48 s, 2 min 5 s, 1 d 3 h."""
    seconds = max(0, round(seconds))
    for unit, size, lower, below in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if seconds >= size:
            return f"{seconds // size} {unit} {seconds % size // below} {lower}"
    return f"{seconds} s"


def count(number: int, what: str) -> str:
    """1 document, 2,000 documents."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def some(names: Collection[str], most: int) -> str:
    """The first `most` of some names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(itertools.islice(names, most)) + more
