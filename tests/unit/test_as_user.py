"""What root does in directories of the service user: what a link there leads to stays as it is."""

import os
import pwd
import tempfile
from pathlib import Path

import pytest

ROOT = os.geteuid() == 0
USER = (
    "nobody" if ROOT else pwd.getpwuid(os.geteuid()).pw_name
)  # what root may not hand over, a user could not either


@pytest.fixture
def home():
    """A home of USER, in a directory that it may enter."""
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o755)
        home = Path(path, "home")
        home.mkdir()
        if ROOT:
            os.chown(home, pwd.getpwnam(USER).pw_uid, pwd.getpwnam(USER).pw_gid)
        yield home


@pytest.fixture
def secret():
    """A directory and a file of root's."""
    if not ROOT:
        yield Path("/etc")
        return
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o755)
        Path(path, "shadow").write_text("anna:hash\n")
        os.chmod(Path(path, "shadow"), 0o600)
        yield Path(path)


def owner(path):
    return pwd.getpwuid(path.stat().st_uid).pw_name


def link(path, target):
    """As USER's processes would."""
    path.symlink_to(target)
    if ROOT:
        os.lchown(path, pwd.getpwnam(USER).pw_uid, pwd.getpwnam(USER).pw_gid)


@pytest.fixture
def have(load_module):
    """`have(*paths, check_mode=False)`: what the module does, as it does it; whether anything changed."""
    module = load_module("user_directories")

    def have(*paths, check_mode=False):
        with module.acting_as(USER) as entry:
            return any([module.have(str(path), entry.pw_uid, check_mode) for path in paths])

    have.refusals = (module.Failure, PermissionError)
    return have


def test_directories_are_made_as_their_user_and_only_once(have, home):
    paths = [home / "run", home / "run/logs"]
    assert have(*paths, check_mode=True)
    assert not paths[0].exists()
    assert have(*paths)
    for path in paths:
        assert owner(path) == USER and path.stat().st_mode & 0o7777 == 0o750
    assert not have(*paths)
    paths[0].chmod(0o777)
    assert have(*paths)
    assert paths[0].stat().st_mode & 0o7777 == 0o750
    assert os.geteuid() == os.getuid()


def test_a_link_of_the_user_hands_over_no_directory(have, home, secret):
    before = (owner(secret), secret.stat().st_mode)
    link(home / "cache", secret)
    for path in (home / "cache", home / "cache/logs"):
        with pytest.raises(have.refusals):
            have(path)
    assert (owner(secret), secret.stat().st_mode) == before
    assert not (secret / "logs").exists()
    link(home / "data", home / "nowhere")
    with pytest.raises(have.refusals, match="a link to"):
        have(home / "data")
    (home / "mine").mkdir()
    if ROOT:
        os.chown(home / "mine", home.stat().st_uid, home.stat().st_gid)
    link(home / "models", home / "mine")  # to another disk, say
    have(home / "models")
    assert not have(home / "models")


def test_the_module_names_path_and_cure(run_module, home, secret):
    link(home / "cache", secret)
    result = run_module("user_directories", user=USER, paths=[str(home / "cache")])
    assert f"{home}/cache: found a directory of the uid 0 (it leads to {secret})" in result["msg"]
    assert "Traceback" not in result["output"]


@pytest.mark.parametrize("place", ["file", "folder"])
def test_a_link_in_the_users_home_has_root_read_nothing_to_the_user(run_module, home, secret, place):
    ssh = home / ".ssh"
    if place == "file":
        ssh.mkdir()
        if ROOT:
            os.chown(ssh, pwd.getpwnam(USER).pw_uid, pwd.getpwnam(USER).pw_gid)
        link(ssh / "shadow", secret / "shadow")
    else:
        link(ssh, secret)
    file = {"path": str(ssh / "shadow"), "lines": {"node1": ["key trainyard@node1"]}, "owner": USER}
    modes = {"mode": "0600", "directory_mode": "0700"}
    result = run_module("peer_lines", files=[{**file, **modes}], keep=["node1"])
    assert result["failed"] and f"{ssh}/shadow: Permission denied for the user {USER}" in result["msg"]
    assert "hash" not in result["output"] and "Traceback" not in result["output"]
    if ROOT:
        assert (secret / "shadow").read_text() == "anna:hash\n" and owner(secret / "shadow") == "root"
        assert secret.stat().st_mode & 0o7777 == 0o755 and owner(secret) == "root"


