"""The module repository_key: a repository's public key is known by its fingerprint."""

import base64
import hashlib

import pytest


@pytest.fixture(scope="module")
def keys(load_module):
    return load_module("repository_key")


def armoured(*packets):
    body = base64.b64encode(b"".join(packets)).decode()
    lines = "\n".join(body[at : at + 64] for at in range(0, len(body), 64))
    return f"-----BEGIN PGP PUBLIC KEY BLOCK-----\nVersion: x\n\n{lines}\n=abcd\n-----END PGP PUBLIC KEY BLOCK-----\n"


def key_packet(fill, new=False):
    """A version 4 RSA key's packet, as long as a real one, and its fingerprint."""
    body = b"\x04\x60\x00\x00\x00\x01" + bytes([fill]) * 520
    head = b"\xc6\xc1\x4e" if new else b"\x99" + len(body).to_bytes(2, "big")
    return head + body, hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body).hexdigest().upper()


@pytest.mark.parametrize("new", [False, True])
def test_a_key_is_known_by_its_fingerprint(keys, new):
    packet, expected = key_packet(7, new)
    user = b"\xb4\x04anna"
    assert keys.fingerprints(armoured(packet, user)) == [expected]
    assert keys.fault(armoured(packet, user), expected.lower()) == ""


def test_a_second_key_in_the_file_is_refused(keys):
    (good, expected), (bad, other) = key_packet(7), key_packet(8)
    assert other in keys.fault(armoured(good, bad), expected)
    assert other in keys.fault(armoured(good) + armoured(bad), expected)


@pytest.mark.parametrize(
    "text", ["", "<html>not found</html>", armoured(b"\x99\xff\xff\x04"), armoured(b"\x00")]
)
def test_what_is_no_key_is_said_in_words(keys, text):
    assert keys.fault(text, "A" * 40)


def test_a_wrong_key_is_not_written(run_module, tmp_path):
    packet, expected = key_packet(7)
    path = tmp_path / "keys/nvidia.asc"
    given = {"path": str(path), "url": "https://mirror.example/key.pub", "text": armoured(packet)}
    wrong = run_module("repository_key", **given, fingerprint="A" * 40)
    assert "expected AAAA" in wrong["msg"] and expected in wrong["msg"]
    assert not path.exists()
    assert run_module("repository_key", check=True, **given, fingerprint=expected)["changed"]
    assert not path.exists()
    assert run_module("repository_key", **given, fingerprint=expected)["changed"]
    assert path.stat().st_mode & 0o777 == 0o644
    assert not run_module("repository_key", **given, fingerprint=expected)["changed"]
