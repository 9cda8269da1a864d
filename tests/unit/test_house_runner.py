"""tests/run.py: a layer that fails is counted and does not hide the later ones; what is skipped is said."""

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("run_layers", ROOT / "tests/run.py")
run_layers = importlib.util.module_from_spec(spec)
sys.modules["run_layers"] = run_layers
spec.loader.exec_module(run_layers)


@pytest.fixture
def layers(tmp_path, monkeypatch):
    """A checkout of tests alone; returns a function that writes a layer's test file."""
    monkeypatch.setattr(run_layers, "ROOT", tmp_path)

    def write(layer, body):
        folder = tmp_path / "tests" / layer
        folder.mkdir(parents=True)
        (folder / f"test_{layer}.py").write_text(body)

    return write


def last_line(text):
    return text.rstrip().splitlines()[-1]


def test_counts_and_names_everything(layers, capsys):
    layers(
        "unit",
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 1 == 2\n"
        "@pytest.mark.skip(reason='no GPU here')\n"
        "def test_gpu(): pass\n"
        "@pytest.fixture\n"
        "def broken(): raise OSError\n"
        "def test_error(broken): pass\n",
    )
    layers("distributed", "def test_good(): pass\n")
    assert run_layers.main(["unit", "distributed"]) == 1
    shown = capsys.readouterr().out
    assert last_line(shown) == "2 passed, 2 failed, 1 skipped"
    assert "unit: 1 x no GPU here" in shown
    assert re.search(r"unit: .*test_unit::test_bad", shown)
    assert re.search(r"unit: .*test_unit::test_error", shown)


def test_passes_where_all_do(layers, capsys):
    layers("unit", "def test_good(): pass\n")
    assert run_layers.main(["unit"]) == 0
    assert last_line(capsys.readouterr().out) == "1 passed, 0 failed, 0 skipped"


def test_the_slowest_are_named_with_their_fixtures_seconds(layers, capsys, monkeypatch):
    monkeypatch.setattr(run_layers, "SLOW", 0.2)
    monkeypatch.setattr(run_layers, "SHOWN", 2)
    layers(
        "unit",
        "import pytest, time\n"
        "@pytest.fixture\n"
        "def host(): time.sleep(0.6)\n"
        "def test_first(host): pass\n"
        "def test_quick(): pass\n"
        "def test_second(): time.sleep(0.5)\n"
        "def test_third(): time.sleep(0.3)\n",
    )
    assert run_layers.main(["unit"]) == 0
    shown = capsys.readouterr().out
    assert re.findall(r"s  unit: \S*::(\w+)", shown) == ["test_first", "test_second"]
    assert "\n     1 s  unit: " in shown


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("", "there is no test in it"),
        ("def test_x(:\n", "test_unit"),
        ("import os\ndef test_x(): os._exit(9)\n", "pytest ended with status 9"),
    ],
)
def test_a_broken_or_empty_layer_has_failed(layers, capsys, body, reason):
    layers("unit", body)
    layers("distributed", "def test_good(): pass\n")
    assert run_layers.main(["unit", "distributed"]) == 1
    shown = capsys.readouterr().out
    assert reason in shown
    assert last_line(shown) == "1 passed, 1 failed, 0 skipped"


def test_a_layer_past_its_limit_is_stopped_and_the_next_one_runs(layers, capsys, monkeypatch, tmp_path):
    torn_down = tmp_path / "torn-down"
    layers(
        "unit",
        "import pathlib, pytest, time\n"
        "@pytest.fixture\n"
        "def host():\n"
        "    yield\n"
        f"    pathlib.Path({str(torn_down)!r}).touch()\n"
        "def test_slow(host): time.sleep(60)\n",
    )
    layers("distributed", "def test_good(): pass\n")
    monkeypatch.setitem(run_layers.LIMITS, "unit", 3 / 60)
    assert run_layers.main(["unit", "distributed"]) == 1
    shown = capsys.readouterr().out
    assert "stopped at its limit" in shown
    assert last_line(shown) == "1 passed, 1 failed, 0 skipped"
    assert torn_down.exists()


