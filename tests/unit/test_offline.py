"""What the controller works out and brings for hosts without an index: wheels, packages, and the transfer itself."""

import base64
import gzip
import io
import itertools
import os
import re
import sys
import tarfile
import zipfile
from pathlib import Path

import ansible.module_utils
import pytest

ROOT = Path(__file__).resolve().parents[2]
ansible.module_utils.__path__.append(str(ROOT / "plugins/module_utils"))
sys.path.append(str(ROOT / "plugins/module_utils"))


from ansible.module_utils.received_files import Damaged, sha256, unpack  # noqa: E402

from plugins.module_utils import offline_apt, offline_wheels  # noqa: E402
from plugins.modules import packages  # noqa: E402

MARKERS = {
    "implementation_name": "cpython",
    "implementation_version": "3.12.3",
    "os_name": "posix",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "platform_release": "6.8",
    "platform_system": "Linux",
    "platform_version": "1",
    "python_full_version": "3.12.3",
    "python_version": "3.12",
    "sys_platform": "linux",
}

LOCK = """\
numpy==2.4.6 ; python_full_version < '3.12' \\
    --hash=sha256:aa \\
    --hash=sha256:ab
numpy==2.5.5 ; python_full_version >= '3.12' \\
    --hash=sha256:ba
colorama==0.4.6 ; sys_platform == 'win32' \\
    --hash=sha256:ca
# a comment
PyYAML==6.0.3 \\
    --hash=sha256:da \\
    --hash=sha256:db
"""

# ---- wheels ----


def test_the_lock_is_read_as_the_host_would_read_it():
    needed = offline_wheels.locked_for(LOCK, MARKERS)
    assert needed == {
        "numpy": "numpy==2.5.5 --hash=sha256:ba",
        "pyyaml": "PyYAML==6.0.3 --hash=sha256:da --hash=sha256:db",
    }
    older = {**MARKERS, "python_full_version": "3.11.2", "python_version": "3.11"}
    assert offline_wheels.locked_for(LOCK, older)["numpy"] == "numpy==2.4.6 --hash=sha256:aa --hash=sha256:ab"


def test_the_real_lock_has_every_package_that_is_asked_for():
    needed = offline_wheels.locked_for((ROOT / "requirements/trainer.txt").read_text(), MARKERS)
    assert {"numpy", "transformers", "tokenizers", "safetensors", "pyyaml", "sympy", "networkx"} <= set(
        needed
    )
    assert all(" --hash=sha256:" in line and ";" not in line for line in needed.values())


def wheel(directory, name, version, *asks):
    path = directory / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {one}" for one in asks)]
        # As of no time: a second one has the same hash.
        archive.writestr(
            zipfile.ZipInfo(f"{name}-{version}.dist-info/METADATA"), "\n".join(lines) + "\n\nA description.\n"
        )
    return path


def test_torchs_own_packages_are_followed_and_the_locks_are_not(tmp_path, monkeypatch):
    shelf = {
        "torch": (
            "2.0",
            'cuda-toolkit[blas,rt]==13.0; platform_system == "Linux"',
            'nvidia-nccl==2.27; platform_system == "Linux"',
            "numpy",
            "optree; extra == 'optree'",
        ),
        # It pins what its extras bring; another asks for any of them, in a round before.
        "cuda-toolkit": (
            "13.0",
            "nvidia-rt==13.0; extra == 'rt'",
            "nvidia-fft==1; extra == 'fft'",
            "nvidia-more",
        ),
        "nvidia-more": ("1.0", "nvidia-base<1.5"),
        "nvidia-rt": ("13.0",),
        "nvidia-nccl": ("2.27", "nvidia-base>=1", "nvidia-rt"),
        "nvidia-base": ("1.1",),
        "numpy": ("2.5.5",),
        "pyyaml": ("6.0.3",),
    }
    asked = []

    def download(requirements, target, directory, *options, say):
        asked.append((sorted(requirements), options))
        for line in requirements:
            name = re.match(r"[A-Za-z-]+", line)[0].lower()
            version, *asks = shelf[name]
            wheel(directory, name.replace("-", "_"), "2.0" if line == "nvidia-base>=1" else version, *asks)

    monkeypatch.setattr(offline_wheels, "download", download)
    target = {"markers": MARKERS, "glibc": "2.39"}
    wheels = offline_wheels.wheelhouse(LOCK, "torch==2.0", target, tmp_path / "house" / "key")
    assert sorted(name.split("-")[0] for name in wheels) == [
        "cuda_toolkit",
        "numpy",
        "nvidia_base",
        "nvidia_more",
        "nvidia_nccl",
        "nvidia_rt",
        "pyyaml",
        "torch",
    ]
    assert asked[0][1] == ("--require-hashes",)
    assert [requirements for requirements, _ in asked[1:]] == [
        ["torch==2.0"],
        ["cuda-toolkit[blas,rt]==13.0", "nvidia-nccl==2.27"],
        ["nvidia-base>=1", "nvidia-more", "nvidia-rt==13.0"],
        ["nvidia-base<1.5,>=1"],
    ]
    # Whole: the second asks for nothing. Not whole: all over again.
    assert offline_wheels.wheelhouse(LOCK, "torch==2.0", target, tmp_path / "house" / "key") == wheels
    assert len(asked) == 5
    next((tmp_path / "house" / "key").glob("torch*")).unlink()
    assert offline_wheels.wheelhouse(LOCK, "torch==2.0", target, tmp_path / "house" / "key") == wheels
    assert len(asked) == 10


