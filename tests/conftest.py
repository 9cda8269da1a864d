"""What every layer of tests shares. A test's folder says which layer it is; its marker follows from that."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(items):
    for item in items:
        layer = item.path.relative_to(ROOT / "tests").parts[0]
        if layer in ("distributed", "lab"):
            item.add_marker(layer)


@pytest.fixture(scope="session")
def repository():
    """The checkout's root, as a Path."""
    return ROOT
