"""Which host's copy of a run's model is taken, for generate.yml and export.yml."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "module_utils"))

from telling import silence


def saved_choice(results: dict[str, dict], seen: dict[str, dict], step: int | None = None) -> dict:
    """{host, path, step, launch, kind (model or checkpoint), bytes, digest, busy} of what is taken; {}: nothing there.

    What the latest start of the run made counts, of that the newest step, of equal ones the finished model, then a host
    that trains nothing (busy: false), then the first. results: what the task run_saved registered on each host; seen:
    host_status there. step: that one alone.
    """
    found = []
    for place, (host, result) in enumerate(results.items()):
        saved = result.get("saved") or {}
        busy = bool((seen.get(host, {}).get("host_status") or {}).get("active"))
        for kind in ("model", "checkpoint"):
            one = saved.get(kind)
            if one and (not step or one["step"] == step):
                found.append(
                    (
                        (one["launch"], one["step"], kind == "model", not busy, -place),
                        {**one, "host": host, "kind": kind, "busy": busy},
                    )
                )
    return max(found, key=lambda one: one[0])[1] if found else {}


def saved_fault(results: dict[str, dict], seen: dict[str, dict], run: str, step: int | None = None) -> str:
    """Why `saved_choice` finds nothing; "" where it does."""
    if saved_choice(results, seen, step):
        return ""
    damaged = [
        f"{host}: {why}"
        for host, result in results.items()
        for why in (result.get("saved") or {}).get("damaged", [])
    ]
    steps = sorted(
        {one for result in results.values() for one in (result.get("saved") or {}).get("steps", [])}
    )
    # A host that was silent already when all were looked at has not been asked again.
    asked = {host: {**seen.get(host, {}), **result} for host, result in results.items()}
    failed = [
        silence(host, result)
        for host, result in asked.items()
        if "saved" not in result and (result.get("unreachable") or result.get("failed"))
    ]
    if step:
        there = ", ".join(map(str, steps)) or "none"
        text = f"checkpoint: found no valid one of step {step} in run {run}; expected one of {there}. Correct it."
    else:
        text = (
            f"run {run}: found neither a finished model nor a valid checkpoint; expected one. Wait for its first "
            "checkpoint (status.yml shows it under SAVED), or have it saved now: stop.yml, then train.yml with "
            "-e resume=true."
        )
    return "\n".join([text, *damaged, *failed])


def generate_arguments(words: dict, choice: dict) -> list[str]:
    """The words of `trainer generate`. Joined by =, so that a prompt may begin with a hyphen."""
    options = {"max-new-tokens": "tokens", "temperature": "temperature", "top-k": "top_k", "seed": "seed"}
    given = [f"--{option}={words[word]}" for option, word in options.items() if words.get(word) is not None]
    prompt = words.get("prompt") if words.get("prompt") is not None else words.get("prompt_file")
    asked = [f"--prompt={prompt}"] if prompt is not None else []
    flags = {"chat": "--chat", "trust_remote_code": "--code"}
    return [
        "generate",
        choice["path"],
        *asked,
        *given,
        *(flag for word, flag in flags.items() if words.get(word)),
    ]


def export_about(words: dict, choice: dict, run: str) -> dict:
    """What an export is of; equal for equal ones, wherever they were made."""
    about = {"run": run, "step": choice["step"], "weights": choice["digest"]}
    return {**about, "merge": bool(words.get("merge")), "base": words.get("base")}


def export_place(words: dict, choice: dict) -> str:
    """The directory on the host where an export lies until it was fetched, beside what it is made of."""
    run_dir = choice["path"].rsplit("/model" if choice["kind"] == "model" else "/checkpoints/", 1)[0]
    base = words.get("base") or ""
    # The base's name is in its files.
    besides = f"-{hashlib.sha256(base.encode()).hexdigest()[:8]}" if base else ""
    return f"{run_dir}/export-{choice['digest'][:12]}{'-merged' if words.get('merge') else ''}{besides}"


def found_below(paths: list[str], directory: str) -> list[str]:
    """Those of the paths that a host names which are below a directory of it; no others have a place here."""
    top = f"{os.path.normpath(directory)}/"
    return [path for path in paths if os.path.normpath(path).startswith(top) and ".." not in path.split("/")]


# What no result is, in a run's directory: directories at its top, and files of its own; and what the controller itself
# keeps among the results (`make demo` the text, and other hosts' logs), for a rank may write anything, a page with a
# script, too.
NO_RESULT = re.compile(
    r"(cache|checkpoints|compiled|offload|logs/[^/]+|\.?export-[0-9a-f]{12}[^/]*|\.model\.tmp)/"
    r"|([^/]+/)*(exit|launch\.pid|requeued|signalled|stop|yield|(leave|turn)-[^/]*|collectives-[0-9]+\.json)$"
    r"|(report\.html|sample\.txt|samples\.jsonl|diagnosis\.txt|export)(/|$)"
)


def run_results(paths: list[str], run_dir: str) -> list[str]:
    """Those of the paths in a run's directory that are brought as its results, in order."""
    below = {
        path: os.path.relpath(os.path.normpath(path), os.path.normpath(run_dir))
        for path in found_below(paths, run_dir)
    }
    return sorted(path for path, name in below.items() if not NO_RESULT.match(name))


