"""docs/troubleshooting.md: what people look up is there, in their words; what it quotes of ours, the code says."""

import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip().split("|")[1:-1]]
    for line in PAGE.splitlines()
    if line.startswith("| ")
][2:]
SEEN = [row[0].replace("`", "").lower() for row in ROWS]
SYMPTOMS = (
    # those of any cluster at 2 a.m.
    "connect() failed",
    "no route to host",
    "CUDA out of memory",
    "hangs after init",
    "initializing process group",
    "one GPU slow",
    "NaN",
    "spikes",  # diverging
    "different versions of torch",
    "ModuleNotFoundError",
    "tokenizer has no pad token",
    "Address already in use",
    "port down",
    "the same host name twice",
    "model is not found on the second host",
    "libcudnn",
    "Distributed package doesn't have NCCL",
    # those of the first evening
    "the role 'inventory_check' was not found",
    "Completely failed to parse inventory source",
    "Permission denied (publickey,password)",
    "UNREACHABLE!",
    "Missing sudo password",
    "Could not get lock /var/lib/dpkg/lock-frontend",
    "401",
    "403",
    "gated repository",
    "Error while deserializing header",
    "certificate verify failed",
    "No matching distribution found",
    "ECC",
    "Xid",
    "Duplicate GPU detected",
    "I cannot log in any more",
    "disk is full",
)
# What Ansible, SSH, sudo, apt, the hub, pip, NCCL, torch, the driver and the kernel say.
OTHERS = {
    "the role 'inventory_check' was not found",
    "Could not load 'live' callback plugin",
    "couldn't resolve module/action",
    "Completely failed to parse inventory source",
    "Permission denied (publickey,password)",
    "Missing sudo password",
    "Incorrect sudo password",
    "Could not get lock /var/lib/dpkg/lock-frontend",
    "Conflicting values set for option Signed-By",
    "Can not perform a '--user' install",
    "Illegal instruction",
    "The module interpreter '/usr/bin/python3' was not found",
    "sudo: not found",
    "401 Client Error",
    "403 Forbidden",
    "Error while deserializing header",
    "header too large",
    "incomplete metadata, file not fully covered",
    "certificate verify failed",
    "Duplicate GPU detected",
    "connect() failed",
    "no route to host",
    "CUDA out of memory",
    "libcudnn … cannot open shared object file",
    "Distributed package doesn't have NCCL",
    "Driver/library version mismatch",
    "No devices were found",
    "Key was rejected by service",
    "Address already in use",
    "mount.nfs: access denied by server",
    "Connection timed out",
    "tokenizer has no pad token",
}
# What is typed or set, and no message.
TYPED = re.compile(
    r"-|\S+\.yml |(playbooks|systemd-inhibit|systemctl|journalctl|nvidia-smi|ansible-vault)\b|\w+(: | = )\S+$"
)


@functools.cache
def code():
    """What runs on the controller and on hosts, with strings that go on in the next line put together."""
    found = [path for folder in ("plugins", "roles", "trainer") for path in (ROOT / folder).rglob("*")]
    text = " ".join(path.read_text() for path in found if path.suffix in (".py", ".yml", ".j2", ".sh"))
    return re.sub(r"\s+", " ", re.sub(r'"\s*\n\s*f?"', "", text))


def said(page):
    """The spans of several words that are a message of ours, each as the pieces between its names and numbers."""
    for span in re.findall(r"`([^`]+)`", page):
        if " " in span and span not in OTHERS and not TYPED.match(span):
            pieces = re.split(r"…|  |: |(?:\bstep )?\b[A-Z]+\b(?!')|\d+(?:%| s)?|\+", span)
            yield span, [stripped for piece in pieces if (stripped := piece.strip(" ,.:;()"))]


@pytest.mark.parametrize("symptom", SYMPTOMS)
def test_what_people_look_up_is_there(symptom):
    assert any(symptom.lower() in seen for seen in SEEN)


def test_each_row_says_what_happens():
    assert len(ROWS) > 35
    assert all(len(row) == 3 and row[0] and row[1] for row in ROWS)


def test_what_is_quoted_is_what_the_code_says():
    quoted = list(said(PAGE))
    assert len(quoted) > 20
    assert [span for span, pieces in quoted if any(piece not in code() for piece in pieces)] == []


def test_a_message_that_nothing_says_is_found():
    ((_, pieces),) = said("`HOST failed again and again and is left behind`")
    assert pieces == ["failed again and again and is left behind"] and pieces[0] not in code()
    assert (
        list(said("`site.yml --tags storage`, `strategy: fsdp`, `journalctl -k`, `-e run=… -e rank=3`")) == []
    )
