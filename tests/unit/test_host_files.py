"""The module host_files: files, links and directories in one call, whole and with their modes."""

import pytest


@pytest.fixture
def have(run_module):
    """`have(*files, check=False)`: the module's result."""
    return lambda *files, check=False: run_module("host_files", check=check, files=list(files))


def mine(tmp_path, **more):
    """A file that whoever runs the tests may own."""
    found = tmp_path.stat()
    return {"owner": str(found.st_uid), "group": str(found.st_gid), **more}


def test_a_file_a_link_and_a_directory_are_made_once(have, tmp_path):
    files = [
        mine(tmp_path, path=str(tmp_path / "etc/runs"), directory=True, mode="0750"),
        mine(tmp_path, path=str(tmp_path / "units/ours.service"), content="[Unit]\n", mode="0640"),
        mine(tmp_path, path=str(tmp_path / "wants/ours.service"), link_to="/etc/ours.service"),
    ]
    assert have(*files, check=True)["changed"] and not any(tmp_path.iterdir())
    assert have(*files)["paths"] == [one["path"] for one in files]
    assert {one.stat().st_mode & 0o777 for one in (tmp_path / "etc", tmp_path / "etc/runs")} == {0o750}
    unit = tmp_path / "units/ours.service"
    assert unit.read_text() == "[Unit]\n" and unit.stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "wants/ours.service").readlink().as_posix() == "/etc/ours.service"
    assert not have(*files)["changed"]


@pytest.mark.parametrize(
    "change",
    ["text", *(pytest.param(one, marks=pytest.mark.full) for one in ("mode", "link", "another link"))],
)
def test_what_somebody_changed_is_put_right(have, tmp_path, change):
    path, link = tmp_path / "a", tmp_path / "b"
    files = [
        mine(tmp_path, path=str(path), content="ours\n"),
        mine(tmp_path, path=str(link), link_to="/nowhere"),
    ]
    assert have(*files)["changed"]
    if change == "text":
        path.write_text("theirs\n")
    elif change == "mode":
        path.chmod(0o600)
    elif change == "link":
        path.unlink()
        (tmp_path / "elsewhere").write_text("ours\n")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        link.unlink()
        link.write_text("theirs\n")
    assert len(have(*files)["paths"]) == 1
    assert not path.is_symlink() and path.read_text() == "ours\n" and path.stat().st_mode & 0o777 == 0o644
    assert link.readlink().as_posix() == "/nowhere"
    assert not have(*files)["changed"]


def test_a_text_that_its_command_refuses_leaves_the_old_one(have, tmp_path):
    file = mine(tmp_path, path=str(tmp_path / "a"), content="good\n", validate="grep -q good %s")
    assert have(file)["changed"]
    refused = have({**file, "content": "bad\n"})
    assert "the new text was refused, and the old one stays" in refused["msg"]
    assert (tmp_path / "a").read_text() == "good\n"


def test_what_only_some_hosts_want_is_left_out_on_the_others(have, tmp_path):
    files = [
        mine(tmp_path, path=str(tmp_path / "conf.d/a"), content="a\n", where=str(tmp_path / "conf.d")),
        mine(tmp_path, path=str(tmp_path / "b"), content="b\n"),
    ]
    assert have(*files)["paths"] == [str(tmp_path / "b")] and not (tmp_path / "conf.d").exists()
    (tmp_path / "conf.d").mkdir()
    assert have(*files)["paths"] == [str(tmp_path / "conf.d/a")]


@pytest.mark.parametrize("more", [{}, {"content": "a", "link_to": "/b"}])
def test_what_is_to_be_there_is_said_once(have, tmp_path, more):
    assert "say one of content, link_to and directory" in have(mine(tmp_path, path="/x", **more))["msg"]