def test_ctrl_c_tears_down_and_still_sums_up(tmp_path):
    """The runner itself, in a checkout of its own: SIGINT lets fixtures clean up, and the exit status is 130."""
    for layer in ("unit", "playbooks", "distributed", "guards"):
        (tmp_path / "tests" / layer).mkdir(parents=True)
    (tmp_path / "tests/run.py").write_text((ROOT / "tests/run.py").read_text())
    for layer in ("unit", "playbooks"):
        (tmp_path / "tests" / layer / "test_slow.py").write_text(
            "import pathlib, pytest, time\n"
            "@pytest.fixture\n"
            "def host():\n"
            f"    pathlib.Path('up-{layer}').touch()\n"
            "    yield\n"
            f"    pathlib.Path('down-{layer}').touch()\n"
            "def test_slow(host): time.sleep(60)\n"
        )
    command = [sys.executable, "tests/run.py", "unit", "playbooks", "distributed", "guards"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 30
    while len(list(tmp_path.glob("up-*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    shown, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert sorted(file.name for file in tmp_path.glob("down-*")) == ["down-playbooks", "down-unit"]
    # The layers after them have not begun.
    assert "playbooks: interrupted" in shown and "guards: broken off" in shown and "distributed" not in shown
    assert last_line(shown) == "0 passed, 3 failed, 0 skipped"


def test_an_unknown_layer_is_refused(capsys):
    assert run_layers.main(["uni"]) == 2
    assert "no layer is named 'uni'; there are: lint unit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "runs"),
    [
        ("make test", "1//tests/run.py"),
        ("make test FULL=1", "1/1/tests/run.py"),
        ("make test FULL=0", "1//tests/run.py"),
        ("make test LAYERS='lint unit'", "1//tests/run.py lint unit"),
        ("make lint", "//tests/run.py lint"),
        ("make lab-down LAB='--name other'", "//-m lab down --name other"),
    ],
)
def test_what_make_hands_on(tmp_path, typed, runs):
    """To a Python that tells what it is asked for, in an environment that is made already."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$TRAINYARD_INSTALL/$TRAINYARD_FULL/$*"\n')
    python.chmod(0o755)
    for stamp in (".controller", ".dev"):
        (tmp_path / ".venv" / stamp).touch()
    kept = {"PATH": os.environ["PATH"], "PYTHON": str(python)}
    done = subprocess.run(shlex.split(typed), cwd=tmp_path, env=kept, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, runs), done.stderr


def test_the_limits_leave_ci_room():
    """CI ends a run after 90 minutes; making the environment takes some of them."""
    limits = run_layers.LIMITS
    chains = run_layers.CHAINS
    assert all(sum(limits[layer] for layer in chain) <= 80 for chain in chains)
    assert sorted(layer for chain in chains for layer in chain) == sorted(limits)
    assert list(limits) == ["lint", "unit", "distributed", "playbooks", "lab", "guards"]
    assert all((ROOT / file).exists() for file in run_layers.GUARDS)


def test_no_lab_has_tests_in_both_chains():
    """Names of labs are the machine's: one session would take down the other's hosts."""
    guards = [ROOT / file for file in run_layers.GUARDS]
    others = set((ROOT / "tests/lab").glob("test_*.py")) - set(guards)
    shared = {"cluster", "deployed", "lab3"}  # fixtures of tests/lab/conftest.py

    def labs(files):
        found = set()
        for file in files:
            text = file.read_text()
            own = set(re.findall(r"^def (\w+)", text, re.M))
            found |= set(re.findall(r'(?:make_lab|playground|Lab)\(\s*"([\w-]+)"', text))
            wanted = {
                name for names in re.findall(r"^def \w+\(([^)]*)\)", text, re.M) for name in names.split(", ")
            }
            found |= wanted & shared - own
        return found

    assert (
        not labs(guards) & labs(others) and {"t-guard", "lab3"} <= labs(guards) and "cluster" in labs(others)
    )


def test_the_playbooks_run_beside_the_fast_layers(layers, capsys, tmp_path):
    """Each waits for the other; what they print is not mixed."""
    wait = (
        "import pathlib, time\n"
        "def test_meet():\n"
        f"    there = pathlib.Path({str(tmp_path)!r})\n"
        "    (there / {own!r}).touch()\n"
        "    until = time.monotonic() + 60\n"
        "    while not (there / {other!r}).exists():\n"
        "        assert time.monotonic() < until\n"
        "        time.sleep(0.05)\n"
    )
    layers("unit", wait.replace("{own!r}", "'a'").replace("{other!r}", "'b'"))
    layers("playbooks", wait.replace("{own!r}", "'b'").replace("{other!r}", "'a'") + "    assert 1 == 2\n")
    assert run_layers.main(["unit", "playbooks"]) == 1
    shown = capsys.readouterr().out
    assert last_line(shown) == "1 passed, 1 failed, 0 skipped"
    assert shown.index("assert 1 == 2") > shown.index("==== playbooks")


def test_docs_name_every_layer():
    text = (ROOT / "docs/testing.md").read_text()
    for layer in run_layers.LIMITS:
        assert f"`{layer}`" in text


# ---- scripts/find-python ----


def find_python(tmp_path, pythons, **environ):
    """Runs scripts/find-python where PATH holds only the given fake Pythons: name -> (version, has venv)."""
    for name, (version, has_venv) in pythons.items():
        fake = tmp_path / name
        fake.write_text(
            f'#!/bin/bash\ncase "$2" in *ensurepip*) exit {0 if has_venv else 1};; *) echo {version};; esac\n'
        )
        fake.chmod(0o755)
    script = str(ROOT / "scripts/find-python")
    return subprocess.run(
        ["/bin/bash", script], env={"PATH": str(tmp_path), **environ}, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    ("pythons", "found"),
    [
        ({"python3": ("3.11.2", True)}, "python3"),
        ({"python3": ("3.13.5", True), "python3.12": ("3.12.1", True)}, "python3"),
        ({"python3": ("3.10.12", True), "python3.12": ("3.12.3", True)}, "python3.12"),
        (
            {"python3": ("3.10.12", True), "python3.11": ("3.11.0rc1", True), "python3.12": ("3.12.3", True)},
            "python3.12",
        ),
        ({"python3": ("3.14.0", True), "python3.11": ("3.11.9", True)}, "python3.11"),
        ({"python3": ("3.12.3", False), "python3.11": ("3.11.9", True)}, "python3.11"),
    ],
)
def test_a_fit_python_is_found(tmp_path, pythons, found):
    result = find_python(tmp_path, pythons)
    assert (result.returncode, result.stdout.strip()) == (0, found), result.stderr


@pytest.mark.parametrize(
    ("pythons", "environ", "message"),
    [
        ({}, {}, "python3: no such command"),
        ({"python3": ("3.10.12", True)}, {}, "python3 is 3.10.12"),
        ({"python3.11": ("3.11.0rc1", True)}, {}, "python3.11 is 3.11.0rc1, a pre-release"),
        ({"python3": ("3.11.2", False)}, {}, "sudo apt install python3.11-venv"),
        ({"python3": ("3.11.2", True)}, {"PYTHON": "python3.9"}, "python3.9: no such command"),
        ({"python3": ("3.10.12", True)}, {"PYTHON": "python3"}, "python3 is 3.10.12"),
    ],
)
def test_an_unfit_python_is_refused_with_the_cure(tmp_path, pythons, environ, message):
    result = find_python(tmp_path, pythons, **environ)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Python 3.11, 3.12 or 3.13" in result.stderr


@pytest.mark.parametrize(("user", "asked", "installs"), [(0, "1", True), (1000, "1", False), (0, "", False)])
def test_only_root_that_asked_gets_a_python_installed(tmp_path, user, asked, installs):
    """A fake apt-get that leaves a fit python3 behind."""
    apt = f'#!/bin/bash\n[ "$1" = install ] || exit 0\necho "#!/bin/bash\necho 3.11.2" > {tmp_path}/python3\n'
    apt += f"/bin/chmod +x {tmp_path}/python3\n"
    for name, text in {"id": f"#!/bin/bash\necho {user}\n", "apt-get": apt}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    result = find_python(tmp_path, {}, TRAINYARD_INSTALL=asked)
    assert (result.returncode == 0) == installs
    assert (tmp_path / "python3").exists() == installs


@pytest.fixture
def too_old(tmp_path):
    """A checkout and a PATH whose python3 is 3.10; what the pinned archive holds says 3.12.16.

    Returns a function that finds a Python there, with PYTHON_URL as the folder that holds the archive.
    """
    checkout, published, path = tmp_path / "a checkout", tmp_path / "published", tmp_path / "path"
    for directory in (checkout / "scripts", checkout / "requirements", published / "python/bin", path):
        directory.mkdir(parents=True)
    shutil.copy2(ROOT / "scripts/find-python", checkout / "scripts")
    new = published / "python/bin/python3"
    new.write_text('#!/bin/bash\ncase "$2" in *ensurepip*) ;; *) echo 3.12.16;; esac\n')
    old = path / "python3"
    fetches = f'*urlopen*) echo >> {tmp_path}/fetched; exec {sys.executable} "$@";;'
    old.write_text(f'#!/bin/bash\ncase "$2" in {fetches} *ensurepip*) exit 1;; *) echo 3.10.12;; esac\n')
    # Those of this machine's that are fit.
    hidden = [path / f"python3.{minor}" for minor in (11, 12, 13)]
    for file in hidden:
        file.write_text("#!/bin/bash\nexit 1\n")
    for file in (new, old, *hidden):
        file.chmod(0o755)
    name = f"cpython-3.12.16+20261110-{os.uname().machine}-unknown-linux-gnu-install_only.tar.gz"
    subprocess.run(["tar", "-czf", str(published / name), "-C", str(published), "python"], check=True)
    digest = hashlib.sha256((published / name).read_bytes()).hexdigest()
    other = f"{'0' * 64}  cpython-3.12.16+20261110-riscv64-unknown-linux-gnu-install_only.tar.gz"
    (checkout / "requirements/python.sha256").write_text(f"{other}\n{digest}  {name}\n")

    def find(**environ):
        return subprocess.run(
            [str(checkout / "scripts/find-python")],
            env={"PATH": f"{path}:/usr/bin:/bin", "PYTHON_URL": published.as_uri(), **environ},
            capture_output=True,
            text=True,
        )

    find.archive, find.fetched = published / name, tmp_path / "fetched"
    find.kept = checkout / ".trainyard/pythons"
    find.home = find.kept / digest[:16]
    return find


def test_where_none_is_fit_the_pinned_one_is_fetched_once(too_old):
    for _ in range(2):
        result = too_old()
        assert (result.returncode, result.stdout.strip()) == (0, f"{too_old.home}/bin/python3"), result.stderr
    assert too_old.fetched.read_text() == "\n"
    # The file that the controller brings to hosts is the same.
    assert (too_old.kept / too_old.archive.name).exists()
    shutil.rmtree(too_old.home)
    too_old.archive.unlink()
    assert too_old().returncode == 0 and too_old.fetched.read_text() == "\n"


def test_a_python_that_was_altered_on_its_way_is_not_taken(too_old):
    with too_old.archive.open("ab") as file:
        file.write(b"more")
    result = too_old()
    assert result.returncode == 2 and "does not hash to" in result.stderr, result.stderr
    assert not too_old.home.exists() and not (too_old.kept / too_old.archive.name).exists()


def test_one_that_cannot_be_fetched_is_named_with_the_cures(too_old):
    too_old.archive.unlink()
    result = too_old()
    assert result.returncode == 2
    for word in (
        too_old.archive.name.replace("+", "%2B"),
        "No such file",
        "PYTHON_URL=",
        "apt install",
        "PYTHON=/",
    ):
        assert word in result.stderr, result.stderr
    assert "Traceback" not in result.stderr


def test_whoever_names_a_python_gets_no_other(too_old):
    result = too_old(PYTHON="python3")
    assert result.returncode == 2 and "python3 is 3.10.12" in result.stderr and not too_old.fetched.exists()