def test_lines_are_written_as_their_owner(run_module, home):
    path = home / ".ssh/authorized_keys"
    arguments = {
        "path": str(path),
        "lines": {"node1": ["key trainyard@node1"]},
        "owner": USER,
        "mode": "0600",
        "directory_mode": "0700",
    }
    assert run_module("peer_lines", files=[arguments], keep=["node1"])["changed"]
    assert owner(path) == owner(path.parent) == USER
    assert path.stat().st_mode & 0o7777 == 0o600 and path.parent.stat().st_mode & 0o7777 == 0o700
    assert os.listdir(path.parent) == ["authorized_keys"]
    assert not run_module("peer_lines", files=[arguments], keep=["node1"])["changed"]
    arguments["lines"] = {"node1": ["other trainyard@node1"]}
    assert run_module("peer_lines", files=[arguments], keep=["node1"])["changed"]
    assert owner(path) == USER and "other" in path.read_text()


def test_a_link_of_the_service_users_leads_nowhere(run_module, home):
    """As that of a run's own process, to another of his files: who is let in stands where sshd is told to look."""
    ssh, kept = home / ".ssh", home / "kept"
    ssh.mkdir()
    kept.write_text("ssh-ed25519 MINE me@laptop\n")
    if ROOT:
        for path in (ssh, kept):
            os.chown(path, pwd.getpwnam(USER).pw_uid, pwd.getpwnam(USER).pw_gid)
    link(ssh / "authorized_keys", kept)
    file = {"path": str(ssh / "authorized_keys"), "lines": {"node1": ["key trainyard@node1"]}, "owner": USER}
    modes = {"mode": "0600", "directory_mode": "0700"}
    assert run_module("peer_lines", files=[{**file, **modes}], keep=["node1"])["changed"]
    assert not (ssh / "authorized_keys").is_symlink() and owner(ssh / "authorized_keys") == USER
    assert "key trainyard@node1" in (ssh / "authorized_keys").read_text()
    assert kept.read_text() == "ssh-ed25519 MINE me@laptop\n"


def test_a_runs_files_are_had_and_removed(run_module, home):
    home.chmod(0o777)  # root, who may not be its user, puts them there
    (home / "exit").write_text("1")
    wanted = {"config.yaml": "run: a\n", "exit": None, "never": None}
    options = {"directory": str(home), "files": wanted, "user": USER}
    assert run_module("run_files", check=True, **options)["names"] == ["config.yaml", "exit"]
    assert (home / "exit").exists() and not (home / "config.yaml").exists()
    assert run_module("run_files", **options)["names"] == ["config.yaml", "exit"]
    assert {path.name: path.read_text() for path in home.iterdir()} == {"config.yaml": "run: a\n"}
    assert (home / "config.yaml").stat().st_mode & 0o777 == 0o640
    assert run_module("run_files", **options)["changed"] is False
    for other in ("run: a\nmore", "run: a"):  # which begins as it should
        (home / "config.yaml").write_text(other)
        assert run_module("run_files", **options)["names"] == ["config.yaml"]
    elsewhere = {**options, "directory": str(home / "none")}
    assert run_module("run_files", check=True, **elsewhere)["changed"] is True
    assert "No such file or directory for the service user" in run_module("run_files", **elsewhere)["msg"]
    assert (
        "expected the name of a file" in run_module("run_files", **{**options, "files": {"../x": ""}})["msg"]
    )


@pytest.mark.skipif(not ROOT, reason="another user's rights need root")
def test_a_run_directory_that_was_swapped_has_root_write_nowhere_else(run_module):
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        state, roots = Path(folder, "state"), Path(folder, "netplan")
        for path in (state, roots):
            path.mkdir(mode=0o755)
        os.chown(state, pwd.getpwnam("nobody").pw_uid, -1)
        (state / "a").symlink_to(roots)
        told = run_module("run_files", directory=str(state / "a"), files={"config.yaml": "x"}, user="nobody")
        assert "Permission denied for the service user" in told["msg"] and not list(roots.iterdir())
