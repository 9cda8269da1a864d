"""The module packages and another apt at work: a lock is waited for, and who holds it too long is named."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def packages(load_module, monkeypatch):
    module = load_module("packages")
    monkeypatch.setattr(module, "LOOK_AGAIN", 0.1)
    return module


@pytest.fixture
def apt(tmp_path, monkeypatch):
    """The machine's apt with lists of its own and no sources; returns `hold(seconds)`, which takes their lock."""
    if not shutil.which("apt-get"):
        pytest.skip("no apt-get on this machine")
    (tmp_path / "lists/partial").mkdir(parents=True)
    settings = {
        "State::lists": "lists",
        "Cache": "cache",
        "Etc::sourcelist": "none",
        "Etc::sourceparts": "none",
    }
    lines = [f'Dir::{name} "{tmp_path / place}";' for name, place in settings.items()]
    (tmp_path / "apt.conf").write_text("\n".join(lines) + "\n")
    monkeypatch.setenv("APT_CONFIG", str(tmp_path / "apt.conf"))
    holders = []

    def hold(seconds, lock=tmp_path / "lists/lock"):
        command = [sys.executable, "-c", HOLD, str(lock), str(seconds)]
        holders.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        holders[-1].stdout.readline()
        return holders[-1].pid

    yield hold
    for holder in holders:
        holder.kill()
        holder.communicate()


def test_another_apt_that_refreshes_the_index_is_waited_for(packages, apt):
    apt(2)
    packages.apt_update(lock_timeout=60)


def test_who_holds_dpkg_is_waited_for_before_anything_is_installed(packages, apt, tmp_path, monkeypatch):
    if os.geteuid():
        pytest.skip("dpkg is root's")
    state = tmp_path / "dpkg"
    state.mkdir()
    for name in ("status", "lock-frontend"):
        (state / name).touch()
    settings = (tmp_path / "apt.conf").read_text()
    (tmp_path / "apt.conf").write_text(f'{settings}Dir::State::status "{state}/status";\n')
    pid = apt(60, state / "lock-frontend")
    with pytest.raises(
        packages.Hindered, match=f"process {pid} .* holds {state}/lock-frontend, for more than 1 s"
    ):
        packages.wait_for_others(lock_timeout=1)
    os.kill(pid, signal.SIGKILL)
    packages.wait_for_others(lock_timeout=1)
    (state / "status").write_text(
        "no status of packages\n"
    )  # whatever else is wrong, apt says when it installs
    packages.wait_for_others(lock_timeout=1)


def test_who_holds_the_index_too_long_is_named(packages, apt, tmp_path):
    pid = apt(60)
    with pytest.raises(packages.Failure) as failure:
        packages.apt_update(lock_timeout=1)
    text = str(failure.value)
    assert f"process {pid} (python" in text and f"holds {tmp_path}/lists/lock, for more than 1 s" in text
    assert f"ps -fp {pid}" in text and "packages_lock_timeout" in text


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (
            "E: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 7 (unattended-upgr)\n",
            "process 7 (un",
        ),
        (
            "E: Could not get lock /var/lib/apt/lists/lock - open (11: Resource)\n",
            "fuser -v /var/lib/apt/lists/lock`",
        ),
        ("E: Could not get lock /var/cache/apt/archives/lock.\n", "fuser -v /var/cache/apt/archives/lock`"),
    ],
)
def test_every_lock_is_read_from_apts_words(packages, monkeypatch, output, words):
    def run(command, words):
        raise packages.Failure(f"`apt-get update` ended with 100:\n{output}")

    monkeypatch.setattr(packages, "run", run)
    with pytest.raises(packages.Failure) as failure:
        packages.run_apt(["apt-get", "update"], 0)
    assert words in str(failure.value)


def test_another_fault_is_not_waited_for(packages, monkeypatch):
    def run(command, words):
        raise packages.Failure("E: Unable to locate package nftablse")

    monkeypatch.setattr(packages, "run", run)
    with pytest.raises(packages.Failure, match="nftablse"):
        packages.run_apt(["apt-get", "install", "nftablse"], 600)


