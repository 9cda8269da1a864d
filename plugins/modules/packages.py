#!/usr/bin/python
"""Install distribution packages with apt, from the host's index or from files that the controller brought."""

from __future__ import annotations

import base64
import contextlib
import glob
import gzip
import itertools
import os
import re
import shutil
import subprocess
import tempfile
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.how_far import PACKAGES, Note, apt_get
from ansible.module_utils.received_files import Damaged, unpack

DOCUMENTATION = r"""
module: packages
short_description: Install distribution packages, also on a host without a package index
description:
  - Asks dpkg what is missing and calls apt-get once for all of it.
  - With nothing missing it needs neither python3-apt nor an index, so check mode runs on an untouched host.
  - The action plugin of the same name brings packages from the controller where the host reaches no index, and tells
    meanwhile what apt does.
options:
  names:
    description: Packages to have; real ones, not virtual.
    type: list
    elements: str
    required: true
  move:
    description: >-
      Also bring installed packages of I(names) to the versions that apt's pins ask for, older or held ones too. From
      the host's own index, which is refreshed.
    type: bool
    default: false
  remove:
    description: With I(move), packages that go in the same step.
    type: list
    elements: str
    default: []
  upgrade:
    description: Installed packages to bring to the newest version that the pins allow, held ones too.
    type: list
    elements: str
    default: []
  source:
    description: Where packages come from. C(auto) asks the host's own apt whether it reaches its index.
    choices: [auto, index, controller]
    default: auto
  cache_valid_time:
    description: Seconds for which the package index counts as fresh.
    type: int
    default: 3600
  idle:
    description: Install nothing; wait until no other apt or dpkg is at work.
    type: bool
    default: false
  lock_timeout:
    description: Seconds to wait for another apt or dpkg.
    type: int
    default: 600
  files:
    description: Filled by the action plugin. Name and SHA-256 of each .deb in I(archive).
    type: dict
  archive:
    description: Filled by the action plugin. Tar file on the host that holds I(files).
    type: path
"""

EXAMPLES = r"""
- name: Install the firewall
  packages:
    names: [nftables]
"""

STATUS = "/var/lib/dpkg/status"
LISTS = "/var/lib/apt/lists"
SOURCES_FILES = ("/etc/apt/sources.list", "/etc/apt/sources.list.d/*")
PLACES = ("/", "/var", "/var/cache/apt/archives", "/boot")  # that apt and dpkg fill
LOCKED = re.compile(
    r"Could not get lock (\S+?)(?:\.\s+It is held by process (\d+) \(([^)]*)\)| - open|\.?$)", re.MULTILINE
)
LOOK_AGAIN = 2.0  # seconds
SOURCES = 3  # that are asked for an index
SIGNED = b"-----BEGIN PGP SIGNED MESSAGE-----"
NOTE = Note()  # what it does now; main says where
UNREADABLE = "The list of sources could not be read"  # by apt, which then does nothing at all
CURES = {
    UNREADABLE: "apt does nothing until that is mended. Correct what it names, in /etc/apt on the host; where two "
    "files have one source, each with another Signed-By, remove one of them. Then run again.",
    r"is not valid yet \(invalid for|is expired \(invalid since": "By the host's clock: compare `date` there, set it "
    "(sudo date --set='YYYY-MM-DD HH:MM') where it is wrong, and run again.",
    r"Unable to locate package|has no installation candidate": "None of the host's package sources (/etc/apt) has it. "
    "Ubuntu has much in universe: where that is not among them, sudo add-apt-repository universe, and run again.",
}


class Failure(Exception):
    """What the user is told: what failed, and the cure."""


class Hindered(Failure):
    """Another process holds what apt needs, the disk is full, or apt cannot read its sources."""


def installed(names: list[str]) -> set[str]:
    """Those of `names` (of all packages, if empty) that dpkg has fully installed."""
    query = subprocess.run(
        ["dpkg-query", "--show", "--showformat=${Package} ${db:Status-Status}\n", *names],
        capture_output=True,
        text=True,
    )
    return {line.split()[0] for line in query.stdout.splitlines() if line.endswith(" installed")}


def run(command: list[str], words: str = "") -> str:
    """Run a command that must succeed; its output. words: what an apt-get begins with, whose progress is told."""
    code, output = apt_get(command, words, NOTE.say, env=environment())
    if code:
        raise explained(command, code, output)
    return output


