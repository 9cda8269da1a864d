"""Models and data sets of the hub: which names of a configuration mean some, who fetches them, and what came."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from ansible.errors import AnsibleFilterError

sys.path.append(str(Path(__file__).parents[2]))

from plugins.filter.bring import bring_files
from trainer.data import hub, read
from trainer.model.files import SHIPPED


def hub_names(config: Mapping, uploads: Iterable[Mapping] = ()) -> list[dict]:
    """The names in a run's configuration that the hub knows, if anybody: [{kind, key, name, folder}].

    key: the kind that `trainer fetch` knows, too. `uploads` are known. folder: of huggingface_hub's cache, where what
    was fetched before is.
    """
    brought = {(one["key"], one["name"]) for one in uploads}
    asked = [("model", "model", config["model"])]
    asked += [
        ("dataset", key, name)
        for key in ("dataset", "validation")
        for name in read.names(config.get(key) or "")
    ]
    return [
        {"kind": kind, "key": key, "name": name, "folder": f"{kind}s--{_repository(name).replace('/', '--')}"}
        for kind, key, name in asked
        if (key, name) not in brought
        and not name.startswith(("/", "./", "../", "~"))
        and (name not in SHIPPED if kind == "model" else hub.is_name(name))
    ]


def _repository(name: str) -> str:
    """A name without revision and pattern."""
    return name.split("@")[0].split(":")[0]


def hub_host(nodes: list[str], hostvars: Mapping, names: list[dict], endpoint: str) -> str:
    """The first host that reaches the hub, or else has all of `names` in its cache; raises AnsibleFilterError."""
    for node in nodes:
        if int((hostvars[node].get("__trainer_hub") or {}).get("status") or -1) > 0:
            return node
    lacking = {node: _not_cached(hostvars[node], names) for node in nodes}
    node = min(nodes, key=lambda one: len(lacking[one]))
    if not lacking[node]:
        return node
    first = lacking[node][0]
    option = " --repo-type dataset" if first["kind"] == "dataset" else ""
    raise AnsibleFilterError(
        f"{first['key']}: {first['name']}: no host reaches {endpoint}, where it would come from, and no host's "
        "cache has all that this run takes from there. Download it where there is internet "
        f"(hf download {_repository(first['name'])}{option} --local-dir DIR) and give that directory"
        f"{hub.ONLY if option else ''}: -e {first['key']}=DIR"
    )


def _not_cached(variables: Mapping, names: list[dict]) -> list[dict]:
    """Those of `names` whose folders a host did not find in its cache (tasks/fetch.yml)."""
    results = (variables.get("__trainer_cached") or {}).get("results", [])
    there = {one["item"]["folder"] for one in results if one.get("stat", {}).get("exists")}
    return [one for one in names if one["folder"] not in there]


def hub_fetched(names: list[dict], results: list[Mapping]) -> list[dict]:
    """What `trainer fetch` printed for each of the names, as run_config's uploads are: with key, name, path, files.

    cached: the commit that is of a cache, "" where the hub answered; a release before that was told says nothing.
    Of what a host says, no more is believed than where it lies there: a `source` would be a file of the controller's.
    """
    found = []
    for one, result in zip(names, results, strict=True):
        said = json.loads(result["text"].strip().splitlines()[-1])
        told = {key: said[key] for key in ("path", "directory", "bytes", "cached") if key in said}
        files = bring_files(said["files"])
        found.append({"cached": "", **told, "files": files, "key": one["key"], "name": one["name"]})
    return found


class FilterModule:
    def filters(self):
        return {"hub_fetched": hub_fetched, "hub_host": hub_host, "hub_names": hub_names}
