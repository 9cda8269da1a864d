#!/usr/bin/python
"""Build the locked Python environment of the trainer, once per lock, whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.how_far import ENVIRONMENT, Note, Pip, followed
from ansible.module_utils.installed_packages import installed_versions, versions_digest
from ansible.module_utils.way_out import way_out

DOCUMENTATION = r"""
module: python_env
short_description: One virtual environment per lock, complete or invisible
description:
  - The environment is I(dir)/KEY; KEY is the hash of the lock, torch's pin, Python X.Y and the architecture.
  - It counts once C(.complete) is written, which is last. A killed run leaves none; the next starts anew.
  - I(dir)/current points to the newest, I(dir)/previous to the one before; others are removed, unless in use.
  - Meanwhile the file C(.progress) in I(dir) says how far it is, which the action plugin of the same name tells.
  - Where the host reaches no index, that plugin collects the wheels on the controller, and says which they are; once
    they have been brought, it is called again.
  - So it is where C(python3) is no Python of the lock, as Ubuntu 22.04's, and I(brought) names one for the machine;
    and with C(bring) for I(python).
  - In check mode C(interpreter) is the version of the Python that it would take.
options:
  dir:
    description: Directory of all environments.
    type: path
    required: true
  lock:
    description: Text of the requirements file with versions and hashes.
    type: str
    required: true
  torch:
    description: torch's requirement with its version, e.g. C(torch==2.13.0).
    type: str
    required: true
  python:
    description: What the environment is made of; a path, a name on PATH, or C(bring) for one in I(brought).
    type: str
    default: python3
  source:
    description: Where wheels come from. C(auto) asks pip whether it reaches its index.
    choices: [auto, index, controller]
    default: auto
  releases:
    description: Glob of release directories; the environments that their files C(environment) name stay.
    type: str
    default: ''
  cache_dir:
    description: pip's cache for this installation, removed when it is complete. pip's own when not given.
    type: path
  lock_timeout:
    description: Seconds to wait for another run that builds in I(dir).
    type: int
    default: 3600
  venv_follows:
    description: Whether an interpreter without its venv module is no fault; then C(venv_missing) says so.
    type: bool
    default: false
  wheels:
    description: Directory on the host with wheels that were brought from the controller; removed once all is installed.
    type: path
  hashes:
    description: SHA-256 of each of these wheels, by its name; no others are taken.
    type: dict
    default: {}
  brought:
    description: For each machine (C(x86_64)) the C(name) of a Python's archive and its C(sha256), to take where
      I(python) is C(python3) and that is none of the lock, or is C(bring).
    type: dict
    default: {}
  archive:
    description: That archive on the host; removed, with its directory, once it is unpacked.
    type: path
"""

EXAMPLES = r"""
- name: Have the trainer's environment
  python_env:
    dir: /opt/trainyard/env
    lock: "{{ lookup('ansible.builtin.file', 'requirements/trainer.txt') }}"
    torch: torch==2.13.0