@pytest.mark.parametrize(
    ("said", "cure", "stops"),
    [
        (
            "E: Release file for http://a/dists/noble-updates/InRelease is not valid yet (invalid for another 2d 3h). "
            "Updates for this repository will not be applied.",
            "date --set=",
            False,
        ),
        ("E: Release file for http://a/InRelease is expired (invalid since 9d).", "date --set=", False),
        ("E: Unable to locate package etcd-server", "universe", False),
        ("E: Package 'etcd-server' has no installation candidate", "universe", False),
        ("E: The list of sources could not be read.", "Signed-By", True),
        ("dpkg: error: No space left on device", "The disk is full", True),
        ("E: The repository 'http://gone Release' does not have a Release file.", "", False),
    ],
)
def test_what_is_to_be_done_is_said_beside_apts_words(packages, said, cure, stops):
    failure = packages.explained(["apt-get", "update"], 100, f"Hit:1 http://a noble InRelease\n{said}\n")
    assert said in str(failure) and isinstance(failure, packages.Hindered) == stops
    assert cure in str(failure).partition(said)[2] and bool(cure) == (not str(failure).endswith(said))


def test_what_is_to_be_done_is_said_of_more_words_than_are_shown(packages):
    said = (
        "E: Release file for http://a/InRelease is not valid yet (invalid for another 2h 1min 3s)."
        + "\nW: other" * 20
    )
    assert "date --set=" in str(packages.explained(["apt-get", "update"], 100, said))


def test_sources_that_apt_cannot_read_are_no_want_of_an_index(packages, apt, tmp_path, call_main):
    """Else the controller was to bring what is missing, and failed at the same file."""
    source = "deb [signed-by={}] http://127.0.0.1/debian bookworm {}\n"
    (tmp_path / "none").write_text(source.format("/a.gpg", "main") + source.format("/b.gpg", "contrib"))
    with pytest.raises(
        packages.Hindered, match=r"Conflicting values[^\0]*sources could not be read[^\0]*remove"
    ):
        packages.reaches_index()
    for asked in ({"names": ["no-such-package"]}, {"names": ["dpkg"], "move": True}):
        assert "remove one of them" in call_main(packages, **asked)["msg"]
    if not os.geteuid():  # before anything is changed
        with pytest.raises(packages.Hindered, match="remove one of them"):
            packages.wait_for_others(1)


@pytest.mark.parametrize(
    ("printed", "answers", "asked"),
    [
        (["http://a/debian/dists/x/InRelease", "http://b/dists/x/InRelease"], "http://a/", 1),
        # NVIDIA's local installers leave a directory and its source, which comes first.
        (["file:/var/cuda/./InRelease", "http://a/debian/dists/x/InRelease"], "http://a/", 1),
        (["file:/var/cuda/./InRelease"], "file:", 0),
        # Somebody's server that is gone, by two of its suites.
        (
            ["http://gone/dists/x/InRelease", "http://gone/dists/y/InRelease", "http://a/dists/x/InRelease"],
            "http://a/",
            2,
        ),
        (["mirror+file:/nowhere/debian.list/dists/x/InRelease"], "mirror+file:", 1),
        # A page that wants a login, whatever is asked of it.
        (["http://portal/dists/x/InRelease"], "http://portal/", 1),
        # Others' sources come first in a list, and behind a proxy that lets none but the distribution's through.
        (
            [
                *(f"http://{n}/dists/noble/InRelease" for n in range(9)),
                "http://a/dists/noble-updates/InRelease",
            ],
            "http://a/",
            1,
        ),
        ([f"http://{n}/dists/x/InRelease" for n in range(9)], "nobody", 3),
    ],
)
def test_whether_a_host_reaches_an_index(packages, monkeypatch, printed, answers, asked):
    calls = []

    def run(command, **_):
        if command[0] == "apt-get":
            return subprocess.CompletedProcess(
                command, 0, "".join(f"'{one}' InRelease 0\n" for one in printed)
            )
        calls.append(command[-2])
        found = command[-2].startswith(answers)
        if found:
            Path(command[-1]).write_bytes(
                b"<html>log in</html>" if "portal" in answers else packages.SIGNED + b"\n"
            )
        return subprocess.CompletedProcess(command, 0 if found else 100)

    monkeypatch.setattr(packages, "codename", lambda: "noble")
    monkeypatch.setattr(packages.subprocess, "run", run)
    assert packages.reaches_index() == (asked > 0 and answers not in ("nobody", "http://portal/"))
    assert len(calls) == asked and len(set(calls)) == asked