def test_pip_is_told_the_hosts_platform():
    options = offline_wheels.platform_options({"markers": MARKERS, "glibc": "2.31"})
    platforms = [options[i + 1] for i, option in enumerate(options) if option == "--platform"]
    assert platforms[0] == "manylinux_2_31_x86_64"
    assert {"manylinux_2_28_x86_64", "manylinux2014_x86_64", "linux_x86_64"} <= set(platforms)
    assert "manylinux_2_32_x86_64" not in platforms
    assert options[options.index("--python-version") + 1] == "3.12"
    assert "cp312" in options


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """`pip(script)`: the controller's Python is this shell script; returns the directory to download into."""

    def prepare(script):
        (tmp_path / "python").write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / "python").chmod(0o755)
        monkeypatch.setattr(offline_wheels.sys, "executable", str(tmp_path / "python"))
        (tmp_path / "house").mkdir()
        return tmp_path / "house"

    return prepare


def test_a_missing_build_is_said_with_the_cure(pip):
    house = pip("echo 'ERROR: No matching distribution found for torch==2.13.0' >&2; exit 1")
    with pytest.raises(offline_wheels.Failure, match=r"Python 3\.12 on x86_64.*(?s:.)*find-links.*"):
        offline_wheels.download(["torch==2.13.0"], {"markers": MARKERS, "glibc": "2.36"}, house)


def test_a_constraint_of_the_controllers_own_is_not_for_the_lock(pip, monkeypatch):
    monkeypatch.setenv("PIP_CONSTRAINT", "/etc/pip/constraint.txt")
    house = pip('[ "$PIP_CONSTRAINT" = /dev/null ]')
    offline_wheels.download(["big==1.0"], {"markers": MARKERS, "glibc": "2.36"}, house)


def test_what_the_controller_downloads_is_said_and_nothing_besides_is_left(pip):
    house = pip(
        "echo '  Downloading big-1.0-py3-none-any.whl (40.0 MB)'\n"
        "mkdir $TMPDIR/pip-unpack-a; truncate -s 10000000 $TMPDIR/pip-unpack-a/big-1.0-py3-none-any.whl; sleep 1.5"
    )
    said = []
    offline_wheels.download(
        ["big==1.0"], {"markers": MARKERS, "glibc": "2.36"}, house, "--require-hashes", say=said.append
    )
    assert said == ["the controller: big: 10 of 40 MB"]
    assert list(house.iterdir()) == []