"""

SUPPORTED = ((3, 11), (3, 13))
BRING = "bring"  # of the option `python`: what is brought, whatever the host has
TRIES = 4  # of an installation whose downloads break off
BROKEN_OFF = re.compile(
    r"IncompleteRead|Connection (broken|reset|aborted)|ConnectionResetError|ProtocolError|[Rr]ead timed out|ReadTimeout"
    r"|DO NOT MATCH THE HASHES|BadZipFile|bad magic number"
)
PYTHONS = ".python"  # beside the environments: the Pythons that were brought
# What a machine may tell pip for all that it installs, and that would put this elsewhere or in other versions: pip.conf
# with `user`, say, or the constraint of NVIDIA's containers. pip passes over an empty variable, and goes by pip.conf.
NOT_HERE = {"PIP_USER": "0", "PIP_CONSTRAINT": os.devnull, "PIP_DRY_RUN": "0", "PIP_REQUIRE_HASHES": "0"}
NEITHER = ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_PYTHON")

# What pip must know about a machine to choose wheels for it (PEP 508's names), asked of the interpreter.
PROBE = """
import importlib.util, json, os, platform, sys
print(json.dumps({
    "executable": sys.executable,
    "venv": all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")),
    "glibc": platform.libc_ver()[1],
    "markers": {
        "implementation_name": sys.implementation.name,
        "implementation_version": platform.python_version(),
        "os_name": os.name,
        "platform_machine": platform.machine(),
        "platform_python_implementation": platform.python_implementation(),
        "platform_release": platform.release(),
        "platform_system": platform.system(),
        "platform_version": platform.version(),
        "python_full_version": platform.python_version(),
        "python_version": ".".join(platform.python_version_tuple()[:2]),
        "sys_platform": sys.platform,
    },
}))
"""

# A step of training, so that a wheel which this machine cannot load fails here and not in a run. It also leaves
# compiled what a run loads, a fifth of all that there is: the service user may not write here, and would compile
# it anew at every start.
SELF_TEST = """
import json, numpy, safetensors.torch, tokenizers, torch, torch.distributed.run, yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
shape = {"n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 8, "vocab_size": 8}
model = AutoModelForCausalLM.from_config(
    AutoConfig.for_model("gpt2", **shape, bos_token_id=None, eos_token_id=None)
)
optimizer = torch.optim.AdamW(model.parameters())
model(input_ids=torch.zeros(1, 4, dtype=torch.long), use_cache=False).logits.sum().backward()
optimizer.step()
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda}))
"""


class Failure(Exception):
    """What the user is told: what failed, and the cure."""


class Unfit(Failure):
    """A Python that the lock is not for."""


def interpreter(python: str) -> dict:
    """What the probe says about `python`; refuses a missing one and a version that is not in the lock."""
    path = python if os.sep in python else shutil.which(python)
    if not path or not os.path.exists(path):
        raise Failure(
            f"no Python at {python!r}. Install one of 3.11 to 3.13, or name it in python_env_python."
        )
    # -I: neither the directory that we are in nor the user's own packages belong to it.
    asked = subprocess.run([path, "-I", "-c", PROBE], capture_output=True, text=True)
    if asked.returncode:
        raise Failure(f"{path} does not run: {asked.stderr.strip()[-300:]}")
    about = json.loads(asked.stdout.splitlines()[-1])  # a machine's sitecustomize may speak before
    version = about["markers"]["python_full_version"]
    minor = tuple(map(int, about["markers"]["python_version"].split(".")))
    # Ubuntu 22.04's python3.11 is 3.11.0rc1, in which torch does not load.
    if not SUPPORTED[0] <= minor <= SUPPORTED[1] or not re.fullmatch(r"[0-9.]+", version):
        raise Unfit(
            f"{path} is Python {version}; the trainer's environment is locked for 3.11, 3.12 and 3.13, none of them a "
            "pre-release. Debian 12 and 13 and Ubuntu 24.04 have one, and python_env_python: python3, which is the "
            "default, has one brought where the distribution's is too old. Or install one on this host and name it in "
            "its python_env_python."
        )
    return about


def chosen(options: dict) -> dict | None:
    """What the probe says about the environment's Python; None where the controller must bring it first.

    It is `python`, or, where that says so or is the distribution's and not of the lock, the one in I(brought).
    """
    python, machine = options["python"], os.uname().machine
    wanted = options["brought"].get(machine)
    if python != BRING:
        try:
            return interpreter(python)
        except Unfit:
            if python != "python3" or not wanted:
                raise
    elif not wanted:
        raise Unfit(
            f"python_env_python: {BRING}: found a machine of the kind {machine}; expected one of "
            f"{', '.join(options['brought'])}, for which there is a Python to bring. Install one of 3.11 to 3.13 on "
            "this host, the X.Y that the others have, and name it in its python_env_python."
        )
    home = os.path.join(options["dir"], PYTHONS, wanted["sha256"][:16])
    if not os.path.exists(home) and not options["archive"]:
        return None
    if options["archive"]:
        os.makedirs(os.path.dirname(home), mode=0o755, exist_ok=True)
        with locked(options["dir"], options["lock_timeout"]):
            try:
                if not os.path.exists(home):
                    unpack(options["archive"], wanted["sha256"], home)
            finally:  # where it was altered, it shall come anew
                remove_brought(os.path.dirname(options["archive"]))
    return interpreter(os.path.join(home, "bin", "python3"))


def unpack(archive: str, sha256: str, home: str) -> None:
    """Have what is in an archive's one directory at `home`, whole or not at all."""
    with open(archive, "rb") as stream:
        content = stream.read()
    # What was looked at is what is unpacked: the file lies where the service user may change it.
    if (found := hashlib.sha256(content).hexdigest()) != sha256:
        raise Failure(
            f"{archive} hashes to {found}, not to {sha256}: it was altered on its way. Run it again."
        )
    with tempfile.TemporaryDirectory(dir=os.path.dirname(home), prefix="new-") as work:
        inside = os.path.join(work, "python")
        os.mkdir(inside, 0o755)
        whole = ("--extract", "--gzip", "--no-same-owner", "--strip-components=1")
        must("tar", *whole, "-C", inside, "-f", "-", content=content)
        python, library = os.path.join(inside, "bin", "python3"), os.path.join(inside, "lib")
        must(python, "-I", "-c", "import ensurepip, venv")
        # The service user may not write here, and would compile the standard library at every start. What does not
        # compile of it is there for its own tests.
        subprocess.run([python, "-I", "-m", "compileall", "-q", library], capture_output=True)
        must("sync", "-f", inside)
        os.rename(inside, home)


