"""The locked environment: whole or not at all, one at a time, and the same on every host. Its wheels here are tiny."""

import errno
import fcntl
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import ansible.module_utils
import pytest

ROOT = Path(__file__).resolve().parents[2]
ansible.module_utils.__path__.append(str(ROOT / "plugins/module_utils"))

from plugins.filter.python_env import (  # noqa: E402
    python_env_brought,
    python_env_chain,
    python_env_differences,
    python_env_mix,
)
from plugins.modules import python_env  # noqa: E402


def make_wheel(directory, name, version, asks=()):
    """A wheel with one module, NAME.py; its SHA-256."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files = {
        f"{name}.py": f"version = {version!r}\n",
        f"{info}/METADATA": metadata + "".join(f"Requires-Dist: {one}\n" for one in asks),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{one},,\n" for one in [*files, f"{info}/RECORD"])
    path = directory / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for one, text in files.items():
            archive.writestr(one, text)
    return path


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Case:
    """An environment directory and the wheels for it."""

    def __init__(self, root):
        self.wheels = root / "sent"
        self.wheels.mkdir()
        alpha = make_wheel(self.wheels, "alpha", "1.0")
        make_wheel(self.wheels, "torch", "2.0+cpu", asks=["alpha>=1"])
        self.options = {
            "dir": str(root / "env dir"),
            "lock": f"alpha==1.0 \\\n    --hash=sha256:{sha256(alpha)}\n",
            "torch": "torch==2.0",
            "python": sys.executable,
            "source": "controller",
            "releases": "",
            "cache_dir": None,
            "lock_timeout": 60,
            "wheels": str(root / "state" / "wheels" / "0a1b"),
            "hashes": {path.name: sha256(path) for path in self.wheels.glob("*.whl")},
        }
        os.makedirs(self.options["dir"])
        self.stage()

    def stage(self):
        """Put the wheels where the controller would have brought them."""
        staging = Path(self.options["wheels"])
        staging.mkdir(parents=True, exist_ok=True)
        for path in self.wheels.glob("*.whl"):
            (staging / path.name).write_bytes(path.read_bytes())

    def have(self, **options):
        options = {**self.options, **options}
        environment = python_env.Environment(options, python_env.interpreter(options["python"]))
        return python_env.have(environment, options)


@pytest.fixture(scope="session")
def empty_environment(tmp_path_factory):
    """A virtual environment to copy: to make one takes several seconds."""
    path = tmp_path_factory.mktemp("empty") / "env"
    subprocess.run([sys.executable, "-I", "-m", "venv", path], check=True)
    return path


@pytest.fixture
def case(tmp_path, monkeypatch, empty_environment):
    run = python_env.Environment.run

    def copying(self, *command):
        if command[1:] == ("-I", "-m", "venv", self.path):
            shutil.copytree(empty_environment, self.path, symlinks=True)
            return ""
        return run(self, *command)

    monkeypatch.setattr(python_env.Environment, "run", copying)
    monkeypatch.setattr(
        python_env,
        "SELF_TEST",
        'import json, torch, alpha; print(json.dumps({"torch": torch.version, "cuda": None}))',
    )
    return Case(tmp_path)


def test_built_once_then_unchanged_and_whole_again_after_any_interruption(case, monkeypatch):
    said = []
    say = python_env.Note.say
    monkeypatch.setattr(sys.modules[python_env.Note.__module__], "LOOK", 0.05)
    monkeypatch.setattr(
        python_env.Note, "say", lambda note, words: (said.append((note.path, words)), say(note, words))
    )
    hear, shows = python_env.Pip.hear, []
    # After each line, and not as often as a machine under load gets to look.
    monkeypatch.setattr(python_env.Pip, "hear", lambda pip, line: (hear(pip, line), shows.append(pip.now())))
    first = case.have()
    assert first["changed"]
    assert {path for path, _ in said} == {f"{case.options['dir']}/.progress"}
    words = [words for _, words in said]
    assert words[0] == "making an empty environment" and words[-1] == "waiting for the disk"
    # Where pip was quicker than who reads its lines, it is installed by then.
    assert "taking alpha" in shows
    assert {"installing alpha", "installed"} & set(shows)
    assert not Path(case.options["dir"], ".progress").exists()
    assert first["torch"] == "2.0+cpu"
    assert {"alpha": "1.0", "torch": "2.0+cpu"}.items() <= first["versions"].items()
    assert "pip" not in first["versions"]
    assert not Path(case.options["wheels"]).parent.exists()
    assert os.path.realpath(Path(case.options["dir"], "current")) == os.path.realpath(first["path"])
    again = case.have(wheels=None)
    assert not again["changed"]
    assert again["digest"] == first["digest"]

    # Killed before the mark was written, with half of a package on the disk.
    path = Path(first["path"])
    (path / ".complete").unlink()
    for metadata in path.glob("lib/python*/site-packages/alpha*"):
        metadata.unlink() if metadata.is_file() else [one.unlink() for one in metadata.iterdir()]
    case.stage()
    assert case.have()["digest"] == first["digest"]


@pytest.mark.full
def test_an_environment_that_someone_changed_is_built_anew(case):
    first = case.have()
    (metadata,) = Path(first["path"]).glob("lib/python*/site-packages/alpha-1.0.dist-info")
    metadata.rename(metadata.with_name("alpha-9.0.dist-info"))
    asked = case.have(wheels=None)
    assert "path" not in asked
    assert asked["target"]["markers"]["sys_platform"] == "linux"
    case.stage()
    assert case.have()["versions"]["alpha"] == "1.0"


def test_nothing_is_taken_away_from_a_running_process(case, monkeypatch):
    first = case.have()
    Path(first["path"], ".complete").unlink()
    monkeypatch.setattr(python_env, "processes_using", lambda path: [4711])
    with pytest.raises(python_env.Failure, match=r"4711.*trainer stop"):
        case.have()


def test_a_process_that_runs_from_an_environment_is_found(case):
    path = case.have()["path"]
    assert python_env.processes_using(path) == []
    process = subprocess.Popen([f"{path}/bin/python", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        time.sleep(0.5)
        assert python_env.processes_using(path) == [process.pid]
    finally:
        process.communicate(b"\n")


def second_run(case, results):
    """Of another process: try to have the same environment."""
    results.put(case.have()["changed"])


def test_the_second_of_two_waits_and_finds_it_ready(case):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=second_run, args=(case, results)) for _ in range(2)]
    for process in processes:
        process.start()
    changed = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    assert sorted(changed) == [False, True]


def test_a_lock_that_is_never_given_back_is_named(case):
    with open(Path(case.options["dir"], ".lock"), "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(python_env.Failure, match="fuser"):
            case.have(lock_timeout=1)


@pytest.mark.full
def test_the_current_and_the_previous_environment_and_those_of_releases_stay(case, tmp_path):
    released = case.have()["path"]
    release = tmp_path / "releases" / "r1"
    release.mkdir(parents=True)
    (release / "environment").write_text(released + "\n")
    paths = []
    for comment in "abc":
        case.stage()
        result = case.have(lock=f"# {comment}\n{case.options['lock']}", releases=str(tmp_path / "releases/*"))
        paths.append(result["path"])
    assert [os.path.exists(path) for path in [released, *paths]] == [True, False, True, True]
    assert result["pruned"] == [os.path.basename(paths[0])]


def test_a_wrong_hash_is_refused(case):
    wrong = case.options["lock"].replace(case.options["lock"][-8:-1], "0000000")
    with pytest.raises(python_env.Failure, match="mirror"):
        case.have(lock=wrong)
    assert "path" not in case.have(lock=wrong, wheels=None)


def fake_python(path, version):
    """An interpreter that says it is of another version."""
    minor = ".".join(version.split(".")[:2])
    markers = {"python_version": minor, "python_full_version": version, "platform_machine": "x86_64"}
    markers["sys_platform"] = "linux"
    about = {"executable": str(path), "venv": version != "3.12", "glibc": "2.36", "markers": markers}
    path.write_text(f"#!/bin/sh\necho '{json.dumps(about)}'\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("version", ["3.9.2", "3.10.12", "3.11.0rc1", "3.14.0"])
def test_a_python_outside_the_lock_is_refused_with_the_cure(tmp_path, version):
    with pytest.raises(python_env.Failure, match=rf"Python {version}.*python_env_python"):
        python_env.interpreter(fake_python(tmp_path / "python", version))


def archived(root, version="3.12.16"):
    """An archive as python-build-standalone's are, of a Python that says it is of that version."""
    inside = root / "packed" / "python"
    for folder in ("bin", "lib"):
        (inside / folder).mkdir(parents=True)
    real, asked = sys.executable, fake_python(root / "asked", version)
    (inside / "bin/python3").write_text(
        f'#!/bin/sh\ncase "$3" in compileall) exec {real} "$@";; *) exec {asked};; esac\n'
    )
    (inside / "bin/python3").chmod(0o755)
    (inside / "lib/module.py").write_text("x = 1\n")
    (inside / "lib/bad.py").write_text("print 'as in Python 2'\n")  # a library's own tests have such
    file = root / "brought" / "cpython.tar.gz"
    file.parent.mkdir()
    subprocess.run(["tar", "-czf", str(file), "-C", str(root / "packed"), "python"], check=True)
    return file


