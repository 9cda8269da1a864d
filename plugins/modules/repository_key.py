#!/usr/bin/python
"""The public key of an apt repository, in a file for Signed-By; only the one that is expected gets there."""

from __future__ import annotations

DOCUMENTATION = r"""
module: repository_key
short_description: Have the public key of an apt repository, checked against its fingerprint
description:
  - Fetches the key, or takes it as I(text), and writes it only if every key in it has the fingerprint that is expected.
  - Needs no gpg on the host.
options:
  path: {type: path, required: true, description: The file; it ends in C(.asc).}
  fingerprint: {type: str, required: true, description: "40 hexadecimal digits, of the whole fingerprint."}
  url: {type: str, required: true, description: Where the key lies.}
  text: {type: str, default: "", description: "The key itself, ASCII-armoured, for a host that does not reach I(url)."}
author: [Trainyard]
"""

EXAMPLES = r"""
- name: Know NVIDIA's key
  repository_key:
    path: /etc/apt/keyrings/nvidia.asc
    url: https://repository.example/3bf863cc.pub
    fingerprint: EB693B3035CD5710E231E123A4B469963BF863CC
"""

RETURN = r"""
fingerprints:
  description: Of the keys in the file.
  type: list
  returned: when it was written or there already
"""

import base64
import binascii
import hashlib
import os
import re
import tempfile

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.urls import fetch_url

ARMOUR = re.compile(
    r"-----BEGIN PGP PUBLIC KEY BLOCK-----\s*?\n(?:[^\n]+: [^\n]*\n)*\s*\n(.*?)(?:\n=[A-Za-z0-9+/]{4})?\s*"
    r"-----END PGP PUBLIC KEY BLOCK-----",
    re.DOTALL,
)
PUBLIC_KEY = 6  # OpenPGP's tag of a primary public key's packet


def fingerprints(text: str) -> list[str]:
    """The fingerprints, in upper case, of the primary keys in an ASCII-armoured text. Raises ValueError."""
    blocks = ARMOUR.findall(text.replace("\r\n", "\n"))
    if not blocks:
        raise ValueError("it is no ASCII-armoured public key")
    found = []
    try:
        for block in blocks:
            found += [
                fingerprint(body) for tag, body in packets(base64.b64decode(block)) if tag == PUBLIC_KEY
            ]
    except (IndexError, binascii.Error):
        raise ValueError("the key is damaged") from None
    if not found:
        raise ValueError("there is no public key in it")
    return found


def fingerprint(body: bytes) -> str:
    """Of a version 4 key's packet (RFC 4880, 12.2)."""
    if body[0] != 4:
        raise ValueError(f"a key of version {body[0]}; expected version 4")
    return hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body).hexdigest().upper()


def packets(data: bytes):
    """(tag, body) of each OpenPGP packet (RFC 4880, 4.2)."""
    at = 0
    while at < len(data):
        head = data[at]
        if not head & 0x80:
            raise ValueError("the key is damaged")
        at += 1
        if head & 0x40:  # the new form: the length says its own size
            tag, first = head & 0x3F, data[at]
            if first < 192:
                length, size = first, 1
            elif first < 224:
                length, size = ((first - 192) << 8) + data[at + 1] + 192, 2
            elif first == 255:
                length, size = int.from_bytes(data[at + 1 : at + 5], "big"), 5
            else:
                raise ValueError("a key in parts, which none is")
        else:
            tag, size = (head >> 2) & 0x0F, 1 << (head & 0x03)
            if size == 8:
                raise ValueError("a key of unknown length")
            length = int.from_bytes(data[at : at + size], "big")
        at += size
        if at + length > len(data):
            raise ValueError("the key is cut off")
        yield tag, data[at : at + length]
        at += length


def fault(text: str, expected: str) -> str:
    """Why `text` is not the key that is expected, and it alone; empty if it is."""
    try:
        found = fingerprints(text)
    except ValueError as error:
        return str(error)
    if set(found) != {expected.upper()}:
        return f"found {', '.join(found)}; expected {expected.upper()}"
    return ""


def read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "fingerprint": {"type": "str", "required": True},
            "url": {"type": "str", "required": True},
            "text": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    path, expected, text = (module.params[name] for name in ("path", "fingerprint", "text"))
    if not fault(read(path), expected):
        module.exit_json(changed=False, fingerprints=[expected])
    if module.check_mode:
        module.exit_json(changed=True, fingerprints=[])
    origin = "the key that the controller brought (nvidia_repository_key)"
    if not text:
        origin = module.params["url"]
        answer, info = fetch_url(module, origin, timeout=30)
        if info["status"] != 200:
            module.fail_json(
                msg=f"{origin}: {info['msg']}. Where this host does not reach it, fetch the key elsewhere, and set "
                "nvidia_repository_key to its file on the controller; or set nvidia_source: distribution."
            )
        text = answer.read().decode("ascii", errors="replace")
    if wrong := fault(text, expected):
        module.fail_json(
            msg=f"{origin} is not the repository's key: {wrong}. Nothing was installed. Has its owner changed it, then "
            "Trainyard must be told so; else somebody stands between."
        )
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=module.tmpdir, delete=False) as file:
        file.write(text)
    module.atomic_move(file.name, path)
    module.set_mode_if_different(path, "0644", False)
    module.exit_json(changed=True, fingerprints=[expected])


if __name__ == "__main__":
    main()