def run_source(followed: dict[str, dict], result: str, found: dict[str, dict]) -> str:
    """The host whose results are brought: of those that saw the run's end, as `result` says it, one that came furthest.

    followed: what the task run_follow registered on each host, in node order. found: what `find` did there then; who
    does not answer any more brings nothing.
    """
    there = [host for host in followed if found.get(host, {}).get("files")] or list(followed)
    saw = [host for host in there if followed[host].get("state") == result] or there
    return max(saw, key=lambda host: (followed[host].get("last") or {}).get("step") or 0)


def run_unbrought(run: str, source: str, found: dict, brought: dict, again: str) -> str:
    """What is said where the results of `run` are not all here; "" where they are.

    found, brought: what the tasks registered on the host `source`. again: the command that brings them.
    """
    parts = [brought, *brought.get("results", [])]
    bad = [one for one in parts if one.get("unreachable") or one.get("failed")]
    # Where a task before it failed there, none was brought.
    begun = brought or not found.get("files")
    if "files" in found and not found.get("unreachable") and begun and not bad:
        return ""
    why = next(
        (str(one["msg"]).splitlines()[0] for one in reversed(bad) if one.get("msg")), "it does not answer"
    )
    return (
        f"Run {run}: its results are not all here: found {source} silent, or unable to send them ({why}); they stay on "
        f"its hosts. Bring them: {again}"
    )


def export_arguments(words: dict, choice: dict) -> list[str]:
    """The words of `trainer export`."""
    base = [f"--base={words['base']}"] if words.get("base") else []
    flags = {"merge": "--merge", "trust_remote_code": "--code"}
    asked = [flag for word, flag in flags.items() if words.get(word)]
    return ["export", choice["path"], export_place(words, choice), *asked, *base]


def export_said(choice: dict, run: str, to: str, stands: bool, check: bool) -> str:
    """What came of an export, in a line."""
    there = "There is already" if stands else "There would be" if check else "There is now"
    what = "finished model" if choice["kind"] == "model" else "checkpoint"
    return f"{there} {os.path.relpath(to)}: run {run} after step {choice['step']}, the {what} on {choice['host']}."


class FilterModule:
    def filters(self):
        return {
            "export_about": export_about,
            "export_arguments": export_arguments,
            "run_unbrought": run_unbrought,
            "export_said": export_said,
            "export_place": export_place,
            "run_results": run_results,
            "run_source": run_source,
            "generate_arguments": generate_arguments,
            "saved_choice": saved_choice,
            "saved_fault": saved_fault,
        }