def test_a_file_of_mirrors_is_the_first_of_them(packages, tmp_path):
    """As Debian's images for clouds have it: apt-helper and another machine cannot read the host's."""
    listed = tmp_path / "mirrors/debian.list"
    listed.parent.mkdir()
    listed.write_text(
        "# made by a cloud\n\nhttps://deb.example.org/debian/\tpriority:1\nhttps://b.example.org/debian\n"
    )
    for place in (f"mirror+file:{listed}", f"mirror+file://{listed}"):
        assert (
            packages.mirrored(f"URIs: {place}\nSuites: x\n")
            == "URIs: https://deb.example.org/debian\nSuites: x\n"
        )
        assert packages.mirrored(f"deb {place} x main\n") == "deb https://deb.example.org/debian x main\n"
        printed = f"'{place}/dists/x/InRelease' y 0\n'http://c/dists/x/InRelease' y 0\n"
        assert packages.mirrored(printed) == (
            "'https://deb.example.org/debian/dists/x/InRelease' y 0\n'http://c/dists/x/InRelease' y 0\n"
        )
    listed.write_text("# none\n")
    for kept in (
        f"deb mirror+file:{listed} x main",
        "deb mirror+file:/nowhere/list x main",
        "deb http://a x main",
    ):
        assert packages.mirrored(kept) == kept


@pytest.mark.parametrize("mends", ["configure", "fix", "nothing"])
@pytest.mark.parametrize(
    "said",
    [
        "E: dpkg was interrupted, you must",
        "E: Unmet dependencies. Try 'apt --fix-broken install' with no packages",
    ],
)
def test_what_a_power_cut_left_of_an_installation_is_finished(packages, monkeypatch, said, mends):
    asked = []

    def run(command, words=""):
        asked.append(" ".join(command))
        fixes = "--fix-broken" in command
        if command[0] == "dpkg":
            if mends != "configure":
                raise packages.Failure("dpkg: error processing package b: dependency problems")
        elif mends == "nothing" or (not fixes and len(asked) == 1):
            raise packages.Failure(said)
        return ""

    monkeypatch.setattr(packages, "run", run)
    if mends == "nothing":
        with pytest.raises(packages.Failure, match=r"interrupted|Unmet"):
            packages.apt_install(["nftables"], 0)
    else:
        packages.apt_install(["nftables"], 0)
    first, configure, fix, again = asked
    assert first == again and first.endswith("nftables") and configure.endswith("--configure -a")
    assert "--fix-broken" in fix and "nftables" not in fix and "--force-confold" in fix
    assert "--no-remove" in fix  # somebody's package whose dependency is nowhere stays


def test_an_index_older_than_a_source_is_no_index(packages, monkeypatch, tmp_path):
    """Ubuntu has packages of the names that NVIDIA's repository has: apt would find them, and miss nothing."""
    partial, sources = tmp_path / "lists/partial", tmp_path / "sources.list.d"
    for folder in (partial, sources):
        folder.mkdir(parents=True)
    monkeypatch.setattr(packages, "LISTS", str(tmp_path / "lists"))
    monkeypatch.setattr(packages, "SOURCES_FILES", (str(tmp_path / "sources.list"), f"{sources}/*"))
    assert packages.index_age() == float("inf")
    (tmp_path / "lists/a_Packages").touch()
    os.utime(partial, (time.time() - 60,) * 2)
    assert 60 <= packages.index_age() < 120
    (sources / "gone.sources").symlink_to("nowhere")
    assert packages.index_age() < 120
    (sources / "nvidia.sources").touch()
    os.utime(sources / "nvidia.sources", (1.0, 1.0))  # as dpkg leaves what a package brings
    assert packages.index_age() == float("inf")
    os.utime(partial, (time.time() + 1,) * 2)
    assert packages.index_age() < 120