@pytest.fixture
def old(case, tmp_path, monkeypatch):
    """The options of a host whose python3 is 3.10, and the archive that is to be brought to it."""
    (tmp_path / "bin").mkdir()
    fake_python(tmp_path / "bin/python3", "3.10.12")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin", prepend=os.pathsep)
    file = archived(tmp_path)
    brought = {os.uname().machine: {"name": file.name, "sha256": sha256(file)}}
    return {**case.options, "python": "python3", "brought": brought, "archive": None}, file


def test_where_the_distribution_s_python_is_too_old_one_is_brought(old):
    options, file = old
    assert python_env.chosen(options) is None
    about = python_env.chosen({**options, "archive": str(file)})
    assert about["markers"]["python_full_version"] == "3.12.16"
    assert not file.parent.exists()
    (home,) = Path(options["dir"], python_env.PYTHONS).iterdir()
    assert list(home.glob("lib/__pycache__/module.*.pyc")) and home.stat().st_mode & 0o777 == 0o755
    assert python_env.chosen(options) == about  # it stays


def test_of_what_was_brought_nothing_is_removed_behind_a_link(tmp_path):
    """It lies in the service user's directory, which may have put one there, to an environment of the same name."""
    (tmp_path / "env" / "0a1b").mkdir(parents=True)
    (tmp_path / "wheels").symlink_to("env")
    python_env.remove_brought(f"{tmp_path}/wheels/0a1b")
    assert (tmp_path / "env" / "0a1b").is_dir()
    python_env.remove_brought(f"{tmp_path}/env/0a1b/")
    assert not (tmp_path / "env").exists()
    python_env.remove_brought(f"{tmp_path}/env/0a1b")  # a killed run has done it


