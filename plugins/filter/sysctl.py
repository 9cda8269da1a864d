"""Kernel settings of the role tuning, merged with the inventory's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def sysctl_settings(own: Iterable[Mapping[str, str]], wanted: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The role's `own` settings (key, value, why), then the others of `wanted` (key: value).

    A key of `wanted` overrides, and says so (asked); one with an empty value is left out altogether.
    """
    settings = {setting["key"]: dict(setting) for setting in own}
    for key, value in wanted.items():
        settings[key] = {
            "key": key,
            "value": " ".join(str("" if value is None else value).split()),
            "why": "Set in the inventory.",
            "asked": True,
        }
    return [setting for setting in settings.values() if setting["value"]]


class FilterModule:
    def filters(self):
        return {"sysctl_settings": sysctl_settings}