@pytest.mark.parametrize(
    ("printed", "answers", "refused"),
    [
        ("http://a/dists/x", False, True),
        ("http://a/dists/x", True, False),
        ("file:/srv/mirror/./", False, False),
        ("file:/var/nvidia-driver-local-repo-550/./", False, True),
    ],
)
@pytest.mark.parametrize("check", [False, True])
def test_another_version_is_refused_where_no_index_is_to_be_had(
    packages, monkeypatch, call_main, printed, answers, refused, check
):
    """In check mode, too: the role nvidia asks so before it pins the other branch."""
    monkeypatch.setattr(packages, "indexes", lambda: f"'{printed}/InRelease' InRelease 0\n")
    monkeypatch.setattr(packages, "reaches_index", lambda: answers)
    monkeypatch.setattr(packages, "installed", lambda names: set())
    monkeypatch.setattr(packages, "move", lambda *_: (True, ""))
    monkeypatch.setattr(packages, "known", lambda name: "mirror" in printed)
    found = call_main(packages, check, names=["nvidia-driver"], move=True)
    assert found.get("failed", False) is refused
    assert not refused or (
        "nvidia-driver: another version" in found["msg"] and "Name a mirror" in found["msg"]
    )


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("gone", [False, True])
def test_one_source_that_fails_does_not_stand_in_the_way_of_others(packages, monkeypatch, fresh, gone):
    """Where the index is fresh, what is asked for may be of a source that was added since."""
    asked = []

    def run_apt(command, lock_timeout, words=""):
        asked.append(command[1])
        if command[1] == "update":
            raise packages.Failure("update: E: somebody's repository does not have a Release file.")
        if gone or (fresh and asked == ["install"]):
            raise packages.Failure("install: E: Unable to locate package nftables")
        return ""

    monkeypatch.setattr(packages, "run_apt", run_apt)
    monkeypatch.setattr(packages, "index_age", lambda: 0 if fresh else float("inf"))
    monkeypatch.setattr(packages, "versions", lambda: "")
    if gone:
        for install in (
            lambda: packages.from_index(["nftables"], 3600, 60),
            lambda: packages.move(["nftables"], [], [], 60),
        ):
            with pytest.raises(
                packages.Failure, match=r"(?s)^install: .*not all package sources .*Release file"
            ):
                install()
        return
    assert "Release file" in packages.from_index(["nftables"], 3600, 60)
    assert asked == (["install", "update", "install"] if fresh else ["update", "install"])
    changed, said = packages.move(["driver"], [], [], 60)
    assert not changed and "Release file" in said


@pytest.mark.parametrize("there", [True, False])
def test_another_packages_fault_does_not_stand_in_the_way(packages, monkeypatch, call_main, there):
    """As of a DKMS module that the newest kernel does not build: whatever is installed, apt-get ends with 100."""
    asked, said = [], []
    monkeypatch.setattr(packages, "installed", lambda names: {*names} if there and asked else set())

    def from_index(*arguments):
        asked.append(arguments)
        raise packages.Failure("Errors were encountered while processing:\n nvidia-dkms-535")

    monkeypatch.setattr(packages, "from_index", from_index)
    found = call_main(packages, said=said, names=["chrony"], source="index")
    assert found.get("failed", False) is not there
    assert "nvidia-dkms-535" in (said[0] if there else found["msg"]) and (found.get("changed") or not there)


def test_a_lock_that_is_held_is_waited_for_once(packages, monkeypatch):
    asked = []

    def run_apt(command, lock_timeout, words=""):
        asked.append(command[1])
        raise packages.Hindered("process 7 holds the lock")

    monkeypatch.setattr(packages, "run_apt", run_apt)
    monkeypatch.setattr(packages, "index_age", lambda: float("inf"))
    with pytest.raises(packages.Failure, match="process 7"):
        packages.from_index(["nftables"], 3600, 60)
    assert asked == ["update"]


