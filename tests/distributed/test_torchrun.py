"""Ranks that plain torchrun starts, without a launcher of ours: as somebody types it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ranks

pytestmark = pytest.mark.distributed


FAILING = """\
import os, sys
from trainer import cli, loop

def token_loss(*_):
    raise MemoryError

if os.environ["RANK"] == "1":
    loop.token_loss = token_loss
sys.exit(cli.main())
"""


def torchrun(
    folder: Path,
    *words: str,
    node: int = 0,
    nodes: int = 1,
    processes: int = 2,
    port: int = 0,
    program=("-m", "trainer"),
):
    """torchrun of one node, begun in `folder`, with the trainer's arguments."""
    ours = {name: value for name, value in os.environ.items() if name not in ranks.MANAGED}
    where = ("--nnodes", nodes, "--node-rank", node, "--nproc-per-node", processes)
    meets = ("--master-addr", "127.0.0.1", "--master-port", port or ranks.free_port())
    command = (sys.executable, "-m", "torch.distributed.run", *where, *meets, *program, "train", *words)
    own = {"PYTHONPATH": str(ranks.ROOT), "GLOO_SOCKET_IFNAME": "lo", "XDG_CACHE_HOME": str(folder / "cache")}
    return subprocess.Popen(
        [*map(str, command)],
        cwd=folder,
        env={**ours, **own},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def said(process) -> str:
    try:
        return process.communicate(timeout=180)[0]
    finally:
        process.kill()


def test_each_rank_has_its_log_and_the_terminal_the_first_ones(material, whole, tmp_path):
    process = torchrun(tmp_path, str(material / "run.yaml"))
    text = said(process)
    directory = tmp_path / "runs" / "test"
    assert process.returncode == 0, text
    assert ranks.losses(directory) == pytest.approx(whole, rel=1e-5)
    assert f"the other rank's output is in {directory}/logs/rank-N.log" in text
    first, second = ((directory / "logs" / f"rank-{rank}.log").read_text() for rank in range(2))
    for line in ("run 'test': 2 ranks on ", "step 12/12 ", "finished: model in "):
        assert text.count(line) == first.count(line) == 1 and line not in second
    assert "=== run test, attempt 1, rank 1 of 2" in second and "===" not in text


@pytest.mark.full
def test_what_all_refuse_is_said_once(material, tmp_path):
    """Before a log can be there, and where the ranks find it out together."""
    for wrong, words in (("stepz=3", "stepz"), ("batch_size=1", "batch_size 1 is less than the 2 ranks")):
        process = torchrun(tmp_path, str(material / "run.yaml"), wrong)
        text = said(process)
        assert process.returncode == 1 and text.count("error: ") == 1, text
        assert words in next(line for line in text.splitlines() if line.startswith("error: "))
    assert "error: batch_size 1" in (tmp_path / "runs/test/logs/rank-1.log").read_text()


def test_what_one_rank_alone_knows_is_said(material, tmp_path):
    """The others only miss it."""
    (tmp_path / "failing.py").write_text(FAILING)
    process = torchrun(tmp_path, str(material / "run.yaml"), program=["failing.py"])
    text = said(process)
    assert "error: rank 1: out of memory: rank 1 on " in text and "error: lost a peer: rank 0 on " in text, (
        text
    )
    assert "error: out of memory" in (tmp_path / "runs/test/logs/rank-1.log").read_text()


@pytest.mark.full
def test_two_hosts_in_one_home(material, whole, tmp_path):
    """The same folder, the same host name even."""
    port = ranks.free_port()
    words = (str(material / "run.yaml"), "strategy=fsdp")
    nodes = [torchrun(tmp_path, *words, node=node, nodes=2, processes=1, port=port) for node in (0, 1)]
    texts = [said(node) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], texts
    directory = tmp_path / "runs" / "test"
    assert ranks.losses(directory) == pytest.approx(whole, rel=1e-5)
    assert not list(directory.rglob("*.tmp")) and (directory / "model" / "model.safetensors").is_file()
    assert (directory / "logs" / "rank-1.log").is_file() and "finished: model in" in texts[0]