def test_one_is_brought_in_place_of_a_fit_one_where_that_is_asked_for(old, tmp_path):
    options, file = old
    fake_python(tmp_path / "bin/python3", "3.11.2")
    assert python_env.chosen(options)["markers"]["python_full_version"] == "3.11.2"
    asked = {**options, "python": "bring"}
    assert python_env.chosen(asked) is None
    about = python_env.chosen({**asked, "archive": str(file)})
    assert about["markers"]["python_full_version"] == "3.12.16" and python_env.chosen(asked) == about
    with pytest.raises(
        python_env.Failure,
        match=rf"found a machine of the kind {os.uname().machine}; expected one of riscv64",
    ):
        python_env.chosen({**asked, "brought": {"riscv64": {}}})


@pytest.mark.parametrize("differs", [{"python": "/asked/for"}, {"brought": {}}, {"brought": {"riscv64": {}}}])
def test_nothing_is_brought_in_place_of_what_was_asked_for_or_where_there_is_none(old, tmp_path, differs):
    options = {**old[0], **differs}
    if options["python"] != "python3":
        options["python"] = fake_python(tmp_path / "asked-for", "3.10.12")
    with pytest.raises(python_env.Unfit, match=r"3\.10\.12"):
        python_env.chosen(options)


def test_a_python_that_was_altered_on_its_way_is_refused(old):
    options, file = old
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(python_env.Failure, match="altered on its way"):
        python_env.chosen({**options, "archive": str(file)})
    assert python_env.chosen(options) is None and not file.exists()  # so that it comes anew


