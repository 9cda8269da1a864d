"""What is no file of data: refused with a message at once, wherever it is met; nothing waits for a pipe."""

import errno
import os
import socket
import tracemalloc
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from trainer import cli, environment
from trainer.config import from_mapping
from trainer.data import files, read
from trainer.errors import BadInput
from trainer.model import saved

pytestmark = pytest.mark.timeout(30)


def pipe(path):
    os.mkfifo(path)


def own_socket(path):
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(os.path.relpath(path))  # its name may be no longer than 107 bytes


def device(path):
    path.symlink_to("/dev/zero")


def nowhere(path):
    path.symlink_to("gone")


@pytest.mark.parametrize("make", [pipe, own_socket, device, nowhere])
@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet"])
@pytest.mark.parametrize("key", ["dataset", "validation"])
def test_given_by_name(tmp_path, make, suffix, key):
    path = tmp_path / f"data{suffix}"
    make(path)
    expected = "no such file or directory" if make is nowhere else "expected a file or directory, found a "
    with pytest.raises(BadInput, match=f"{key}: {path}: {expected}"):
        read.check(from_mapping({"dataset": "austen", key: str(path)}))


@pytest.mark.parametrize("make", [pipe, own_socket, device, nowhere])
def test_in_a_directory(tmp_path, make):
    """Passed over, it would be data that is silently missing."""
    (tmp_path / "sound.txt").write_text("words")
    (tmp_path / "below").mkdir()
    make(tmp_path / "below" / "data.txt")
    with pytest.raises(
        BadInput, match=r"below/data\.txt: (expected a file, found a |cannot be read: No such)"
    ):
        read.digests(from_mapping({"dataset": str(tmp_path)}))


def test_data_behind_a_link_or_named_in_capitals_is_not_left_out(tmp_path):
    """A link to a directory is not followed; one that holds no data leads to nothing that is missing."""
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    for folder in (data, elsewhere / "below"):
        folder.mkdir(parents=True)
    (data / "a.txt").write_text("words")
    (data / "wiki").symlink_to(elsewhere)
    config = from_mapping({"dataset": str(data)})
    assert files.below(data) == [data / "a.txt"]
    (data / "v2").mkdir()
    (data / "v2/c.txt").write_text("words")
    for name, target in (("latest", "v2"), ("self", "."), ("up", "..")):  # read at its own place, or a loop
        (data / name).symlink_to(target)
    assert files.below(data) == [data / "a.txt", data / "v2/c.txt"]
    (elsewhere / "below/b.jsonl").write_text('{"text": "more"}\n')
    with pytest.raises(
        BadInput, match=r"data/wiki: .*found a link to a directory with data.*name what it leads to"
    ):
        read.digests(config)
    (data / "wiki").unlink()
    (data / "C.JSONL").write_text('{"text": "more"}\n')
    with pytest.raises(BadInput, match=r"C\.JSONL: expected a name that ends in \.jsonl; rename it"):
        read.digests(config)


def test_a_file_that_cannot_be_read_is_named_itself(tmp_path, monkeypatch):
    """Reading itself raises an error that names nothing."""
    (tmp_path / "data.jsonl").write_text('{"text": "more"}\n')

    def torn(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(read.hashlib, "file_digest", torn)
    with pytest.raises(BadInput, match=r"data\.jsonl: cannot be read: Input/output error; see its disk"):
        read.digests(from_mapping({"dataset": str(tmp_path / "data.jsonl")}))


def test_a_parquet_files_reader_keeps_little(tmp_path):
    """Of a row group as large as the file no more than it is about to give."""
    rows = 32_000
    texts = [os.urandom(500).hex() for _ in range(rows)]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "data.parquet", compression="none")
    del texts
    pool, most = pyarrow.default_memory_pool(), 0
    before = pool.bytes_allocated()
    tracemalloc.start()  # what is read is Python's
    try:
        for _ in files.records(tmp_path / "data.parquet", ["text"]):
            most = max(most, pool.bytes_allocated() - before)
        most += tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 0 < most < 12e6  # of 32 MB


@pytest.mark.parametrize("make", [pipe, device])
def test_put_there_between_looking_and_reading(tmp_path, make):
    make(tmp_path / "data.jsonl")
    with pytest.raises(BadInput, match=r"data\.jsonl: expected a file, found a (pipe|device)"):
        files.opened(tmp_path / "data.jsonl")