def test_what_the_controllers_apt_downloads_is_said_and_why_it_fails(tmp_path, monkeypatch):
    (tmp_path / "apt-get").write_text(
        "#!/bin/bash\nfor one; do [[ $one == APT::Status-Fd=* ]] && fd=${one#*=}; done\n"
        "echo 'Need to get 8 MB of archives.'; echo dlstatus:1:50:x >&$fd; sleep 1.5; echo E: gone >&2; exit 7\n"
    )
    (tmp_path / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    said = []
    with pytest.raises(offline_apt.Failure, match=r"`apt-get install x` ended with 7:(?s:.)*E: gone"):
        offline_apt.run(["apt-get", "install", "x"], None, "it begins", said.append)
    assert said == ["downloading, 4 of 8 MB"]


# ---- distribution packages ----


def test_what_apt_would_install_is_read_off_its_simulation():
    output = """\
Inst libnetplan0 (0.106-2 Debian:12.11/stable [amd64])
Inst perl-base [5.36.0-7] (5.36.0-7+deb12u2 Debian-Security:12/stable-security [amd64]) []
Inst libc6:i386 (2.36-9 Debian:12/stable [i386])
Inst python3-rich (1:13.3.1-1 Debian:12.11/stable, Debian:12/x [all])
Conf libnetplan0 (0.106-2 Debian:12.11/stable [amd64])
"""
    assert offline_apt.parse_simulated(output) == [
        ("libnetplan0", "0.106-2", "amd64"),
        ("perl-base", "5.36.0-7+deb12u2", "amd64"),
        ("libc6", "2.36-9", "i386"),
        ("python3-rich", "1:13.3.1-1", "all"),
    ]


def test_media_of_the_host_are_left_out():
    lines = "deb cdrom:[Debian 12]/ bookworm main\ndeb https://mirror.example.org/debian bookworm main\n"
    assert offline_apt.without_media(lines) == "deb https://mirror.example.org/debian bookworm main\n"
    mirror = "Types: deb\nURIs: https://mirror.example.org/debian\nSuites: b\n"
    stanzas = f"Types: deb\nURIs: file:/media/x\nSuites: a\n\n{mirror}"
    assert "Suites: b" in offline_apt.without_media(stanzas)
    assert "Suites: a" not in offline_apt.without_media(stanzas)


def test_keyrings_that_sources_name_are_found():
    text = "deb [arch=amd64 signed-by=/etc/apt/keyrings/a.gpg] https://mirror.example.org x main\n"
    stanza = "Types: deb\nSigned-By: /usr/share/keyrings/b.gpg\n"
    assert packages.signed_by(text) == ["/etc/apt/keyrings/a.gpg"]
    assert packages.signed_by(stanza) == ["/usr/share/keyrings/b.gpg"]
    assert packages.signed_by("Signed-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n") == []


def encode(text):
    return base64.b64encode(text.encode()).decode()


def host_state(**sources):
    return {
        "architecture": "amd64",
        "foreign": ["i386"],
        "status": base64.b64encode(gzip.compress(b"Package: base\n")).decode(),
        "sources": {
            f"/etc/apt/sources.list.d/{name}.sources": encode(text) for name, text in sources.items()
        },
        "keyrings": {
            "/usr/share/keyrings/a.gpg": encode("key"),
            "/etc/apt/trusted.gpg.d/b.asc": encode("other"),
        },
        "preferences": {"/etc/apt/preferences.d/pin": encode("Package: *\n")},
    }


def test_apt_gets_a_root_of_its_own(tmp_path, monkeypatch):
    dump = (
        'Acquire::http::Proxy "http://proxy.example.org:3128";\nAcquire::AllowInsecureRepositories "1";\n'
        'APT::Update::Post-Invoke "";\nAcquire::GzipIndexes "true";\nDPkg::Pre-Install-Pkgs:: "/bin/x";\n'
    )
    monkeypatch.setattr(offline_apt, "run", lambda command, environment=None: dump)
    state = host_state(
        a="Types: deb\nURIs: https://mirror.example.org/debian\nSigned-By: /usr/share/keyrings/a.gpg\n"
    )
    named = tmp_path / "named"
    named.mkdir()
    apt = offline_apt.HostsApt(state, tmp_path / "a path with spaces", "node1", named)
    apt.write()
    source = (apt.own / "etc/sources.list.d/a.sources").read_text()
    assert f"Signed-By: {named}/usr_share_keyrings_a.gpg" in source
    assert (named / "usr_share_keyrings_a.gpg").read_text() == "key"
    assert (apt.own / "etc/trusted.gpg.d/b.asc").read_text() == "other"
    assert (apt.own / "status").read_bytes() == b"Package: base\n"
    settings = apt.config.read_text()
    assert 'Acquire::http::Proxy "http://proxy.example.org:3128";' in settings
    assert 'Acquire::AllowInsecureRepositories "false";' in settings
    assert '"1"' not in settings
    assert "Post-Invoke" not in settings
    assert "Pre-Install" not in settings
    assert '"/var/' not in settings, "a place of the controller's own apt"
    assert 'APT::Architectures:: "i386";' in settings
    assert 'Dir::Bin::Methods::ssh "false";' in settings and 'Dir::Bin::Methods::file "false";' in settings


def test_a_host_in_other_hands_gets_nothing_done_by_the_controllers_apt(tmp_path):
    state, hook = host_state(a="deb http://a x main"), 'amd64"; APT::Update::Pre-Invoke {"id";}; Foo "x'
    for key, words in (("architecture", hook), ("foreign", ["i386", hook])):
        with pytest.raises(offline_apt.Failure, match=r"node1 says that its architecture is .*Pre-Invoke"):
            offline_apt.bring({**state, key: words}, ["nftables"], tmp_path, "node1", 0)
    for name in ("-oAPT::Update::Pre-Invoke::=id", "./x.deb", "nftables/sid", "", "a\nb"):
        with pytest.raises(offline_apt.Failure, match="node1 asks for a package "):
            offline_apt.bring(state, ["nftables=1.0.6-2+deb12u2", "libc6:i386", name], tmp_path, "node1", 0)


def test_hosts_with_the_same_sources_share_what_is_downloaded(tmp_path):
    same = [
        offline_apt.HostsApt(host_state(a="x"), tmp_path, name, tmp_path).shared
        for name in ("node1", "node2")
    ]
    other = offline_apt.HostsApt(host_state(a="y"), tmp_path, "node3", tmp_path).shared
    assert same[0] == same[1] != other


def test_the_controllers_apt_is_asked_with_names_and_options_alone(tmp_path, monkeypatch):
    """Behind a `--` its options, which how_far puts last, would be names."""
    (tmp_path / "apt-get").write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/asked\n')
    (tmp_path / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert (
        offline_apt.HostsApt(host_state(a="x"), tmp_path, "node1", tmp_path).lacking(["nftables", "etcd"])
        == {}
    )
    asked = [line.split() for line in (tmp_path / "asked").read_text().splitlines()]
    assert len(asked) == 2
    for words in asked:
        names = [one for before, one in itertools.pairwise(words) if one[0] != "-" and before != "-o"]
        assert words[0] == "install" and names == ["nftables", "etcd"] and "--" not in words


@pytest.mark.parametrize("lacks", [False, True])
def test_a_source_of_the_hosts_that_is_gone_does_not_stand_in_the_way_of_others(tmp_path, monkeypatch, lacks):
    def update(self, valid_seconds):
        raise offline_apt.Failure("E: somebody's repository does not have a Release file")

    def lacking(self, names):
        if lacks:
            raise offline_apt.Failure("E: Unable to locate package a")
        return {"a_1_amd64.deb": "0" * 64}

    monkeypatch.setattr(offline_apt.shutil, "which", lambda name: name)
    for name, value in {"write": lambda self: None, "update": update, "lacking": lacking}.items():
        monkeypatch.setattr(offline_apt.HostsApt, name, value)
    if lacks:
        with pytest.raises(
            offline_apt.Failure, match=r"locate package a\nBefore that, (?s:.)*somebody's repository"
        ):
            offline_apt.bring(host_state(a="deb http://a x main"), ["a"], tmp_path, "node1", 0)
    else:
        assert offline_apt.bring(host_state(a="deb http://a x main"), ["a"], tmp_path, "node1", 0)[1] == {
            "a_1_amd64.deb": "0" * 64
        }


def test_a_controller_without_apt_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(offline_apt.shutil, "which", lambda name: None)
    with pytest.raises(offline_apt.Failure, match=r"node1.*nftables.*has no apt"):
        offline_apt.bring(host_state(a="x"), ["nftables"], tmp_path, "node1", 0)


# ---- the transfer ----


def packed(tmp_path, **files):
    path = tmp_path / "files.tar"
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name.replace("__", "/"))
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return str(path)


def test_files_arrive_as_they_were_sent(tmp_path):
    (tmp_path / "sent").write_bytes(b"content")
    digest = sha256(str(tmp_path / "sent"))
    unpack(packed(tmp_path, a=b"content"), str(tmp_path), {"a": digest})
    assert (tmp_path / "a").read_bytes() == b"content"
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("name", ["b", "..__a", "sub__a"])
def test_files_that_were_not_announced_are_refused(tmp_path, name):
    announced = {"a": "0", "../a": "0", "sub/a": "0"}
    directory = tmp_path / "in"
    directory.mkdir()
    with pytest.raises(Damaged, match="not announced"):
        unpack(packed(tmp_path, **{name: b"x"}), str(directory), announced)
    assert list(directory.iterdir()) == []


def test_a_damaged_file_is_refused_and_not_kept(tmp_path):
    directory = tmp_path / "in"
    directory.mkdir()
    with pytest.raises(Damaged, match="a arrived damaged"):
        unpack(packed(tmp_path, a=b"x"), str(directory), {"a": "0" * 64})
    assert list(directory.iterdir()) == []