def test_brought_pythons_that_no_environment_is_made_of_are_removed(case):
    path = Path(case.have()["path"])
    pythons = Path(case.options["dir"], python_env.PYTHONS)
    for name in ("of-use", "of-none", "new-left"):
        (pythons / name / "bin").mkdir(parents=True)
    with (path / "pyvenv.cfg").open("a") as config:
        config.write(f"home = {pythons}/of-use/bin\n")
    case.stage()
    assert sorted(case.have()["pruned"]) == [".python/new-left", ".python/of-none"]
    assert os.listdir(pythons) == ["of-use"]


def test_an_environment_of_another_brought_python_is_another_one(case):
    """As where a release brings a newer one: the old one stays, with all that runs from it, until that has ended."""
    about = python_env.interpreter(sys.executable)
    places = [Path(case.options["dir"], python_env.PYTHONS, name, "bin/python3") for name in ("0a1b", "2c3d")]
    made = [
        python_env.Environment(case.options, {**about, "executable": str(place)})
        for place in (sys.executable, *places)
    ]
    assert len({one.key for one in made}) == 3


def test_pip_goes_by_the_hosts_proxy_which_sudo_does_not_read(case, tmp_path, monkeypatch):
    (tmp_path / "environment").write_text("https_proxy=http://10.0.0.9:3128\n")
    monkeypatch.setitem(python_env.way_out.__globals__, "SETTINGS", str(tmp_path / "environment"))
    monkeypatch.delenv("https_proxy", raising=False)
    environment = python_env.Environment(case.options, python_env.interpreter(sys.executable))
    os.makedirs(environment.directory, exist_ok=True)
    assert environment.settings()["env"]["https_proxy"] == "http://10.0.0.9:3128"


@pytest.mark.parametrize(
    "told",
    [
        {"PIP_CONFIG_FILE": "pip.conf"},
        # The first as NVIDIA's containers have it.
        {"PIP_CONSTRAINT": "constraint.txt", "PIP_USER": "1", "PIP_DRY_RUN": "1", "PIP_PYTHON": "/bin/false"},
        {"PIP_TARGET": "elsewhere", "PIP_PREFIX": "elsewhere", "PIP_ROOT": "elsewhere"},
    ],
)
def test_what_a_machine_tells_pip_for_all_that_it_installs_is_not_for_this(case, tmp_path, monkeypatch, told):
    (tmp_path / "constraint.txt").write_text("alpha==0.9\n")
    (tmp_path / "pip.conf").write_text(
        f"[global]\nconstraint = {tmp_path}/constraint.txt\nrequire-hashes = true\n[install]\nuser = true\n"
    )
    for name, value in told.items():
        monkeypatch.setenv(name, value if value == "1" else str(tmp_path / value))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(case.wheels))  # where from is the machine's to say
    made = case.have(source="index", wheels=None, hashes={})["versions"]
    assert (made["alpha"], made["torch"]) == ("1.0", "2.0+cpu")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import os; os.kill(os.getpid(), 9)", r"ended by signal 9 \(Killed\)\n.*no memory"),
        ("import os; os.kill(os.getpid(), 4)", r"ended by signal 4 \(Illegal instruction\)\n.*type host"),
        ("raise RuntimeError('NumPy was built with baseline optimizations:\\n(X86_V2) but')", "type host"),
        ("raise ImportError('x.so: failed to map segment from shared object')", "mounted noexec"),
    ],
)
def test_why_a_machine_cannot_run_what_was_installed_is_told(case, monkeypatch, program, said):
    monkeypatch.setattr(python_env, "SELF_TEST", program)
    environment = python_env.Environment(case.options, python_env.interpreter(sys.executable))
    with (
        python_env.locked(environment.directory, 1) as environment.lock_descriptor,
        pytest.raises(python_env.Failure, match=said) as failure,
    ):
        environment.run(sys.executable, "-I", "-c", program)
    assert str(failure.value).startswith(f"`{sys.executable} -I -c 'a step of training'` failed:\n")