def test_a_directory_that_may_not_be_read(tmp_path, monkeypatch):
    """Root may read everything, so that the refusal is made up."""
    (tmp_path / "sound.txt").write_text("words")
    locked = tmp_path / "locked"
    locked.mkdir()
    scan = os.scandir

    def refused(path):
        if Path(path) == locked:
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(BadInput, match=rf"{locked}: cannot be read: Permission denied; the run's user"):
        read.check(from_mapping({"dataset": str(tmp_path)}))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("~nobody-at-all/data.txt", "cannot be a path"),
        ("a\0b.txt", "cannot be a path"),
        ("x" * 300 + ".txt", "no such file or directory"),
        (",".join(["set.txt"] * 60), "no such file or directory"),
        ("/dev/null", "expected a file or directory, found a device"),
        ("/proc/self/mem", "expected a name that ends in"),
        ("set.txt/data.txt", "no such file or directory"),
    ],
)
def test_names_that_can_be_none(tmp_path, name, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "set.txt").mkdir() if "/data" in name else None
    with pytest.raises(BadInput, match=message):
        read.check(from_mapping({"dataset": name}))


NOBODY = "'~nobody-at-all/x': cannot be a path: that user's home directory is not known here; write it out, from / on"


@pytest.mark.parametrize(
    "words",
    [["generate", "~nobody-at-all/x"], ["export", "~nobody-at-all/x", "out"]],
    ids=["generate", "export"],
)
def test_a_home_that_is_not_there_is_refused_wherever_a_model_is_asked_for(words, capsys):
    assert cli.main(words) == 2
    assert capsys.readouterr().err == f"error: {NOBODY}\n"


def test_so_is_an_adapter_s_base_and_a_run_s_model(tmp_path, capsys):
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / file).write_text("{}")
    with pytest.raises(BadInput) as refused:
        saved._base(saved.find(tmp_path), "~nobody-at-all/x", "auto", False, None)
    assert (
        str(refused.value)
        == f"{tmp_path}: the adapter's base: model: {NOBODY}; say where it lies by --base DIR"
    )
    (tmp_path / "run.yaml").write_text("model: ~nobody-at-all/x\n")
    assert cli.main(["check", str(tmp_path / "run.yaml")]) == 2
    assert capsys.readouterr().err == f"error: model: {NOBODY}\n"


@pytest.mark.parametrize("command", ["check", "plan"])
@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("~nobody-at-all/x", NOBODY),
        ('"fast\\0"', "'fast\\x00': cannot be a path: found a null character in it; leave"),
    ],
    ids=["nobody", "null"],
)
def test_where_moments_are_to_lie_is_looked_at_before(
    tmp_path, capsys, monkeypatch, command, folder, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(f"strategy: infinity\ndevice: cpu\nsteps: 1\noffload_dir: {folder}\n")
    assert cli.main([command, str(tmp_path / "run.yaml")]) == 2
    assert f"error: offload_dir: {message}" in "".join(capsys.readouterr())
    (tmp_path / "run.yaml").write_text(f"offload_dir: {folder}\n")  # which nobody asks for
    assert cli.main(["check", str(tmp_path / "run.yaml"), "--config-only"]) == 0


def test_a_home_is_asked_for_only_where_nothing_else_says_where_the_cache_is(monkeypatch):
    """A process may have none: no HOME, and a number for a user."""

    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", unknown)
    for name in ("TRAINYARD_CACHE_DIR", "TRAINYARD_RUN_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        BadInput, match=r"unless TRAINYARD_CACHE_DIR names another: '~/\.cache': cannot be a path: "
    ):
        environment.read("run")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert environment.read("run").cache_dir == Path("/var/cache/trainyard")
    monkeypatch.setenv("TRAINYARD_CACHE_DIR", "/data/cache")
    assert environment.read("run").cache_dir == Path("/data/cache")


def test_the_command_says_so(tmp_path, capsys):
    pipe(tmp_path / "data.txt")
    (tmp_path / "run.yaml").write_text(f"dataset: {tmp_path}/data.txt\n")
    assert cli.main(["check", str(tmp_path / "run.yaml")]) == 2
    assert "found a pipe; write its content into a file first" in capsys.readouterr().err
