"""What an administrator tells all programs of the way to the internet."""

from __future__ import annotations

import contextlib
import os

WAY_OUT = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "ssl_cert_file", "ssl_cert_dir")
SETTINGS = "/etc/environment"


def way_out() -> dict[str, str]:
    """What stands in this module's environment, else in SETTINGS (Debian's sudo does not read it), of WAY_OUT.

    A SOCKS proxy is left out: what fetches has no words for it, and refuses to begin.
    """
    told = {}
    with contextlib.suppress(OSError), open(SETTINGS, encoding="utf-8", errors="replace") as file:
        for line in file:
            name, mark, value = line.strip().removeprefix("export ").partition("=")
            if mark:
                told[name.strip()] = value.strip().strip("\"'")
    told |= os.environ
    return {
        name: value
        for name, value in told.items()
        if name.lower() in WAY_OUT and value and not value.lower().startswith("socks")
    }