def must(*command: str, content: bytes = b"") -> None:
    """Run a command, with `content` as its input; raises Failure with its last words."""
    done = subprocess.run(command, input=content, capture_output=True)
    if done.returncode:
        said = (done.stderr or done.stdout).decode(errors="replace").strip()
        raise Failure(f"`{' '.join(command)}` failed: {said[-500:]}")


def remove_brought(directory: str) -> None:
    """Remove a directory of brought files, and the one that it is in, unless another's are in that.

    That one lies in the service user's directory: where a link is in its place, nothing is removed behind it.
    """
    above, name = os.path.split(directory.rstrip("/"))
    with contextlib.suppress(OSError):
        handle = os.open(above, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            shutil.rmtree(f"/proc/self/fd/{handle}/{name}", ignore_errors=True)
        finally:
            os.close(handle)
        os.rmdir(above)


def keep(file, target: str) -> str:
    """Copy an open file to `target`; its SHA-256.

    No link to it: who wrote it, under a name of its own once, may still have it open.
    """
    digest = hashlib.sha256()
    with open(target, "wb") as copy:
        while block := file.read(1 << 20):
            digest.update(block)
            copy.write(block)
    return digest.hexdigest()


def environment_key(lock: str, torch: str, python_version: str, machine: str, brought: str = "") -> str:
    """Name of an environment: 16 hex digits of everything that decides what is in it.

    brought: which Python was brought for it, "" with the host's own. An environment is of the Python that made it.
    """
    parts = [lock.strip(), torch.strip(), python_version, machine, *([brought] if brought else [])]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def read_complete(path: str) -> dict | None:
    """The record of a complete environment; None if it is not complete or no longer what was recorded."""
    try:
        with open(os.path.join(path, ".complete"), encoding="utf-8") as stream:
            record = json.load(stream)
    except (OSError, ValueError):
        return None
    intact = (
        os.path.exists(os.path.join(path, "bin", "python")) and installed_versions(path) == record["versions"]
    )
    return record if intact else None


def made_of(path: str) -> str:
    """The words of an environment on the Python that it is made of; none where it is not there."""
    try:
        with open(os.path.join(path, "pyvenv.cfg"), encoding="utf-8") as stream:
            return stream.read()
    except OSError:
        return ""


def processes_using(path: str) -> list[int]:
    """Processes that run from an environment or have mapped a library of it."""
    found = []
    for process in glob.glob("/proc/[0-9]*"):
        for name in ("cmdline", "maps"):
            with contextlib.suppress(OSError), open(f"{process}/{name}", "rb") as stream:
                content = stream.read()  # what is mapped is told without links, what is typed as it was typed
                if any(os.fsencode(one) + b"/" in content for one in {path, os.path.realpath(path)}):
                    found.append(int(os.path.basename(process)))
                    break
    return sorted(set(found) - {os.getpid(), os.getppid()})


def remove(path: str) -> None:
    """Remove an environment, its mark of completeness first."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(path, ".complete"))
    shutil.rmtree(path, ignore_errors=True)
    if os.path.lexists(path):
        raise Failure(f"cannot remove {path}; remove it by hand (rm -r {path}) and run again.")


def point(link: str, target: str) -> None:
    """Let the symlink `link` point to `target`, in one step."""
    new = f"{link}.new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)
    os.symlink(target, new)
    os.rename(new, link)


@contextlib.contextmanager
def locked(directory: str, timeout: int) -> Iterator[int]:
    """Hold the lock of `directory`; yields its descriptor. A child that inherits it keeps the lock, too."""
    descriptor = os.open(os.path.join(directory, ".lock"), os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + timeout
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Failure(
                        f"another run builds in {directory}, for more than {timeout} s now. "
                        f"See who with `fuser {directory}/.lock`, end it, and run again."
                    ) from None
                time.sleep(0.5)
        yield descriptor
    finally:
        os.close(descriptor)


class Environment:
    """One environment: where it lies, what goes into it, and how its commands run."""

    def __init__(self, options: dict, about: dict) -> None:
        markers = about["markers"]
        self.options = options
        self.about = about
        _, _, brought = about["executable"].partition(f"/{PYTHONS}/")
        self.key = environment_key(
            options["lock"],
            options["torch"],
            markers["python_version"],
            markers["platform_machine"],
            brought.split("/")[0],
        )
        self.directory = options["dir"]
        self.path = os.path.join(self.directory, self.key)
        self.lock_descriptor = -1
        self.note = Note(os.path.join(self.directory, ENVIRONMENT))

    def record(self) -> dict | None:
        """The record of the complete environment."""
        return read_complete(self.path)

    def settings(self) -> dict:
        """How its commands run, as subprocess takes it."""
        environment = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith("PYTHON") and k not in ("VIRTUAL_ENV", *NEITHER)
        }
        environment |= way_out() | NOT_HERE
        if self.options["cache_dir"]:
            environment["PIP_CACHE_DIR"] = self.options["cache_dir"]
        # /tmp may be memory, and a CUDA build of torch is several gigabytes.
        environment.update(TMPDIR=self.temporary(), PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_INPUT="1")
        return {"env": environment, "pass_fds": [self.lock_descriptor], "cwd": self.directory}

    def run(self, *command: str) -> str:
        """Run a command that must succeed; its output."""
        done = subprocess.run(command, capture_output=True, text=True, **self.settings())
        if done.returncode:
            raise Failure(explain(command, done.stdout + done.stderr + killed(done.returncode), self))
        return done.stdout

    def install(self, *arguments: str, wanted: int = 0) -> None:
        """Have the environment's pip install, and say meanwhile how far it is. wanted: as of `Pip`.

        What breaks off on its way pip does not try again; what it has whole is in its cache.
        """
        for attempt in range(TRIES):
            code, output = self._install(arguments, wanted)
            if not code:
                return
            # Of what pip has tried again by itself it warns.
            words = "\n".join(
                line for line in output.splitlines() if not line.lstrip().startswith("WARNING:")
            )
            if attempt + 1 == TRIES or not BROKEN_OFF.search(words):
                raise Failure(explain(("pip", "install", *arguments), output + killed(code), self))
            self.note.say("the download broke off, and is tried again")

    def _install(self, arguments: tuple[str, ...], wanted: int) -> tuple[int, str]:
        command = (
            f"{self.path}/bin/python",
            "-I",
            "-m",
            "pip",
            "install",
            "--progress-bar=off",
            "--timeout=60",
            *arguments,
        )
        pip = Pip(self.temporary(), lambda: installed_versions(self.path), wanted)
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **self.settings()
        )
        return followed(process, pip.hear, lambda: self.note.say(pip.now()))

    def temporary(self) -> str:
        """A directory for pip's temporary files, on the environment's own disk."""
        path = os.path.join(self.directory, ".tmp")
        os.makedirs(path, mode=0o700, exist_ok=True)
        return path

    def pip(self, *arguments: str) -> str:
        """Run the environment's pip."""
        return self.run(f"{self.path}/bin/python", "-I", "-m", "pip", *arguments)

    def write(self, name: str, text: str) -> str:
        """A file in the environment's directory; its path."""
        path = os.path.join(self.path, name)
        with open(path, "w", encoding="utf-8") as stream:
            stream.write(text)
        return path

    def want_venv(self) -> None:
        """Refuse an interpreter that lacks what a virtual environment takes."""
        if not self.about["venv"]:
            version = self.about["markers"]["python_version"]
            raise Failure(
                f"{self.about['executable']} cannot make virtual environments. On Debian and Ubuntu: "
                f"sudo apt install python{version}-venv"
            )

    def start(self) -> None:
        """An empty virtual environment at its final place: its scripts name that path."""
        empty = os.path.join(self.path, ".empty")
        if os.path.exists(empty):
            return  # made by the call that found no index, for this one with the wheels
        if os.path.lexists(self.path):
            if users := processes_using(self.path):
                raise Failure(
                    f"{self.path} is not what was installed there (someone used pip in it?), and processes "
                    f"{', '.join(map(str, users))} use it. Stop the run first (trainer stop), then run again."
                )
            remove(self.path)
        self.want_venv()
        self.run(self.about["executable"], "-I", "-m", "venv", self.path)
        self.write(".empty", "")

    def reaches_index(self) -> bool:
        """Whether the host's pip, as it is set up, finds the first package of the lock."""
        first = re.search(r"^[\w.-]+==\S+", self.options["lock"], re.MULTILINE)
        probe = self.temporary()
        try:
            self.pip(
                "download",
                "--quiet",
                "--no-deps",
                "--retries",
                "0",
                "--timeout",
                "8",
                "--dest",
                probe,
                first[0],
            )
        except Failure:
            return False
        return True

    def build(self, offline: bool) -> dict:
        """Install all, test it, and write the record that makes it count; the record."""
        started = time.monotonic()
        os.unlink(os.path.join(self.path, ".empty"))
        lock = self.write("requirements.txt", self.options["lock"])
        install = ("--no-compile", "--only-binary=:all:")
        if offline:
            install = ("--isolated", *install, "--no-index", "--find-links", self.own_wheels())
        # The lock is complete but for torch, which some of its packages ask for.
        locked = len(re.findall(r"^[\w.-]+==", self.options["lock"], re.MULTILINE))
        self.install(*install, "--no-deps", "--require-hashes", "--requirement", lock, wanted=locked)
        # A CPU build of torch finds all that it asks for in the lock. A CUDA build brings the nvidia packages
        # that it pins, and the constraints keep it from replacing anything of the lock.
        pinned = "".join(f"{name}=={version}\n" for name, version in installed_versions(self.path).items())
        constraints = self.write("constraints.txt", pinned)
        self.install(*install, "--constraint", constraints, self.options["torch"])
        self.note.say("trying it out")
        self.pip("check")
        tested = json.loads(self.run(f"{self.path}/bin/python", "-I", "-c", SELF_TEST).splitlines()[-1])
        versions = installed_versions(self.path)
        record = {
            "key": self.key,
            "python": self.about["markers"]["python_full_version"],
            **tested,
            "versions": versions,
            "digest": versions_digest(versions),
            "source": "controller" if offline else "index",
            "seconds": round(time.monotonic() - started, 1),
        }
        self.note.say("waiting for the disk")
        # All that was installed reaches the disk before the mark that says so.
        subprocess.run(["sync", "-f", self.path], check=True)
        path = self.write(".complete.new", json.dumps(record, indent=1) + "\n")
        with open(path, "rb") as stream:
            os.fsync(stream.fileno())
        os.rename(path, os.path.join(self.path, ".complete"))
        subprocess.run(["sync", "-f", self.path], check=True)
        return record

    def forget(self, full: bool) -> None:
        """Remove what a build left that failed: the disk is runs', too. full: also what pip would go on with."""
        remove(self.path)
        for rest in (self.temporary(), self.options["cache_dir"] if full else ""):
            if rest:
                shutil.rmtree(rest, ignore_errors=True)

    def own_wheels(self) -> str:
        """A directory of root's with the wheels that were brought, each as it was announced. Raises Failure.

        The lock has no hash of torch, and these lie in the service user's directory: who was let in as that user may
        have put others there since they arrived.
        """
        folder = os.path.join(self.temporary(), "wheels")
        shutil.rmtree(folder, ignore_errors=True)
        os.mkdir(folder, 0o700)
        for name, digest in self.options["hashes"].items():
            source, target = os.path.join(self.options["wheels"], name), os.path.join(folder, name)
            try:
                file = open(os.open(source, os.O_RDONLY | os.O_NOFOLLOW), "rb")  # noqa: SIM115 - closed below
            except OSError as error:
                raise Failure(
                    f"{source}: {error.strerror}, and it was brought a moment ago. Run again."
                ) from None
            with file:
                found = keep(file, target)
            if found != digest:
                remove_brought(self.options["wheels"])  # they shall come anew
                raise Failure(
                    f"{source}: found a SHA-256 of {found[:12]}…; expected {digest[:12]}…. Somebody has changed it "
                    "since it was brought: see who may log in there as the service user."
                )
        return folder

    def make_current(self) -> bool:
        """Point `current` here and `previous` to the one before; whether that changed anything."""
        current = os.path.join(self.directory, "current")
        before = os.readlink(current) if os.path.islink(current) else None
        if before == self.key:
            return False
        if before and os.path.isdir(os.path.join(self.directory, before)):
            point(os.path.join(self.directory, "previous"), before)
        point(current, self.key)
        return True

    def clean(self) -> list[str]:
        """Remove what only installing needed, and environments that nothing needs; the names of these."""
        for rest in (os.path.join(self.directory, ".tmp"), self.options["cache_dir"]):
            if rest:
                shutil.rmtree(rest, ignore_errors=True)
        if self.options["wheels"]:
            remove_brought(self.options["wheels"])
        keep = {self.key}
        for link in ("current", "previous"):
            with contextlib.suppress(OSError):
                keep.add(os.readlink(os.path.join(self.directory, link)))
        releases = self.options["releases"]
        for named in glob.glob(f"{releases}/environment") if releases else []:
            with open(named, encoding="utf-8") as stream:
                keep.add(os.path.basename(stream.read().strip()))
        pruned = []
        for name in sorted(os.listdir(self.directory)):
            path = os.path.join(self.directory, name)
            if re.fullmatch(r"[0-9a-f]{16}", name) and name not in keep and not processes_using(path):
                remove(path)
                pruned.append(name)
        pruned += self.clean_pythons()
        return pruned

    def clean_pythons(self) -> list[str]:
        """Remove brought Pythons that no environment is made of, and what a killed run left; their names."""
        environments = glob.glob(os.path.join(glob.escape(self.directory), "*", ""))
        homes = self.about["executable"] + "".join(map(made_of, environments))
        pruned = []
        for path in glob.glob(os.path.join(glob.escape(self.directory), PYTHONS, "*")):
            if os.path.basename(path) not in homes and not processes_using(path):
                remove(path)
                pruned.append(os.path.join(PYTHONS, os.path.basename(path)))
        return pruned


def killed(code: int) -> str:
    """What is said of a process that ended with `code`: one that a signal ended had no time for words of its own."""
    return f"\nended by signal {-code} ({signal.strsignal(-code)})" if code < 0 else ""


def explain(command: tuple[str, ...], output: str, environment: Environment) -> str:
    """What failed, in the tool's own last words, and what to do about it."""
    markers = environment.about["markers"]
    where = f"Python {markers['python_version']} on {markers['platform_machine']}"
    free = shutil.disk_usage(environment.directory).free / 2**30
    processor = (
        "This processor lacks instructions that the packages are compiled for. A virtual machine may hide what its "
        "machine has: give it that one's processor (Proxmox: type host; libvirt: host-passthrough)."
    )
    cures = {
        "ended by signal 4": processor,
        "NumPy was built with baseline optimizations": processor,
        "ended by signal 9": "The kernel ends so what there is no memory for (dmesg says it): end what need not run "
        "there, or add swap, and run again.",
        "failed to map segment from shared object": f"The disk of {environment.directory} is mounted noexec: set "
        "python_env_dir to one that is not.",
        "No space left": f"The disk of {environment.directory} is full ({free:.1f} GiB free): make room, "
        "or set python_env_dir.",
        "DO NOT MATCH THE HASHES": "The index serves something else than the lock was made from: find "
        "out which proxy or mirror alters it.",
        "No matching distribution found for torch": f"No {environment.options['torch']} for {where}. "
        "Set python_env_torch to a build that the index has, or python_env_python to another, or "
        "tell this host's pip where the build is (pip config).",
        "No matching distribution found": f"pip finds no such wheel for {where}. Without internet on this "
        "host, set python_env_source: controller.",
        "NewConnectionError": "This host does not reach its index: set python_env_source: controller.",
    }
    cure = next((cure for symptom, cure in cures.items() if symptom in output), "")
    last = [line for line in output.splitlines() if line.strip()][-8:]
    shown = " ".join("'a step of training'" if part == SELF_TEST else part for part in command)
    return "\n".join([f"`{shown}` failed:", *last, cure]).rstrip()


def have(environment: Environment, options: dict) -> dict:
    """Have the environment, or say what the controller must bring first; the module's result."""
    source = "controller" if options["wheels"] else options["source"]
    with (
        locked(environment.directory, options["lock_timeout"]) as environment.lock_descriptor,
        contextlib.closing(environment.note) as note,
    ):
        record = environment.record()
        built = record is None
        if built:
            note.say("making an empty environment")
            environment.start()
            # The pip of the empty environment is the one that can tell whether it reaches an index.
            if source == "auto":
                note.say("asking for the package index")
                source = "index" if environment.reaches_index() else "controller"
            if source == "controller" and not options["wheels"]:
                return {"changed": False, "target": environment.about, "key": environment.key}
            try:
                record = environment.build(offline=source == "controller")
            except (Failure, OSError) as failure:
                environment.forget(full="No space left" in str(failure))
                raise
        switched = environment.make_current()
        pruned = environment.clean()
    return {
        "changed": built or switched or bool(pruned),
        "path": environment.path,
        "pruned": pruned,
        **record,
    }


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "dir": {"type": "path", "required": True},
            "lock": {"type": "str", "required": True},
            "torch": {"type": "str", "required": True},
            "python": {"type": "str", "default": "python3"},
            "source": {"choices": ["auto", "index", "controller"], "default": "auto"},
            "releases": {"type": "str", "default": ""},
            "cache_dir": {"type": "path"},
            "lock_timeout": {"type": "int", "default": 3600},
            "venv_follows": {"type": "bool", "default": False},
            "wheels": {"type": "path"},
            "hashes": {"type": "dict", "default": {}},
            "brought": {"type": "dict", "default": {}},
            "archive": {"type": "path"},
        },
        supports_check_mode=True,
    )
    options = module.params
    # The service user reads what root installs, whatever umask root has.
    os.umask(0o022)
    try:
        about = chosen(options)
        if about is None:
            module.exit_json(changed=module.check_mode, bring_python=os.uname().machine)
        environment = Environment(options, about)
        record = environment.record()
        version = about["markers"]["python_full_version"]
        if record is None and options["venv_follows"] and not environment.about["venv"]:
            module.exit_json(changed=False, venv_missing=True, interpreter=version)
        if module.check_mode:
            if record is None:
                environment.want_venv()
            module.exit_json(
                changed=record is None, path=environment.path, interpreter=version, **(record or {})
            )
        os.makedirs(environment.directory, mode=0o755, exist_ok=True)
        result = have(environment, options)
    except Failure as failure:
        module.fail_json(msg=str(failure))
    except OSError as failure:
        module.fail_json(msg=f"{failure.filename or options['dir']}: {failure.strerror}")
    module.exit_json(**result)


if __name__ == "__main__":
    main()
