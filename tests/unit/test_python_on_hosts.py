"""What runs on a host before its own environment is there runs with the host's Python: 3.10 on Ubuntu 22.04."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLDEST = (3, 10)
MODULES = sorted((ROOT / "plugins/modules").glob("*.py"))
SHARED = sorted(
    path
    for path in (ROOT / "plugins/module_utils").glob("*.py")
    if any(f"ansible.module_utils.{path.stem} import" in module.read_text() for module in MODULES)
)
FILES = [ROOT / "roles/guard/files/guard.py", *MODULES, *SHARED]
# What the standard library has only since 3.11 or later, as far as code like ours would use it.
NEWER = {
    *("BaseExceptionGroup", "ExceptionGroup", "tomllib", "datetime.UTC", "hashlib.file_digest"),
    *("contextlib.chdir", "enum.StrEnum", "enum.ReprEnum", "itertools.batched", "math.cbrt", "math.sumprod"),
    *("asyncio.Runner", "asyncio.TaskGroup", "asyncio.timeout", "operator.call", "os.process_cpu_count"),
    *("typing.LiteralString", "typing.Never", "typing.Self", "typing.assert_never", "typing.override"),
}


def newer(text):
    """The names in the Python source `text` that the oldest Python lacks. Raises SyntaxError for its grammar."""
    found = set()
    for node in ast.walk(ast.parse(text, feature_version=OLDEST)):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{name.name}" for name in node.names)}
        elif isinstance(node, ast.Attribute):
            found |= {tail for tail in NEWER if ast.unparse(node).endswith(tail)}
        elif isinstance(node, ast.Name):
            found.add(node.id)
    return found & NEWER


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_hosts_own_python_can_run_it(path):
    assert newer(path.read_text()) == set()


@pytest.mark.parametrize(
    "text",
    [
        "import datetime\ndatetime.datetime.now(datetime.UTC)",
        "from datetime import UTC",
        "import tomllib",
        "raise ExceptionGroup('', [])",
    ],
)
def test_what_is_too_new_is_found(text):
    assert newer(text)


def test_what_is_too_new_in_grammar_is_found():
    with pytest.raises(SyntaxError):
        newer("try:\n    pass\nexcept* OSError:\n    pass\n")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_ruff_does_not_ask_for_what_is_too_new(path):
    """Its rule UP017 would put datetime.UTC back, where the target is a newer Python."""
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--quiet",
        "--select",
        "UP",
        "--stdin-filename",
        str(path),
        "-",
    ]
    text = "import datetime\n\ndatetime.datetime.now(datetime.timezone.utc)\n"
    done = subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True)
    cure = f"name {path.name} under tool.ruff.per-file-target-version in pyproject.toml"
    assert done.returncode == 0, f"{cure}:\n{done.stdout}{done.stderr}"