def test_a_download_that_breaks_off_is_tried_again_and_another_fault_is_not(case, monkeypatch):
    answers = [
        (1, "Connection broken: IncompleteRead(9 bytes read)"),
        (1, "THESE PACKAGES DO NOT MATCH THE HASHES"),
        (0, ""),
    ]
    environment = python_env.Environment(case.options, python_env.interpreter(sys.executable))
    os.makedirs(environment.directory, exist_ok=True)
    monkeypatch.setattr(environment, "_install", lambda *_: answers.pop(0))
    environment.install("a")
    assert answers == []
    tried, warned = [], "  WARNING: Retrying after connection broken by 'ReadTimeoutError(Read timed out)'"
    monkeypatch.setattr(
        environment, "_install", lambda *_: tried.append(1) or (1, f"{warned}\nNo space left on device")
    )
    with pytest.raises(python_env.Failure, match="make room"):
        environment.install("a")
    assert len(tried) == 1
    monkeypatch.setattr(
        environment, "_install", lambda *_: tried.append(1) or (1, "Connection reset by peer")
    )
    with pytest.raises(python_env.Failure, match="reset"):
        environment.install("a")
    assert len(tried) == 1 + python_env.TRIES


def test_what_a_failed_build_left_is_removed_and_the_one_in_use_stays(case, monkeypatch):
    """The disk is that of runs, too."""
    first = case.have()
    cache = Path(case.options["dir"], ".cache")

    said = []

    def fails(self, offline):
        Path(self.temporary(), "torch.whl").touch()
        cache.mkdir(exist_ok=True)
        raise said[-1]

    monkeypatch.setattr(python_env.Environment, "build", fails)
    full = OSError(errno.ENOSPC, "No space left on device")
    nothing, told = (
        python_env.Failure(words) for words in ("No matching distribution", "No space left on device")
    )
    for fault, kept in ((nothing, True), (told, False), (full, False)):
        said.append(fault)
        with pytest.raises(type(fault)):
            case.have(lock=case.options["lock"] + "# another\n", cache_dir=str(cache))
        left = {
            path.name
            for path in Path(case.options["dir"]).iterdir()
            if re.fullmatch("[0-9a-f]{16}", path.name)
        }
        assert left == {Path(first["path"]).name}
        assert not Path(case.options["dir"], ".tmp").exists() and cache.exists() == kept


def test_a_missing_python_is_refused():
    with pytest.raises(python_env.Failure, match="python_env_python"):
        python_env.interpreter("python-that-is-not-there")


def test_a_python_without_venv_says_what_to_install(case, tmp_path):
    with pytest.raises(python_env.Failure, match=r"apt install python3\.12-venv"):
        case.have(python=fake_python(tmp_path / "python", "3.12"))


@pytest.mark.parametrize("follows", [False, True])
def test_a_python_without_venv_is_refused_before_anything_is_changed(
    monkeypatch, call_main, tmp_path, follows
):
    """By the role's first look, in check mode; the distribution's own gets the module later."""
    markers = {"python_version": "3.12", "python_full_version": "3.12.3", "platform_machine": "x86_64"}
    about = {"venv": False, "executable": "/usr/bin/python3.12", "markers": markers}
    monkeypatch.setattr(python_env, "chosen", lambda options: about)
    monkeypatch.setattr(python_env.Environment, "record", lambda self: None)
    found = call_main(python_env, True, dir=str(tmp_path), lock="", torch="2", venv_follows=follows)
    if follows:
        assert found == {"changed": False, "venv_missing": True, "interpreter": "3.12.3"}
    else:
        assert found["failed"] and "sudo apt install python3.12-venv" in found["msg"]


