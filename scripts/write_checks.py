#!/usr/bin/env python3
"""Writes the table of checks in docs/preflight.md from the code: `make docs`."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "plugins/module_utils"))

from preflight_report import table  # noqa: E402 - the checkout's modules are on the path only now

TARGET = ROOT / "docs" / "preflight.md"
MARK = "<!-- Written by `make docs`, from plugins/module_utils/preflight_*.py. -->\n"


def render(text: str) -> str:
    """`text` with the table that stands after the mark as the code has it now."""
    before, _, after = text.partition(MARK)
    rest = after.partition("\n\n")[2]
    return f"{before}{MARK}{table()}\n\n{rest}"


if __name__ == "__main__":
    TARGET.write_text(render(TARGET.read_text()))
