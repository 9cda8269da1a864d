"""Grafana's dashboards from the list of what they show (roles/monitoring/files/dashboards.yml)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

SOURCE = {"type": "prometheus", "uid": "trainyard"}
ACROSS, WIDTH, HEIGHT = 24, 8, 8  # Grafana's columns, and what a panel takes of them unless it says so


def grafana_dashboard(dashboards: Mapping[str, Mapping[str, Any]], name: str) -> str:
    """The JSON of dashboard `name`: its variables (`choose`), and its panels from left to right, row after row.

    A panel has title, of (an expression, or several by what they are called), by (labels that name a line), unit,
    kind (timeseries, stat, table), width, most.
    """
    about = dashboards[name]
    panels, x, y = [], 0, 0
    for number, panel in enumerate(about["panels"], 1):
        width = panel.get("width", WIDTH)
        if x + width > ACROSS:
            x, y = 0, y + HEIGHT
        panels.append({"id": number, "gridPos": {"x": x, "y": y, "w": width, "h": HEIGHT}, **_panel(panel)})
        x += width
    board = {
        "uid": f"trainyard-{name}",
        "title": about["title"],
        "tags": ["trainyard"],
        "editable": False,
        "schemaVersion": 39,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "links": [{"type": "dashboards", "tags": ["trainyard"], "title": "Trainyard", "includeVars": True}],
        "templating": {"list": [_variable(*item) for item in about["choose"].items()]},
        "panels": panels,
    }
    return json.dumps(board, indent=1) + "\n"


def _panel(panel: Mapping[str, Any]) -> dict:
    kind, of, by = panel.get("kind", "timeseries"), panel["of"], panel.get("by", [])
    line = " ".join(f"{{{{{label}}}}}" for label in by)
    named = of if isinstance(of, Mapping) else {"": of}
    defaults = {
        "unit": panel.get("unit", "short"),
        "custom": {"fillOpacity": 0} if kind == "timeseries" else {},
    }
    if kind == "timeseries" and panel.get("zero", True):
        defaults["min"] = 0
    if "most" in panel:
        defaults["max"] = panel["most"]
    return {
        "type": kind,
        "title": panel["title"],
        "datasource": SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"tooltip": {"mode": "multi"}} if kind == "timeseries" else {},
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": SOURCE,
                "expr": " ".join(expression.split()),
                "legendFormat": f"{line} {called}".strip() or panel["title"],
                **({"instant": True, "range": False} if kind != "timeseries" else {}),
                **({"format": "table"} if kind == "table" else {}),
            }
            for number, (called, expression) in enumerate(named.items())
        ],
    }


def _variable(name: str, query: str) -> dict:
    """What can be chosen above the panels: a host, or all; a run is always one."""
    several = {
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }
    return {
        "name": name,
        "label": name,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "sort": 7,
        **(several if name == "host" else {}),
    }


def grafana_package(policy: str, wanted: str) -> str:
    """The package that `monitoring_grafana: WANTED` has installed, by what `apt-cache policy` says; "" for none.

    Of Grafana's editions the one that is there: they conflict, so apt would take the owner's away for another.
    """
    told = re.findall(r"(?m)^(\S+):\n +Installed: (.+)\n +Candidate: (.+)$", policy)
    there = [name for name, installed, _ in told if installed != "(none)"]
    known = any(name == "grafana" and candidate != "(none)" for name, _, candidate in told)
    if wanted == "never" or (wanted == "auto" and not there and not known):
        return ""
    return there[0] if there else "grafana"


class FilterModule:
    def filters(self):
        return {"grafana_dashboard": grafana_dashboard, "grafana_package": grafana_package}