def test_the_key_depends_on_all_that_decides_what_is_installed():
    parts = ["a==1", "torch==2", "3.11", "x86_64"]
    keys = {python_env.environment_key(*parts)}
    for index in range(4):
        keys.add(python_env.environment_key(*[part + "x" * (i == index) for i, part in enumerate(parts)]))
    keys |= {python_env.environment_key(*parts, brought) for brought in ("0a", "1b")}
    assert len(keys) == 7


def test_wheels_go_along_a_chain_of_those_that_want_the_same():
    wants, other = ({"files": [], "key": key} for key in ("0a", "0b"))
    answers = {"node1": wants, "node2": {"path": "/env"}, "node3": other, "node4": wants}
    hosts = [*answers, "node5"]
    assert python_env_chain(hosts, answers, "node4", False) == ["node1", "node4"]
    assert python_env_chain(hosts, answers, "node3", False) == ["node3"]
    assert python_env_chain(hosts, answers, "node4", True) == ["node4"]


# ---- the comparison of hosts ----

LOCK = """\
numpy==2.4.6 ; python_full_version < '3.12' --hash=x
numpy==2.5.5 ; python_full_version >= '3.12' --hash=x
pyyaml==6.0.3 --hash=x
"""


def environment(python="3.11.2", **versions):
    return {
        "python": python,
        "versions": {"numpy": "2.4.6", "pyyaml": "6.0.3", "torch": "2.13.0+cpu", **versions},
    }


def test_equal_environments_have_no_differences():
    assert python_env_differences({"node1": environment(), "node2": environment()}, LOCK) == []


@pytest.mark.parametrize(
    ("odd", "named"),
    [
        (
            environment(torch="2.13.0+cu128"),
            "node3: torch 2.13.0+cu128 (most have 2.13.0+cpu, such as node1)",
        ),
        (environment(pyyaml="6.0.2"), "node3: pyyaml 6.0.2 (most have 6.0.3, such as node1)"),
        (environment(extra="1.0"), "node3: extra 1.0 (most have nothing, such as node1)"),
        (environment(numpy="2.4.5"), "node3: numpy 2.4.5 (most have 2.4.6, such as node1)"),
        (
            environment("3.12.3", numpy="2.5.5", pyyaml="5"),
            "node3: pyyaml 5 (most have 6.0.3, such as node1)",
        ),
    ],
)
def test_a_planted_difference_is_named_with_host_and_package(odd, named):
    hosts = {"node1": environment(), "node2": environment(), "node3": odd}
    assert python_env_differences(hosts, LOCK) == [named]


def test_what_the_lock_pins_by_python_version_may_differ_by_it():
    hosts = {"node1": environment(), "node2": environment("3.13.1", numpy="2.5.5")}
    assert python_env_differences(hosts, LOCK) == []


# ---- one Python for all hosts ----

BROUGHT = python_env_brought((ROOT / "requirements/python.sha256").read_text(), "https://a.folder")
NOT_YET = {"bring_python": "x86_64"}  # 3.12, which is to be brought


