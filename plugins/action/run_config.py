"""Turn what the operator typed into a run's whole configuration, on the controller, before any host is
touched.

Precedence, low to high: the trainer's defaults, the inventory's `trainer_config` or, of a run that is resumed, `base`
(its stored configuration) in its stead, `-e config=FILE`, `-e key=value`. Everything that can be found wrong here is
refused here: names, values, a dataset or model that is not there, and the content of the dataset.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from ansible import constants as C
from ansible import context
from ansible.module_utils.parsing.convert_bool import BOOLEANS_FALSE, BOOLEANS_TRUE
from ansible.plugins.action import ActionBase
from ansible.utils.vars import load_extra_vars

CHECKOUT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
if CHECKOUT not in sys.path:
    sys.path.append(CHECKOUT)
sys.path.append(os.path.join(CHECKOUT, "plugins/module_utils"))

from inventory_reading import read_specs
from same_files import content_hash, mark, names_below
from telling import forks_fault, limit_fault, said, same_hosts
from trainer_wheel import content_version

from trainer import config as trainer_config
from trainer.data import read as trainer_data
from trainer.errors import BadInput
from trainer.link import PLACES
from trainer.model import files as trainer_model

# What train.yml itself understands after -e, and what each is for. `run` and `resume` are keys of the
# trainer, too.
SWITCHES = {
    "beside": "start although other runs, a burn, a bench or a generate are at work on these hosts",
    "config": "a YAML file of trainer keys",
    "detach": "come back once the run trains, or waits in the queue; it goes on",
    "follow": "only follow a run that is active",
    "launcher": "what keeps the run: systemd, or slurm, which gets it as a job",
    "plan": "say what it will take on each host, and start nothing",
    "queue": "start when the runs that are active on these hosts have ended",
    "resume": "go on with a run that was stopped or failed",
    "smoke": "try a few steps on each host alone (strategy ddp only), then on all together, before the run",
}
FLAGS = tuple(name for name in SWITCHES if name not in ("config", "launcher"))  # what is true or false
LAUNCHERS = ("systemd", "slurm")
TRIAL = "smoke-"  # how the names of the trials of -e smoke=true begin
MODEL_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")  # the hub's names
DATA = ("dataset", "validation")
# How variables begin that are not ours: Ansible's, and what stands for a secret in an inventory (-e @FILE).
OTHERS = ("ansible_", "vault_")
LOGIN = r"://[^/\s]*@"  # in an address: who one is there, and perhaps the password
specs_of = functools.cache(read_specs)


def plain(value):
    """`value` without Ansible's marks, as YAML and the trainer expect it."""
    if isinstance(value, Mapping):
        return {plain(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


def switch(name: str, value: object) -> bool:
    """A yes-or-no word of the command line; raises BadInput with the words there are."""
    word = value.lower() if isinstance(value, str) else value
    if word in BOOLEANS_TRUE:
        return True
    if word in BOOLEANS_FALSE:
        return False
    raise BadInput(f"-e {name}={value}: expected true or false ({SWITCHES[name]})")


def role_variables(roles_dir: str, open_ones: bool = False) -> set[str]:
    """All public variables of the roles; open_ones: but for those that hold a secret."""
    _, options = specs_of(roles_dir)
    return {name for name, spec in options.items() if not (open_ones and spec.get("no_log"))}


def sort_words(extra: Mapping[str, object], variables: Iterable[str]) -> tuple[dict, dict, list[str]]:
    """Split the extra variables into (switches, trainer keys, what is wrong with those that are nobody's)."""
    switches, keys, problems = {}, {}, []
    known = {*SWITCHES, *trainer_config.FIELDS, *variables}
    for name, value in extra.items():
        if name in SWITCHES:
            switches[name] = value
        elif name in trainer_config.FIELDS:
            keys[name] = value
        elif name == "_raw_params":  # Ansible's name for words that are no key=value
            problems.append(
                f"-e … {value}: expected key=value; where a value has spaces, quote it twice: -e \"key='a value'\""
            )
        elif name not in known and not name.startswith(OTHERS):
            cure = trainer_config.instead(name, known, "the run's keys are")
            problems.append(f"-e {name}=…: unknown key '{name}'; {cure}")  # its value may be a secret
    return switches, keys, problems


def name_fault(run: str, begins: bool) -> str:
    """What is wrong with a run's name among those of ours, and the cure; "" if nothing. begins: it is a new run's."""
    cure = "give the run another name: -e run=NAME"
    if run.startswith(TRIAL):
        return (
            f"run: {run}: names that begin with {TRIAL} are those of trials (-e smoke=true), which are ended and "
            f"removed without a question; {cure}"
        )
    if begins and run in PLACES:
        return f"run: {run}: this name is that of {run}.yml's own results, beside those of the runs; {cure}"
    return ""


def report_fault(service: str, results: str) -> str:
    """Why a run on hosts could not tell a service, and what else to do; "" where it is not to."""
    if service == "none":
        return ""
    return (
        f"report_to: found {service}; expected none of a run on hosts, which lack its package. Set it to none, and "
        f"once its results are here: .venv/bin/python -m trainer send {results} {service} (docs/trainer.md)"
    )


def results_fault(directory: str) -> str:
    """Why results could not be written to `directory`, which need not be there yet, and the cure; "" if they could."""
    place = os.path.abspath(directory)
    while not os.path.lexists(place) and place != os.path.dirname(place):
        place = os.path.dirname(place)
    if os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK):
        return ""
    found = "a directory that you may not write to" if os.path.isdir(place) else "no directory"
    return (
        f"trainer_results_dir: the results would go to {directory}: found {found} at {place}; expected one that "
        "who runs ansible-playbook may write to. Have its owner let you, or choose another: -e trainer_results_dir=DIR"
    )


def merge(
    sources: list[tuple[str, Mapping[str, object]]], problems: list[str], whole: bool = True
) -> trainer_config.Config:
    """One configuration of several (where, keys), later ones over earlier; raises BadInput with every fault
    of each, after the `problems` that are known already. whole: no other keys are to come: all must go together.
    """
    problems, merged = list(problems), {}
    for where, keys in sources:
        try:
            trainer_config.from_mapping(keys, where)
        except BadInput as error:
            problems.append(str(error))
        merged.update(keys)
    if problems:
        raise BadInput("\n".join(problems))
    config = trainer_config.from_mapping(merged)
    places = {name: where for where, keys in sources for name in keys}
    return trainer_config.check_together(config, places) if whole else config


def new_name(model: str) -> str:
    """A name for a run that was given none: the model's, and the time."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", os.path.basename(model.rstrip("/"))).strip(".-_")[:40] or "run"
    return f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"


def looks_like_path(value: str) -> bool:
    return value.startswith(("/", "./", "../", "~")) or os.path.exists(value)


def model_directory(value: str) -> str | None:
    """The directory of the controller that `model` means, or None for a name; raises BadInput for neither."""
    if value in trainer_model.SHIPPED:
        return None
    if not looks_like_path(value):
        near = difflib.get_close_matches(value, trainer_model.SHIPPED, n=1, cutoff=0.7)
        if near or not MODEL_NAME.fullmatch(value):
            hint = trainer_model.instead_of_a_name(value) or (
                f"did you mean '{near[0]}'?"
                if near
                else "give tiny, a directory, or a name on the hub such as org/model"
            )
            raise BadInput(f"model: {value}: there is no such model; {hint}")
        return None
    path = os.path.abspath(os.path.expanduser(value))
    if not os.path.isdir(path):
        found = "a file" if os.path.exists(path) else "nothing"
        raise BadInput(
            f"model: {value}: expected a directory on this controller, found {found}; correct the path"
        )
    try:
        trainer_model.check_directory(Path(path), value)
    except OSError as error:
        raise BadInput(
            f"model: {value}: {error.filename}: {error.strerror}; expected to read it; have its owner let you"
        ) from None
    return path


def data_paths(value: str) -> dict[str, str]:
    """The files and directories of the controller among the names in a list of data sets: {name: path}."""
    paths = {name: os.path.abspath(os.path.expanduser(name)) for name in trainer_data.names(value)}
    return {name: path for name, path in paths.items() if name and os.path.exists(path)}


def is_shared(value: str, directory: str) -> bool:
    """Whether `value` is a path in the `directory` that all hosts share (the role storage); "" is none."""
    return bool(directory) and os.path.normpath(value).startswith(f"{directory}/")


def is_elsewhere(value: str, shared: str) -> bool:
    """Whether `value` is a path that is not on this controller, so that the hosts are asked for it."""
    return value.startswith("/") and not os.path.exists(value) and not is_shared(value, shared)


def file_hashes(path: str) -> dict[str, str]:
    """SHA-256 (hex) of a file, under the name "", or of each file below a directory, by its path there."""
    hashes = {}
    for name in names_below(path):
        with open(os.path.join(path, name) if name else path, "rb") as file:
            hashes[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


def upload(key: str, name: str, path: str) -> dict:
    """What to bring to the hosts: `key` of the configuration and the name there, source, where it goes below the state
    directory, its files (source, path, bytes, sha256), and its mark (same_files.py).
    """
    try:
        hashes = file_hashes(path)
    except OSError as error:
        raise BadInput(f"{key}: {name}: {error.filename}: {error.strerror}; expected to read it") from None
    digest = content_hash(hashes)
    below = "models" if key == "model" else "data"
    # A comma would part it from itself where a run is resumed from a controller that has no such file.
    place = f"{below}/{digest}/{os.path.basename(path).replace(',', '_')}"
    files = [
        {
            "source": (source := os.path.join(path, below_it) if below_it else path),
            "path": f"{place}/{below_it}" if below_it else place,
            "bytes": os.path.getsize(source),
            "sha256": one,
        }
        for below_it, one in hashes.items()
    ]
    return {
        "key": key,
        "name": name,
        "source": path,
        "directory": f"{below}/{digest}",
        "path": place,
        "bytes": sum(one["bytes"] for one in files),
        "mark": mark(path),
        "files": files,
    }


def typed(extra: Mapping[str, object]) -> str:
    """The options of ansible-playbook, as a shell reads them, that say these extra variables again."""
    return "".join(f" -e {shlex.quote(said(name, value))}" for name, value in extra.items())


def files_typed(options: Iterable[str], load: Callable[[str], object]) -> tuple[str, set[str]]:
    """The options -e @FILE that the other playbooks take, too, as a shell reads them, and the variables in these files.

    Files of passwords mostly. One with a key of a run's is train.yml's alone.
    """
    words, names = "", set()
    for option in options:
        there = set(load(option[1:]) or ()) if option.startswith("@") else set()
        if there and not there & {*SWITCHES, *trainer_config.FIELDS}:
            words, names = f"{words} -e {shlex.quote(option)}", names | there
    return words, names


def commands(run: str, launcher: str, code: bool, results: str, also: str = "") -> dict[str, str]:
    """The commands that go on with the run, by the same launcher, as the operator can paste them into this shell.

    code: the model has Python code of its own, which the operator trusts. results: the directory of runs' results.
    also: what else was typed that all of them take.
    """
    trusted = " -e trust_remote_code=true" if code else ""
    train = os.path.relpath(os.path.join(CHECKOUT, "train.yml"))
    playbooks = os.path.relpath(os.path.join(CHECKOUT, "playbooks"))
    results = os.path.relpath(os.path.join(results, run))
    ansible = shlex.join(["ansible-playbook", *same_hosts(context.CLIARGS, C.DEFAULT_HOST_LIST)])
    generate = shlex.quote(os.path.join(playbooks, "generate.yml"))
    all_hosts = same_hosts(context.CLIARGS, C.DEFAULT_HOST_LIST, subset=False)
    anywhere = shlex.join(["ansible-playbook", *all_hosts])
    slurm = f" -e launcher={launcher}" if launcher != LAUNCHERS[0] else ""
    resume = f"-e run={run} -e resume=true{slurm}{also}"
    return {
        "follow": f"{ansible} {shlex.quote(train)} -e run={run} -e follow=true{also}",
        "resume": f"{ansible} {shlex.quote(train)} {resume}",
        "limit": context.CLIARGS.get("subset") or "",  # and the command that can have another one
        "resume_on": f"{anywhere} {shlex.quote(train)} {resume}",
        "stop": f"{ansible} {shlex.quote(os.path.join(playbooks, 'stop.yml'))} -e run={run}{also}",
        "ansible": shlex.join(["ansible", *all_hosts]),
        "site": f"{anywhere} {shlex.quote(os.path.relpath(os.path.join(CHECKOUT, 'site.yml')))}",
        "generate": f"{ansible} {generate} -e run={run} -e prompt=She{trusted}{also}",
        "export": f"{ansible} {shlex.quote(os.path.join(playbooks, 'export.yml'))} -e run={run}{trusted}{also}",
        "results": results,
        "logs": os.path.join(results, "logs"),
    }


def build(
    extra: Mapping,
    inventory_keys: Mapping,
    base: Mapping | None,
    variables: Iterable[str],
    local: bool,
    shared: str = "",
    results: str = os.path.join(CHECKOUT, "runs"),
    told: Iterable[str] = (),
    files: str = "",
) -> dict:
    """The whole answer of the plugin; raises BadInput. What lies in the directory `shared` is the hosts' to read.

    variables: those of the roles. told: the ones of them that commands may repeat, as they hold no secret. files: the
    options -e @FILE that commands may repeat.
    elsewhere: paths that are not on this controller, each with its `key` and `name`; a host may have them. unread: of
    which sets fields are not read. version: of the checkout's trainer, by which all was checked.
    """
    words, keys, problems = sort_words(extra, variables)
    flags = dict.fromkeys(FLAGS, False)
    for name in flags.keys() & words.keys():
        try:
            flags[name] = switch(name, words[name])
        except BadInput as error:
            problems.append(str(error))
        if flags[name] and name in ("follow", "resume") and "run" not in keys:
            problems.append(f"-e {name}=true: which run? Name it: -e run=NAME")
    if flags["queue"] and (flags["smoke"] or flags["beside"]):
        problems.append(
            "-e queue=true: found together with smoke or beside, which would not wait; leave one of them out"
        )
    launcher = str(words.get("launcher", LAUNCHERS[0]))
    if launcher not in LAUNCHERS:
        problems.append(f"-e launcher={launcher}: expected systemd or slurm ({SWITCHES['launcher']})")
    if launcher == "slurm" and local:
        problems.append(
            "-e launcher=slurm: found with local_mode, whose hosts are directories of one machine; leave it out"
        )
    if launcher == "slurm" and (flags["queue"] or flags["smoke"]):
        problems.append(
            "-e launcher=slurm: found together with queue or smoke; Slurm has a queue of its own, and trials would "
            "take hosts that it may have given to others; leave them out"
        )
    if flags["plan"] and (flags["follow"] or launcher == "slurm"):
        problems.append(
            "-e plan=true: found together with follow, which asks for nothing new, or launcher=slurm, which may have "
            "given the hosts to others; leave one of them out"
        )
    # A run's own configuration was made of what the inventory said then, and leaves out what nobody had set. Of the
    # link, train.yml says anew what was measured since; a checkpoint was lost for the start that was told so.
    sources = [
        (
            "the stored configuration of the run",
            {key: value for key, value in base.items() if key not in ("link_gbit", "lost_step")},
        )
        if base
        else ("trainer_config in the inventory", inventory_keys)
    ]
    if words.get("config") == "":
        problems.append(
            "-e config=: expected a YAML file of trainer keys, found nothing; name one, or leave it out"
        )
    elif "config" in words:
        path = os.path.expanduser(str(words["config"]))
        try:
            sources.append((path, trainer_config.read(path)))
        except BadInput as error:
            problems.append(str(error))
    problems += [
        f"{where}: resume: found {set_there['resume']}; with train.yml it is -e resume=true that goes on with a run; "
        "leave the key out"
        for where, set_there in sources
        if not base and set_there.get("resume", "auto") != "auto"
    ]
    sources.append(("-e", keys))
    begun = flags["follow"] or (flags["resume"] and base is None)  # what it was begun with is not known yet
    merged = merge(sources, problems, whole=not begun)
    run = merged.run if any("run" in s for _, s in sources) else new_name(merged.model)
    writes = not (flags["follow"] or flags["plan"])
    faults = [
        name_fault(run, not begun and not base),
        results_fault(os.path.join(results, run)) if writes else "",
        report_fault(merged.report_to, os.path.join(results, run)) if writes and not local else "",
    ]
    if any(faults):
        raise BadInput("\n".join(filter(None, faults)))
    config = dataclasses.asdict(
        trainer_config.from_mapping({**dataclasses.asdict(merged), "run": run, "resume": "auto"})
    )
    uploads, elsewhere, taken = [], [], []
    if not begun:
        kept = base or {}
        # What a resumed run stored is a path on the hosts, where it was brought when the run began.
        model = config["model"]
        if model != kept.get("model") and not is_shared(model, shared):
            if not local and is_elsewhere(model, shared):
                elsewhere.append({"key": "model", "name": model})
            elif path := model_directory(model):
                uploads.append(("model", model, path))
        new = [key for key in DATA if config[key] and config[key] != kept.get(key)]
        named = [(key, name) for key in new for name in trainer_data.names(config[key])]
        there = {name for _, name in named if is_shared(name, shared)}
        if not local:
            lacking = [{"key": key, "name": name} for key, name in named if is_elsewhere(name, shared)]
            elsewhere += lacking
            there |= {one["name"] for one in lacking}
        trainer_data.check(merged, new, controller=True, shared=there, tell=taken.append)
        for key in new:
            found = data_paths(config[key]).items()
            uploads += [(key, name, path) for name, path in found if name not in there]
        if local:  # the hosts are this machine: they read the files where they lie
            places = [{"key": key, "name": name, "place": path} for key, name, path in uploads]
            config = trainer_data.placed(config, places)
            uploads = []
    config = {name: value for name, value in config.items() if value is not None}
    return {
        "run": run,
        "config": config,
        "uploads": [upload(*one) for one in uploads],
        "elsewhere": elsewhere,
        "unread": [str(one) for one in taken if one.unread],
        "commands": commands(
            run,
            launcher,
            bool(config.get("trust_remote_code")),
            results,
            files
            + typed(
                {
                    name: value
                    for name, value in extra.items()
                    if name in told and name != "trainer_config" and not re.search(LOGIN, str(value))
                }
            ),
        ),
        "launcher": launcher,
        "version": content_version(Path(CHECKOUT)),
        **flags,
    }


class ActionModule(ActionBase):
    """Arguments: inventory_keys (dict), base (dict or nothing), local (bool), shared (path or nothing), results (where
    runs' results are).
    """

    TRANSFERS_FILES = False
    _supports_check_mode = True
    _supports_async = False
    _requires_connection = False

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        args = plain(self._task.args)
        extra = plain(load_extra_vars(self._loader))
        members = set(task_vars["groups"].get("cluster", ())) & set(task_vars["ansible_play_hosts_all"])
        try:
            if fault := limit_fault(task_vars) or forks_fault(
                context.CLIARGS["forks"], members, "are followed"
            ):
                raise BadInput(fault)
            variables = role_variables(os.path.join(CHECKOUT, "roles"))
            told = role_variables(os.path.join(CHECKOUT, "roles"), open_ones=True)
            files, in_files = files_typed(
                context.CLIARGS.get("extra_vars") or (), self._loader.load_from_file
            )
            answer = build(
                extra,
                args.get("inventory_keys") or {},
                args.get("base") or None,
                variables,
                bool(args.get("local")),
                str(args.get("shared") or ""),
                str(args["results"]),
                told - in_files,
                files,
            )
        except BadInput as error:
            return {**result, "failed": True, "changed": False, "msg": f"{error}\nNothing was started."}
        return {**result, "changed": False, **answer}
