"""Models and data sets of the hub: which names of a configuration mean some, who fetches them, and what came."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from ansible.errors import AnsibleFilterError

sys.path.append(str(Path(__file__).parents[2]))

from trainer.data import hub, read
from trainer.model.files import SHIPPED


def hub_names(config: Mapping, uploads: Iterable[Mapping] = ()) -> list[dict]:
    """The names in a run's configuration that the hub knows, if anybody: [{kind, key, name}]. `uploads` are known."""
    brought = {(one["key"], one["name"]) for one in uploads}
    asked = [("model", "model", config["model"])]
    asked += [
        ("dataset", key, name)
        for key in ("dataset", "validation")
        for name in read.names(config.get(key) or "")
    ]
    return [
        {"kind": kind, "key": key, "name": name}
        for kind, key, name in asked
        if (key, name) not in brought
        and not name.startswith(("/", "./", "../", "~"))
        and (name not in SHIPPED if kind == "model" else hub.is_name(name))
    ]


def hub_host(nodes: list[str], hostvars: Mapping, names: list[dict], endpoint: str) -> str:
    """The first host that reaches the hub; raises AnsibleFilterError where none does."""
    for node in nodes:
        if int((hostvars[node].get("__trainer_hub") or {}).get("status") or -1) > 0:
            return node
    first = names[0]
    option = " --repo-type dataset" if first["kind"] == "dataset" else ""
    raise AnsibleFilterError(
        f"{first['key']}: {first['name']}: no host reaches {endpoint}, where it would come from. Download it where "
        f"there is internet (hf download {first['name']}{option} --local-dir DIR) and give that directory: "
        f"-e {first['key']}=DIR"
    )


def hub_fetched(names: list[dict], results: list[Mapping]) -> list[dict]:
    """What `trainer fetch` printed for each of the names, as run_config's uploads are: with key, name, path, files."""
    return [
        {**json.loads(result["text"].strip().splitlines()[-1]), "key": one["key"], "name": one["name"]}
        for one, result in zip(names, results, strict=True)
    ]


class FilterModule:
    def filters(self):
        return {"hub_fetched": hub_fetched, "hub_host": hub_host, "hub_names": hub_names}
