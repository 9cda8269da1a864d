"""What every layer of tests shares. A test's folder says which layer it is; its marker follows from that."""

import importlib
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(items):
    for item in items:
        layer = item.path.relative_to(ROOT / "tests").parts[0]
        if layer in ("distributed", "lab"):
            item.add_marker(layer)
        if item.get_closest_marker("full") and not os.environ.get("TRAINYARD_FULL"):
            item.add_marker(pytest.mark.skip(reason="left to the whole run: make test FULL=1"))


@pytest.fixture(scope="session")
def repository():
    """The checkout's root, as a Path."""
    return ROOT


@pytest.fixture(scope="session")
def load_module():
    """`load_module(name)`: plugins/modules/NAME.py as a Python module, for its plain functions."""

    def load(name):
        for file in (ROOT / "plugins/module_utils").glob("*.py"):
            # On a host, Ansible puts these beside its own.
            sys.modules.setdefault(
                f"ansible.module_utils.{file.stem}",
                importlib.import_module(f"plugins.module_utils.{file.stem}"),
            )
        return importlib.import_module(f"plugins.modules.{name}")

    return load