INSTALLED = """Package: {name}
Status: hold ok installed
Priority: optional
Section: misc
Maintainer: nobody <nobody@localhost>
Architecture: all
Version: 1
{more}Description: made up

"""
OFFERED = """Package: {name}
Architecture: all
Version: 2
Maintainer: nobody <nobody@localhost>
{more}Filename: ./{name}_2_all.deb
Size: 1
SHA256: {hash}
Description: made up

"""


def own_apt(root, *repositories, status=""):
    """Runs apt's programs on packages of `root` alone: what dpkg has (`status`), and what repositories there offer."""
    for name in ("state/lists/partial", "cache/archives/partial", "etc", "preferences.d"):
        (root / name).mkdir(parents=True)
    (root / "status").write_text(status)
    (root / "sources.list").write_text(
        "".join(f"deb [trusted=yes] file:{root / name} ./\n" for name in repositories)
    )
    own = {"State": "state", "State::status": "status", "Cache": "cache", "Etc": "etc"}
    own |= {"Etc::sourcelist": "sources.list", "Etc::preferencesparts": "preferences.d"}
    words = [word for key, path in own.items() for word in ("-o", f"Dir::{key}={root / path}")]
    words += ["-o", "APT::Sandbox::User=", "-o", "Debug::NoLocking=true"]

    def run(program, *more):
        return subprocess.run([program, *words, *more], capture_output=True, text=True)

    assert run("apt-get", "update").returncode == 0
    return run


@pytest.mark.skipif(not shutil.which("apt-get"), reason="no apt here")
def test_what_is_held_gives_way_to_what_is_named_and_needs_it(packages, tmp_path):
    """As the driver's libraries, all of which the role holds, give way to another of its releases. Only simulated."""
    needs = {"driver": "Depends: library (= {})\n", "library": ""}
    there = "".join(INSTALLED.format(name=name, more=more.format(1)) for name, more in needs.items())
    offered = (OFFERED.format(name=name, more=more.format(2), hash="0" * 64) for name, more in needs.items())
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository/Packages").write_text("".join(offered))
    apt = own_apt(tmp_path, "repository", status=there)
    done = apt("apt-get", "install", "--simulate", "--yes", *packages.FORCED, "driver")
    assert done.returncode == 0 and "Inst library [1] (2 " in done.stdout, done.stdout + done.stderr
    # Which is what the last of them does.
    assert packages.FORCED[-1] == "--ignore-hold"
    assert apt("apt-get", "install", "--simulate", "--yes", *packages.FORCED[:-1], "driver").returncode != 0


@pytest.mark.skipif(not shutil.which("apt-cache"), reason="no apt here")
def test_a_pin_to_backports_of_any_release_is_apts(tmp_path):
    """As the role nvidia writes it of headers: by apt's own words, it weighs as much as the release's."""
    from nvidia_apt import preferences

    aside = "NotAutomatic: yes\nButAutomaticUpgrades: yes\n"
    for suite, version, more in (("bookworm", 1, ""), ("bookworm-backports", 2, aside)):
        place = tmp_path / suite
        place.mkdir()
        text = OFFERED.format(name="linux-headers-amd64", more="", hash="0" * 64)
        text = text.replace("Version: 2", f"Version: {version}")
        (place / "Packages").write_text(text)
        digest = hashlib.sha256(text.encode()).hexdigest()
        (place / "Release").write_text(
            f"Codename: {suite}\nSuite: {suite}\n{more}SHA256:\n {digest} {len(text)} Packages\n"
        )
    apt = own_apt(tmp_path, "bookworm", "bookworm-backports")

    def candidate():
        return apt("apt-cache", "policy", "linux-headers-amd64").stdout.split("Candidate: ")[1].split()[0]

    assert candidate() == "1"
    (tmp_path / "preferences.d/trainyard-nvidia.pref").write_text(preferences(580, ["linux-headers-amd64"]))
    assert candidate() == "2"
