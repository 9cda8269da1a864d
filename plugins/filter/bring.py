"""In which order hosts pass on what a run needs: first whoever has it already."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def bring_files(files: Iterable[Mapping]) -> list[dict]:
    """What a host is told of the files to bring; where they lie on the controller is none of its business.

    Nor is it a host's to say: of what one names, no more is believed.
    """
    return [{key: one[key] for key in ("path", "bytes", "sha256")} for one in files]


def bring_order(nodes: list[str], files: list[Mapping], hostvars: Mapping) -> list[str]:
    """The hosts as a chain: the one that has the most bytes of the files comes first, else the order stays.

    `hostvars`: each host's answer of bring_host's step `have` is its `__trainer_here`. The first of the chain gets from
    the controller what it lacks; what the controller has not, it must have. What one host alone has names it (`host`).
    """
    if named := [one["host"] for one in files if "host" in one]:
        return [named[0]] + [node for node in nodes if node != named[0]]

    def bytes_of(node: str, only: list[Mapping]) -> int:
        here = (hostvars[node].get("__trainer_here") or {}).get("here") or {}
        return sum(int(here.get(one["path"], 0)) for one in only)

    fetched = [one for one in files if "source" not in one]
    best = max(nodes, key=lambda node: (bytes_of(node, fetched), bytes_of(node, list(files))))
    return [best] + [node for node in nodes if node != best]


def offered(answer: Mapping, asked: Mapping, host: str) -> dict:
    """What bring_host's step `offer` answered on `host`, as run_config's uploads are; asked: its key and name."""
    found = answer["offered"]
    told = {key: found[key] for key in ("path", "directory", "bytes")}
    files = [{key: one[key] for key in ("path", "bytes", "sha256", "here")} for one in found["files"]]
    return {**told, **asked, "files": [{**one, "host": host} for one in files]}


class FilterModule:
    def filters(self):
        return {"bring_files": bring_files, "bring_order": bring_order, "offered": offered}