@pytest.mark.parametrize(
    ("pythons", "found", "odd"),
    [
        (["3.11.2", "3.11.2"], "", ""),
        (["3.12.3", "3.12.16", NOT_YET], "", ""),  # the last number may differ: preflight.yml warns of it
        (["3.13.5"], "", ""),  # of site.yml -l, whose other hosts nobody asks
        (["3.11.2", "3.12.3", "3.11.2"], "3.11.2 on node1, node3; 3.12.3 on node2;", "node1, node3:"),
        (["3.12.3", "3.13.5"], "3.12.3 on node1; 3.13.5 on node2;", "node2:"),
        (["3.13.5", "3.11.2"], "3.11.2 on node2; 3.13.5 on node1;", "node1, node2:"),
        ([NOT_YET, "3.11.2"], "3.11.2 on node2; 3.12.", "node2:"),
    ],
)
def test_hosts_whose_pythons_would_differ_are_named_with_the_cure(pythons, found, odd):
    answers = {
        f"node{number}": one if one is NOT_YET else {"interpreter": one}
        for number, one in enumerate(pythons, 1)
    }
    said = python_env_mix(answers, BROUGHT)
    assert bool(said) == bool(odd) and found in said
    assert not odd or f"Put `python_env_python: bring` into the inventory, as a variable of {odd}" in said


def test_which_python_a_host_would_take_is_told_before_anything_is_made(run_module, tmp_path):
    options = {"lock": LOCK, "torch": "torch==2.0", "python": sys.executable}
    told = run_module("python_env", check=True, dir=str(tmp_path / "env"), **options)
    assert told["interpreter"] == ".".join(map(str, sys.version_info[:3])) and not list(tmp_path.iterdir())
    told = run_module("python_env", check=True, dir=str(tmp_path), **{**options, "python": "bring"})
    assert "python_env_python: bring" in told["msg"], told


def test_site_refuses_the_mix_before_it_changes_a_host(tmp_path):
    """roles/python_env's precheck, on hosts that are names of this machine."""
    pythons = {"node1": "3.11.2", "node2": "3.12.3"}
    hosts = {
        host: {"python_env_python": fake_python(tmp_path / f"python{version}", version)}
        for host, version in pythons.items()
    }
    variables = {
        "ansible_connection": "local",
        "ansible_become": False,
        "python_env_dir": str(tmp_path / "env"),
    }
    variables["ansible_python_interpreter"] = sys.executable
    (tmp_path / "hosts.yml").write_text(json.dumps({"all": {"hosts": hosts, "vars": variables}}))
    role = {"name": str(ROOT / "roles/python_env"), "tasks_from": "precheck", "rolespec_validate": False}
    play = {"hosts": "all", "gather_facts": False, "tasks": [{"ansible.builtin.import_role": role}]}
    (tmp_path / "play.yml").write_text(json.dumps([play]))

    def run(*more):
        command = [str(Path(sys.executable).with_name("ansible-playbook")), "-i", tmp_path / "hosts.yml"]
        done = subprocess.run(
            [*command, tmp_path / "play.yml", *more],
            env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"},
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        return done.returncode, " ".join(done.stdout.split())

    code, said = run()
    assert code != 0 and "3.11.2 on node1; 3.12.3 on node2" in said, said
    assert "`python_env_python: bring` into the inventory, as a variable of node1:" in said, said
    assert run("-l", "node2")[0] == 0 and not (tmp_path / "env").exists()


@pytest.mark.parametrize("swapped", ["the whole directory", "a link", "another wheel beside it"])
def test_what_the_service_user_puts_among_the_wheels_is_not_installed(case, tmp_path, swapped):
    """torch has no hash in the lock; what was brought has one, which counts when it is installed, too."""
    staging = Path(case.options["wheels"])
    (torch,) = staging.glob("torch-*.whl")
    evil = tmp_path / "evil"
    evil.mkdir()
    make_wheel(evil, "torch", "2.0+zz", asks=["alpha>=1"])
    (other,) = evil.glob("torch-*.whl")
    if swapped == "a link":
        torch.unlink()
        torch.symlink_to(other)
    elif swapped == "the whole directory":
        torch.write_bytes(other.read_bytes())
    else:
        (staging / other.name).write_bytes(other.read_bytes())
        assert case.have()["torch"] == "2.0+cpu"
        return
    with pytest.raises(python_env.Failure, match=r"found a SHA-256 of|a moment ago"):
        case.have()
    assert not list(Path(case.options["dir"]).glob("*/.complete"))