def environment() -> dict[str, str]:
    """For what asks nobody, in English."""
    quiet = {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8", "NEEDRESTART_MODE": "l"}
    return {**os.environ, **quiet}


def explained(command: list[str], code: int, output: str) -> Failure:
    """What failed, in the command's own last words, and what to do about it."""
    tail, kind = "\n".join(output.strip().splitlines()[-15:]), Failure
    if re.search("No space left on device|enough free space in ", tail):
        there = filter(os.path.isdir, PLACES)
        free = ", ".join(f"{shutil.disk_usage(one).free / 2**20:,.0f} MiB at {one}" for one in there)
        tail += (
            f"\nThe disk is full ({free} free). Make room on the host (`apt-get clean`, "
            "`journalctl --vacuum-size=200M`, old kernels: `apt-get autoremove`, `df -h`), and run again."
        )
        kind = Hindered
    elif UNREADABLE in tail:
        kind = Hindered
    cure = "".join(f"\n{words}" for symptom, words in CURES.items() if re.search(symptom, output))
    return kind(f"`{' '.join(command)}` ended with {code}:\n{tail}{cure}")


def run_apt(command: list[str], lock_timeout: int, words: str = "") -> str:
    """As `run`, but waits until no other apt holds what this one needs: apt itself waits for dpkg's lock alone."""
    deadline = time.monotonic() + lock_timeout
    while True:
        try:
            return run(command, words)
        except Failure as failure:
            locked = LOCKED.search(str(failure))
            if not locked:
                raise
            path, process, name = locked.groups()
            holder = f"process {process} ({name})" if process else "another process"
            NOTE.say(f"waiting for {holder}, which holds {path}")
            if time.monotonic() >= deadline:
                look = f"ps -fp {process}" if process else f"fuser -v {path}"
                raise Hindered(
                    f"{holder} holds {path}, for more than {lock_timeout} s now. Let it come to its end (see it with "
                    f"`{look}` on the host) and run again, or set packages_lock_timeout higher."
                ) from None
        time.sleep(LOOK_AGAIN)


def mirrored(text: str) -> str:
    """A source with the first mirror instead of the host's file of mirrors (mirror+file:), as clouds' images have it.

    apt alone knows how to read such a file: apt-helper does not, and the controller has another one, or none.
    """

    def first(found: re.Match) -> str:
        place, rest = found[1], ""
        while place != "/" and not os.path.isfile(place):
            place, name = os.path.split(place)
            rest = f"/{name}{rest}"
        try:
            with open(place, encoding="utf-8", errors="replace") as file:
                listed = [line.split()[0] for line in file if line.strip() and not line.startswith("#")]
        except OSError:
            listed = []
        return listed[0].rstrip("/") + rest if listed else found[0]

    return re.sub(r"mirror\+file:/*(/[^\s'\]]+)", first, text)


def indexes() -> str:
    """What apt would fetch to know its sources anew, a line each, the address first.

    Raises Hindered where it cannot read them, which says nothing of whether it would reach one.
    """
    command = ["apt-get", "update", "--print-uris"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    if UNREADABLE in (done.stderr or ""):
        raise explained(command, done.returncode, done.stderr)
    return done.stdout


def has_directory() -> bool:
    """Whether one of its sources is a directory of the host's own."""
    return re.search(r"^'(file|copy|cdrom):", indexes(), re.MULTILINE) is not None


def known(name: str) -> bool:
    """Whether one of its sources has a package of this name, of whichever version."""
    return bool(run(["apt-cache", "madison", name]).strip())


def reaches_index() -> bool:
    """Whether the host's apt, with its own proxies and certificates, can fetch an index by the network.

    A directory of the host's own, as NVIDIA's local installers leave it, says nothing. Of several sources one may be
    gone for good, so the first few are asked; before others the distribution's, which alone has updates and security
    apart. What answers is to be an index: a portal that wants a login answers anything.
    """
    urls = re.findall(r"^'((?!file:|copy:|cdrom:)\S+/InRelease)'", mirrored(indexes()), re.MULTILINE)
    by_source = {}
    for url in sorted(urls, key=lambda url: f"/dists/{codename()}-" not in url):
        by_source.setdefault(url.split("/dists/")[0], url)
    impatient = ["Acquire::Retries=0", "Acquire::http::Timeout=8", "Acquire::https::Timeout=8"]
    with tempfile.TemporaryDirectory() as directory:
        command = ["/usr/lib/apt/apt-helper", *as_options(*impatient, "APT::Sandbox::User=root")]
        target = os.path.join(directory, "InRelease")

        def is_index(url: str) -> bool:
            if subprocess.run([*command, "download-file", url, target], capture_output=True).returncode:
                return False
            with open(target, "rb") as file:
                return file.read(len(SIGNED)) == SIGNED

        return any(is_index(url) for url in list(by_source.values())[:SOURCES])


def codename() -> str:
    """The distribution's release, as its own source names it; "" where none is known."""
    with contextlib.suppress(OSError), open("/etc/os-release", encoding="utf-8") as file:
        for line in file:
            if line.startswith("VERSION_CODENAME="):
                return line.partition("=")[2].strip().strip('"')
    return ""


def index_age() -> float:
    """Seconds since apt last fetched an index; infinite when it has none, or when a source has come since.

    Of a source that it does not know yet apt would take nothing, and what it wants from another that has the same name.
    """
    if not glob.glob(f"{LISTS}/*_Packages*"):
        return float("inf")
    fetched = os.stat(f"{LISTS}/partial" if os.path.isdir(f"{LISTS}/partial") else LISTS).st_mtime
    files = filter(os.path.exists, itertools.chain.from_iterable(map(glob.glob, SOURCES_FILES)))
    # When it came here: a package's own file has the time of its making.
    came = max((os.stat(path).st_ctime for path in files), default=0.0)
    return float("inf") if came > fetched else time.time() - fetched


def as_options(*settings: str) -> list[str]:
    """Settings of apt as command-line options."""
    return [part for setting in settings for part in ("-o", setting)]


def wait_for_others(lock_timeout: int) -> None:
    """Until nobody else holds dpkg; raises Hindered. What else apt finds wrong is mended, or told, when it installs."""
    try:
        run_apt(["apt-get", "check", "-qq", *as_options("DPkg::Lock::Timeout=0")], lock_timeout)
    except Hindered:
        raise
    except Failure:
        return


def apt_update(lock_timeout: int) -> None:
    """Refresh the host's package index."""
    options = as_options("Acquire::Retries=3", f"DPkg::Lock::Timeout={lock_timeout}")
    run_apt(["apt-get", "update", *options], lock_timeout, "refreshing the package index")


def apt_install(what: list[str], lock_timeout: int, *options: str) -> None:
    """One apt-get for all of it; configuration files that the user changed stay as they are."""
    settings = as_options(
        f"DPkg::Lock::Timeout={lock_timeout}",
        "Acquire::Retries=3",
        "Dpkg::Options::=--force-confdef",
        "Dpkg::Options::=--force-confold",
    )
    command = ["apt-get", "install", "--yes", "--no-install-recommends", *settings, *options, *what]
    try:
        run_apt(command, lock_timeout, "working out what to install")
    except Failure as failure:
        # apt held dpkg's lock when it found this, so no other run is at work: a power cut or a kill left it.
        if not re.search(r"dpkg was interrupted|Unmet dependencies\. Try '", str(failure)):
            raise
        NOTE.say("finishing what was interrupted")
        # Of what was unpacked, something may lack another that was not, yet; what stays wrong, the command itself says.
        with contextlib.suppress(Failure):
            run(["dpkg", "--force-confdef", "--force-confold", "--configure", "-a"])
        with contextlib.suppress(Failure):
            mend = ["apt-get", "install", "--fix-broken", "--no-remove", "--yes", "--no-install-recommends"]
            run_apt([*mend, *settings, *options], lock_timeout, "working out what was interrupted")
        run_apt(command, lock_timeout, "working out what to install")


def refreshed(lock_timeout: int) -> str:
    """Refresh the index; what apt said where that failed. One source of several, somebody's PPA that is gone, does not
    stand in the way of what the others have; a lock or a full disk does.
    """
    try:
        apt_update(lock_timeout)
    except Hindered:
        raise
    except Failure as failure:
        return str(failure)
    return ""


def beside(failure: Failure, said: str) -> Failure:
    """What failed, with what apt `said` when the index was refreshed."""
    return Failure(f"{failure}\nBefore that, not all package sources answered:\n{said}") if said else failure


def from_index(missing: list[str], cache_valid_time: int, lock_timeout: int) -> str:
    """Install from the host's own package index, and look at the index anew if what it names is gone.

    Returns what `refreshed` said.
    """
    fresh = index_age() < cache_valid_time
    said = "" if fresh else refreshed(lock_timeout)
    try:
        apt_install(missing, lock_timeout)
        return said
    except Failure as failure:
        if not fresh:
            raise beside(failure, said) from None
    said = refreshed(lock_timeout)
    try:
        apt_install(missing, lock_timeout)
    except Failure as failure:
        raise beside(failure, said) from None
    return said


def versions() -> str:
    """All that dpkg has, with its versions."""
    return run(["dpkg-query", "--show", "--showformat=${Package} ${Version} ${db:Status-Status}\n"])


# The first two lift apt's last word on packages that are named, the third its rule to touch none else that is held.
FORCED = ("--allow-downgrades", "--allow-change-held-packages", "--ignore-hold")


def move(names: list[str], remove: list[str], upgrade: list[str], lock_timeout: int) -> tuple[bool, str]:
    """Install `names` without `remove`, whatever is there, and upgrade `upgrade`.

    Returns whether that changed anything, and what `refreshed` said. Held packages give way here alone, those too that
    `names` need in another version, and the pins are what may lower one.
    """
    before = versions()
    said = refreshed(lock_timeout)
    try:
        if names:
            apt_install([*names, *(f"{name}-" for name in remove)], lock_timeout, *FORCED)
        if upgrade:
            apt_install(upgrade, lock_timeout, *FORCED, "--only-upgrade")
    except Failure as failure:
        raise beside(failure, said) from None
    return versions() != before, said


def from_files(missing: list[str], files: dict[str, str], archive: str, lock_timeout: int) -> None:
    """Install the .deb files that the controller's apt verified, each checked again against its SHA-256."""
    # apt reads them unprivileged.
    with tempfile.TemporaryDirectory(prefix="trainyard-packages-") as own:
        os.chmod(own, 0o755)
        unpack(archive, own, files)
        before = installed([])
        # Without sources: what the files do not bring must be there already, and nothing else is taken instead.
        no_sources = as_options("Dir::Etc::sourcelist=/dev/null", "Dir::Etc::sourceparts=/dev/null")
        no_index = as_options(
            f"Dir::State::lists={own}/lists", "Dir::Cache::pkgcache=", "Dir::Cache::srcpkgcache="
        )
        apt_install(sorted(glob.glob(f"{own}/*.deb")), lock_timeout, *no_sources, *no_index)
        # Given as a file, a dependency counts as wanted by the user; say again that it is not.
        brought = installed([]) - before - set(missing)
        if brought:
            run(["apt-mark", "auto", *sorted(brought)])


def signed_by(text: str) -> list[str]:
    """Keyring files that a sources file (one-line or deb822) names."""
    found = re.findall(r"^signed-by:\s*(/\S.*)$|\bsigned-by=([^\s\]]+)", text, re.MULTILINE | re.IGNORECASE)
    return [
        path for pair in found for part in pair for path in re.split(r"[\s,]+", part) if path.startswith("/")
    ]


def read_many(paths: list[str]) -> dict[str, str]:
    """Path -> content (base64) of the files that are there."""
    content = {}
    for path in paths:
        if os.path.isfile(path):
            with open(path, "rb") as stream:
                content[path] = base64.b64encode(stream.read()).decode()
    return content


def apt_state() -> dict:
    """What another machine's apt needs to answer for this host: what it has, its sources, their keyrings."""

    def dpkg(*arguments: str) -> list[str]:
        return run(["dpkg", *arguments]).split()

    sources = ["/etc/apt/sources.list", *sorted(glob.glob("/etc/apt/sources.list.d/*.list"))]
    sources += sorted(glob.glob("/etc/apt/sources.list.d/*.sources"))
    keyrings = ["/etc/apt/trusted.gpg", *sorted(glob.glob("/etc/apt/trusted.gpg.d/*"))]
    for path in sources:
        if os.path.isfile(path):
            with open(path, encoding="utf-8", errors="replace") as stream:
                keyrings += signed_by(stream.read())
    with open(STATUS, "rb") as stream:
        status = base64.b64encode(gzip.compress(stream.read(), 6)).decode()
    return {
        "architecture": dpkg("--print-architecture")[0],
        "foreign": dpkg("--print-foreign-architectures"),
        "status": status,
        "sources": {
            path: base64.b64encode(
                mirrored(base64.b64decode(content).decode(errors="replace")).encode()
            ).decode()
            for path, content in read_many(sources).items()
        },
        "keyrings": read_many(keyrings),
        "preferences": read_many(["/etc/apt/preferences", *sorted(glob.glob("/etc/apt/preferences.d/*"))]),
    }


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "names": {"type": "list", "elements": "str", "required": True},
            "move": {"type": "bool", "default": False},
            "remove": {"type": "list", "elements": "str", "default": []},
            "upgrade": {"type": "list", "elements": "str", "default": []},
            "source": {"choices": ["auto", "index", "controller"], "default": "auto"},
            "cache_valid_time": {"type": "int", "default": 3600},
            "idle": {"type": "bool", "default": False},
            "lock_timeout": {"type": "int", "default": 600},
            "files": {"type": "dict"},
            "archive": {"type": "path"},
        },
        required_together=[["files", "archive"]],
        supports_check_mode=True,
    )
    options = module.params
    if not (shutil.which("apt-get") and shutil.which("dpkg-query")):
        module.fail_json(
            msg="this host has no apt-get. Trainyard serves Debian 12 or later and Ubuntu 22.04 or later; "
            "take the host out of the inventory."
        )

    def warn(said: str) -> None:
        if said:
            module.warn(
                f"not all of this host's package sources answer; see to those, or remove them: {said}"
            )

    def missing_of(names: list[str]) -> list[str]:
        present = installed(names) if names else set()
        return [name for name in names if name not in present]

    if options["idle"]:
        NOTE.path = PACKAGES
        try:
            if not module.check_mode:
                wait_for_others(options["lock_timeout"])
        except Hindered as failure:
            module.fail_json(msg=f"{failure} Nothing was changed.")
        finally:
            NOTE.close()
        module.exit_json(changed=False)
    if options["move"] or options["upgrade"]:
        names = options["names"] if options["move"] else []
        try:
            if not (reaches_index() or (has_directory() and all(map(known, names)))):
                module.fail_json(
                    msg=f"{' '.join(names or options['upgrade'])}: another version of what is installed comes from "
                    "this host's package index alone, and it reaches none (nothing was changed). Name a mirror that it "
                    "reaches in /etc/apt/sources.list, or leave the versions that are there."
                )
            if module.check_mode:
                module.exit_json(changed=bool(missing_of(names)), installed=missing_of(names))
            NOTE.path = PACKAGES
            changed, said = move(names, options["remove"], options["upgrade"], options["lock_timeout"])
            warn(said)
        except Failure as failure:
            module.fail_json(msg=str(failure))
        finally:
            NOTE.close()
        module.exit_json(changed=changed)
    missing = missing_of(options["names"])
    if not missing or module.check_mode:
        module.exit_json(changed=bool(missing), installed=missing)
    NOTE.path = PACKAGES
    try:
        if options["files"] is not None:
            from_files(missing, options["files"], options["archive"], options["lock_timeout"])
        elif options["source"] == "controller" or (options["source"] == "auto" and not reaches_index()):
            module.exit_json(changed=False, installed=[], wanted=missing, apt_state=apt_state())
        else:
            warn(from_index(missing, options["cache_valid_time"], options["lock_timeout"]))
    except (Failure, Damaged) as failure:
        if missing_of(missing):
            module.fail_json(msg=f"packages {' '.join(missing)}: {failure}")
        # Another package's fault, which each apt-get meets anew: a module that a new kernel does not build, say.
        module.warn(
            f"{' '.join(missing)} are installed, but apt could not finish something else; see to that: {failure}"
        )
    finally:
        NOTE.close()
    still = missing_of(missing)
    if still:
        module.fail_json(
            msg=f"apt-get ended, but {', '.join(still)} is not there. A virtual package? Name a real one."
        )
    module.exit_json(changed=True, installed=missing)


if __name__ == "__main__":
    main()
