"""What the operator typed becomes a run's configuration, or one message with the cure."""

import json
import re

import pytest
import yaml
from ansible import context
from ansible.utils.context_objects import CLIArgs

from plugins.action import run_config
from plugins.module_utils.telling import forks_fault
from trainer.errors import BadInput

VARIABLES = ("trainer_port", "trainer_min_free_gb", "nproc_per_node")


@pytest.fixture(autouse=True)
def command_line(monkeypatch):
    given = {"inventory": ("inventory/my lab",), "subset": "node1,node2", "become_ask_pass": True}
    monkeypatch.setattr(context, "CLIARGS", CLIArgs(given))


def build(extra=None, inventory=None, base=None, local=False):
    return run_config.build(extra or {}, inventory or {}, base, VARIABLES, local)


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "talk.jsonl"
    path.write_text("".join(json.dumps({"text": f"sentence {n}"}) + "\n" for n in range(9)))
    return path


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "my model"
    (path / "sub").mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "tokenizer.json").write_text("{}")
    (path / "sub/notes.txt").write_bytes(b"123")
    return path


# ---- precedence ----


def test_precedence_from_low_to_high(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("seed: 2\nbatch_size: 6\nlr: 0.002\n")
    inventory = {"seed": 1, "batch_size": 5, "warmup_steps": 7}
    config = build({"config": str(file), "lr": "0.003", "run": "first"}, inventory)["config"]
    assert (config["warmup_steps"], config["seed"], config["batch_size"], config["lr"]) == (7, 2, 6, 0.003)
    assert config["sequence_length"] == 256  # the trainer's own default


def test_a_resumed_run_keeps_its_configuration_but_for_what_is_said_anew():
    base = build({"run": "first", "seed": 4, "lr": 0.1})["config"]
    config = build({"run": "first", "resume": "true", "lr": "0.2"}, {"seed": 9}, base)["config"]
    # What is held out is known once the run's own configuration is.
    again = {"run": "first", "resume": "true", "patience": "3"}
    assert build(again)["config"]["patience"] == 3 and build(again, base={**base, "validation": "austen"})
    with pytest.raises(BadInput, match="patience: found 3, and nothing is held out"):
        build(again, base=base)
    assert (config["seed"], config["lr"]) == (4, 0.2)


def test_a_resumed_run_takes_nothing_from_what_the_inventory_says_by_now():
    base = build({"run": "first"}, {"warmup_steps": 7})["config"]
    since = {"warmup_steps": 9, "lr": 0.1, "steps": 1000, "max_samples": 10, "validation_split": 0.1}
    config = build({"run": "first", "resume": "true"}, since, base)["config"]
    assert config == base and config["warmup_steps"] == 7


def test_a_checkpoint_is_lost_for_the_one_start_that_was_told_so():
    base = build({"run": "first"})["config"]
    told = build({"run": "first", "resume": "true", "lost_step": "900"}, base=base)["config"]
    assert told["lost_step"] == 900
    assert build({"run": "first", "resume": "true"}, base=told)["config"] == base


def test_words_of_the_command_line_become_numbers():
    config = build({"steps": "20", "lr": "1e-3", "run": "7"})["config"]
    assert (config["steps"], config["lr"], config["run"]) == (20, 0.001, "7")


def test_what_is_written_is_plain_yaml():
    answer = build({"run": "first"})
    assert yaml.safe_load(yaml.safe_dump(answer["config"])) == answer["config"]
    assert None not in answer["config"].values()


# ---- names ----


@pytest.mark.parametrize(
    ("model", "stem"), [("tiny", "tiny"), ("org/some-model", "some-model"), ("org/Odd.-", "Odd")]
)
def test_a_run_without_a_name_gets_one(model, stem):
    run = build({"model": model})["run"]
    assert re.fullmatch(stem + r"-\d{8}-\d{6}", run)
    assert build({"model": model})["config"]["run"].startswith(stem)


def test_the_commands_can_be_pasted_into_the_same_shell():
    commands = build({"run": "first"})["commands"]
    assert commands["follow"].startswith("ansible-playbook -i 'inventory/my lab' -l node1,node2 -K ")
    assert commands["follow"].endswith("train.yml -e run=first -e follow=true")
    assert commands["stop"].endswith("playbooks/stop.yml -e run=first")
    assert commands["site"].endswith("/site.yml") or commands["site"].endswith(" site.yml")
    assert "'inventory/my lab'" in commands["site"] and "node1" not in commands["site"]
    assert commands["resume"].endswith("train.yml -e run=first -e resume=true")
    of_slurm = build({"run": "first", "launcher": "slurm"})["commands"]
    assert of_slurm["resume"].endswith("train.yml -e run=first -e resume=true -e launcher=slurm")


def test_the_commands_say_again_what_was_typed_of_the_roles_variables():
    extra = {
        "run": "first",
        "steps": "9",
        "trainer_port": "29501",
        "trainer_results_dir": "/srv/my results",
        "trainer_hub_token": "hf_secret",
        "trainer_hub_endpoint": "https://anna:hf_secret@mirror.example/hub",
        "trainer_config": {"lr": 0.1},
    }
    roles = str(run_config.CHECKOUT + "/roles")
    names = run_config.role_variables(roles)
    told = run_config.role_variables(roles, open_ones=True)
    assert names - told == {"trainer_hub_token"}
    commands = run_config.build(extra, {}, None, names, False, told=told)["commands"]
    words = '-e trainer_port=29501 -e \'{"trainer_results_dir": "/srv/my results"}\''
    assert commands["resume"].endswith(f"-e run=first -e resume=true {words}")
    assert commands["stop"].endswith(f"-e run=first {words}")
    assert all("hf_secret" not in command and "lr" not in command for command in commands.values())


def test_the_commands_name_files_of_passwords_again_and_none_with_keys_of_a_run():
    files = {
        "my vault.yml": {"ansible_become_password": "secret", "trainer_port": 1},
        "run.yml": {"steps": 3},
    }
    options = ("@my vault.yml", "@run.yml", "run=first")
    words, named = run_config.files_typed(options, files.get)
    assert (words, named) == (" -e '@my vault.yml'", {"ansible_become_password", "trainer_port"})
    commands = run_config.build({"run": "first"}, {}, None, VARIABLES, False, files=words)["commands"]
    assert commands["stop"].endswith("stop.yml -e run=first -e '@my vault.yml'")
    assert "@my vault.yml" in commands["resume"] and "run.yml" not in commands["resume"]


def test_results_that_could_not_be_written_are_told_before_the_run(tmp_path, monkeypatch):
    def fault(path):
        try:
            run_config.build({"run": "first"}, {}, None, VARIABLES, False, "", str(path))
        except BadInput as error:
            return str(error)

    assert fault(tmp_path / "not/there/yet") is None
    (tmp_path / "file").write_text("")
    assert f"found no directory at {tmp_path}/file; expected" in fault(tmp_path / "file/below")
    theirs = tmp_path / "theirs"
    (theirs / "first").mkdir(parents=True)
    monkeypatch.setattr(run_config.os, "access", lambda path, mode: path != str(theirs / "first"))
    assert f"that you may not write to at {theirs}/first" in fault(theirs)


def test_a_models_directory_that_may_not_be_read_is_told(model, monkeypatch):
    def check(path, name):
        raise PermissionError(13, "Permission denied", str(path / "config.json"))

    monkeypatch.setattr(run_config.trainer_model, "check_directory", check)
    with pytest.raises(BadInput, match=r"model: .*/config.json: Permission denied; expected to read it"):
        build({"model": str(model)})


# ---- data and models ----


def test_files_of_the_controller_go_to_a_place_named_by_their_content(jsonl, model):
    answer = build({"run": "first", "dataset": str(jsonl), "model": str(model)})
    found = {item["key"]: item for item in answer["uploads"]}
    assert re.fullmatch(r"data/[0-9a-f]{64}/talk\.jsonl", found["dataset"]["path"])
    assert re.fullmatch(r"models/[0-9a-f]{64}/my model", found["model"]["path"])
    assert int(found["model"]["bytes"]) == 7
    (model / "sub/notes.txt").write_bytes(b"124")
    again = {item["key"]: item for item in build({"model": str(model), "dataset": str(jsonl)})["uploads"]}
    assert again["model"]["path"] != found["model"]["path"]
    assert again["dataset"]["path"] == found["dataset"]["path"]


def test_services_are_told_from_a_runs_results_for_hosts_have_no_package_of_theirs():
    with pytest.raises(BadInput, match=r"report_to: found wandb; .* send \S+/runs/first wandb"):
        build({"run": "first", "report_to": "wandb"})
    with pytest.raises(BadInput, match="report_to: found mlflow"):
        build({"run": "first"}, {"report_to": "mlflow"})
    assert build({"run": "first", "report_to": "wandb"}, local=True)["config"]["report_to"] == "wandb"
    assert build({"run": "first", "report_to": "wandb", "plan": "true"})


def test_what_of_the_data_is_not_read_is_told(jsonl, tmp_path):
    assert build({"run": "first", "dataset": str(jsonl)})["unread"] == []
    (tmp_path / "b.jsonl").write_text('{"text": "words", "of": "whom"}\n')
    answer = build({"run": "first", "dataset": str(jsonl), "validation": str(tmp_path / "b.jsonl")})
    assert answer["unread"] == [f"validation: {tmp_path}/b.jsonl: 1 text; not read: of"]


def test_a_relative_path_means_the_working_directory(jsonl, monkeypatch):
    monkeypatch.chdir(jsonl.parent)
    assert build({"dataset": "talk.jsonl"})["uploads"][0]["source"] == str(jsonl)


def test_on_this_machine_files_are_read_where_they_lie(jsonl, monkeypatch):
    monkeypatch.chdir(jsonl.parent)
    answer = build({"dataset": "talk.jsonl"}, local=True)
    assert answer["config"]["dataset"] == str(jsonl) and not answer["uploads"]


def test_several_sets_and_the_validation_file_are_brought(jsonl, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "held, out.jsonl"
    other.write_text('{"text": "another"}\n')
    words = {"dataset": "talk.jsonl,austen", "dataset_weights": "3,1", "validation": str(other)}
    answer = build(words)
    found = {item["key"]: item for item in answer["uploads"]}
    assert (found["dataset"]["name"], found["dataset"]["source"]) == ("talk.jsonl", str(jsonl))
    assert re.fullmatch(r"data/[0-9a-f]{64}/held_ out\.jsonl", found["validation"]["path"])
    assert answer["config"]["dataset"] == "talk.jsonl,austen"
    local = build(words, local=True)
    assert local["config"]["dataset"] == f"{jsonl},austen" and not local["uploads"]
    base = answer["config"] | {"dataset": "/d/talk.jsonl,austen", "validation": "/d/held.jsonl"}
    resumed = build({"run": "first", "resume": True, "validation": str(other)}, base=base)
    assert [item["key"] for item in resumed["uploads"]] == ["validation"]
    assert resumed["config"]["dataset"] == "/d/talk.jsonl,austen"


def test_what_a_resumed_run_stored_is_looked_for_on_the_hosts_alone():
    base = build({"run": "first"})["config"] | {"dataset": "/var/lib/trainyard/data/abc/talk.jsonl"}
    assert build({"run": "first", "resume": True}, base=base)["uploads"] == []


def test_shipped_texts_and_names_of_the_hub_bring_nothing():
    answer = build({"dataset": "austen", "model": "org/model"})
    assert answer["uploads"] == []


# ---- what is refused ----


def write(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def directory(tmp_path, *names):
    for name in names:
        (tmp_path / name).write_text("{}")
    return str(tmp_path)


REFUSED = {
    "an unknown key": (
        lambda _: {"batchsize": 3},
        ["-e batchsize=…: unknown key", "did you mean 'batch_size'?"],
    ),
    "another trainer's key": (
        lambda _: {"per_device_train_batch_size": 8},
        ["unknown key 'per_device_train_batch_size'; here it is batch_size, which counts over all ranks"],
    ),
    "a misspelt switch": (lambda _: {"smok": "true"}, ["'smok'", "did you mean 'smoke'?"]),
    "a name that trials have": (
        lambda _: {"run": "smoke-first"},
        ["run: smoke-first", "those of trials", "another name"],
    ),
    "a misspelt variable": (lambda _: {"trainer_prt": 1}, ["did you mean 'trainer_port'?"]),
    "a key like nothing": (
        lambda _: {"zzzz": 1},
        ["unknown key 'zzzz'", "the run's keys are:", "sequence_length"],
    ),
    "a word for a number": (lambda _: {"steps": "many"}, ["-e: steps", "whole number", "'many'"]),
    "a value out of range": (lambda _: {"lr": "-1"}, ["-e: lr", "more than 0", "-1"]),
    "an unknown strategy": (lambda _: {"strategy": "fdsp"}, ["strategy", "ddp", "'fdsp'"]),
    "a bad run name": (lambda _: {"run": "my run"}, ["run", "'my run'", "letter or digit"]),
    "a run name that climbs": (lambda _: {"run": "../etc"}, ["run", "'../etc'"]),
    "a run name too long": (lambda _: {"run": "x" * 65}, ["63 at most"]),
    "queued, and not waiting": (
        lambda _: {"queue": "yes", "smoke": "yes"},
        ["-e queue=true", "leave one of them out"],
    ),
    "a plan of what goes on": (
        lambda _: {"plan": "yes", "follow": "yes", "run": "first"},
        ["-e plan=true", "leave one of them out"],
    ),
    "a plan on Slurm's hosts": (
        lambda _: {"plan": "yes", "launcher": "slurm"},
        ["-e plan=true", "given the hosts to others"],
    ),
    "neither yes nor no": (lambda _: {"smoke": "perhaps"}, ["-e smoke=perhaps", "true or false"]),
    "resume without a run": (lambda _: {"resume": "true"}, ["which run?", "-e run=NAME"]),
    "follow without a run": (lambda _: {"follow": "true"}, ["which run?", "-e run=NAME"]),
    "no such config": (lambda t: {"config": f"{t}/no.yaml"}, ["no.yaml", "no such file"]),
    "a bad config": (
        lambda t: {"config": write(t, "c.yaml", "seed: 1\nlerning_rate: 3\nsteps: few\n")},
        ["c.yaml:2: unknown key 'lerning_rate'", "c.yaml:3: steps"],
    ),
    "no YAML": (lambda t: {"config": write(t, "c.yaml", "a: [1\n")}, ["c.yaml:", "not YAML"]),
    "no such model": (
        lambda _: {"model": "./no/such/model"},
        ["model: ./no/such/model", "directory on this controller"],
    ),
    "a model with a revision": (
        lambda _: {"model": "org/a@v2"},
        ["hf download org/a --revision v2 --local-dir"],
    ),
    "a misspelt model": (lambda _: {"model": "tinny"}, ["no such model", "did you mean 'tiny'?"]),
    "a model's revision": (
        lambda _: {"model": "org/name@v1"},
        [
            "org/name@v1",
            "give the directory of: hf download org/name --revision v1 --local-dir DIR",
        ],
    ),
    "a configuration by a shell's variable that is not set": (
        lambda _: {"config": ""},
        ["-e config=: expected a YAML file", "found nothing"],
    ),
    "a model without config": (lambda t: {"model": str(t)}, ["config.json", "save_pretrained"]),
    "pickled weights": (
        lambda t: {"model": directory(t, "config.json", "tokenizer.json", "pytorch_model.bin")},
        ["its weights are pickled", "save_pretrained"],
    ),
    "a model without tokenizer": (
        lambda t: {"model": directory(t, "config.json", "model.safetensors")},
        ["no tokenizer.json", "AutoTokenizer"],
    ),
    "a name that trials have, in a file": (
        lambda t: {"config": write(t, "c.yaml", "run: smoke-first\n")},
        ["run: smoke-first", "-e run=NAME"],
    ),
    "the name of preflight's results": (lambda _: {"run": "preflight"}, ["that of preflight.yml's own"]),
    "never to be resumed": (
        lambda t: {"config": write(t, "c.yaml", "resume: never\n")},
        ["c.yaml: resume: found never", "leave the key out"],
    ),
    "a model that is a file": (lambda t: {"model": write(t, "m.bin", "x")}, ["found a file"]),
    "no such dataset": (
        lambda _: {"dataset": "./no/such.jsonl"},
        ["./no/such.jsonl", "no such file", "austen"],
    ),
    "an empty dataset": (lambda t: {"dataset": write(t, "e.jsonl", "")}, ["e.jsonl", "no text in it"]),
    "no JSON": (
        lambda t: {"dataset": write(t, "d.jsonl", '{"text": "a"}\n{oops\n')},
        ["d.jsonl:2: not JSON", "one JSON object a line"],
    ),
    "no such field": (
        lambda t: {"dataset": write(t, "d.jsonl", '{"text": "a"}\n{"txt": "b"}\n')},
        ["d.jsonl:2: no field 'text'", "its fields are: txt", "text_field"],
    ),
    "one of several sets": (
        lambda t: {"dataset": "austen," + write(t, "d.jsonl", '{"text": 1}\n')},
        ["d.jsonl:1: field 'text'"],
    ),
    "a bad validation file": (
        lambda t: {"validation": write(t, "v.jsonl", '{"text": "a"}\n\n{')},
        ["v.jsonl:3: not JSON"],
    ),
    "too few weights": (
        lambda _: {"dataset": "austen,austen", "dataset_weights": "1"},
        ["dataset_weights: 1", "each of the 2 sets"],
    ),
    "no answers": (lambda _: {"loss_on": "answers"}, ["loss_on: answers, but the data is plain text"]),
    "two ways to hold out": (
        lambda _: {"validation": "austen", "validation_split": "0.1"},
        ["both say what is held out"],
    ),
    "another kind of file": (lambda t: {"dataset": write(t, "d.csv", "a,b")}, [".txt, .jsonl or .parquet"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, tmp_path):
    make, words = REFUSED[case]
    with pytest.raises(BadInput) as refusal:
        build(make(tmp_path))
    for word in words:
        assert word in str(refusal.value)


# ---- the directory that all hosts share ----


def test_what_lies_in_the_shared_directory_is_the_hosts_to_read(tmp_path, jsonl):
    """It need not be on the controller; and where it is, it is not brought."""
    shared = tmp_path / "shared"
    words = {
        "model": f"{shared}/glm",
        "dataset": f"{shared}/a.jsonl,{jsonl}",
        "validation": f"{shared}/b.jsonl",
    }
    for _ in range(2):
        answer = run_config.build(words, {}, None, VARIABLES, False, str(shared))
        assert [(one["key"], one["name"]) for one in answer["uploads"]] == [("dataset", str(jsonl))]
        assert {key: answer["config"][key] for key in words} == words
        (shared / "glm").mkdir(parents=True, exist_ok=True)
        (shared / "a.jsonl").write_text("no json")


@pytest.mark.parametrize("directory", ["", "/srv/shar", "/srv/shared/glm"])
def test_a_path_elsewhere_must_lie_on_the_controller(directory):
    for path in ("/srv/shared/glm", "/srv/shared/glm/../../etcetera"):
        with pytest.raises(BadInput, match="expected a directory on this controller, found nothing"):
            run_config.build({"model": path}, {}, None, VARIABLES, True, directory)
        # Unless a host has it.
        answer = run_config.build({"model": path}, {}, None, VARIABLES, False, directory)
        assert answer["elsewhere"] == [{"key": "model", "name": path}] and not answer["uploads"]


def test_what_is_not_on_the_controller_is_looked_for_on_the_hosts(jsonl):
    words = {"model": "/mine/glm", "dataset": f"/mine/a.jsonl,{jsonl}", "validation": "/mine/b.jsonl"}
    answer = run_config.build(words, {}, None, VARIABLES, False)
    assert answer["elsewhere"] == [
        {"key": "model", "name": "/mine/glm"},
        {"key": "dataset", "name": "/mine/a.jsonl"},
        {"key": "validation", "name": "/mine/b.jsonl"},
    ]
    assert [one["name"] for one in answer["uploads"]] == [str(jsonl)]
    assert {key: answer["config"][key] for key in words} == words
    # Of a run that is resumed, these are its own by now.
    assert run_config.build({"run": "a", "resume": True}, {}, words, VARIABLES, False)["elsewhere"] == []
    with pytest.raises(BadInput, match="glm"):
        run_config.build({"model": "./glm"}, {}, None, VARIABLES, False)


def test_a_fault_in_the_inventory_is_told_as_such():
    with pytest.raises(
        BadInput, match=re.escape("trainer_config in the inventory: unknown key 'sed'; did you mean 'seed'?")
    ):
        build({}, {"sed": 1})


def test_all_faults_are_told_at_once(tmp_path):
    file = write(tmp_path, "c.yaml", "sed: 1\n")
    words = {"steps": "few", "batchsize": 3, "smoke": "perhaps", "resume": True, "config": file}
    with pytest.raises(BadInput) as refusal:
        build(words, {"lr": "much"})
    for fault in (
        "-e: steps",
        "in the inventory: lr",
        "'batch_size'?",
        "smoke=perhaps",
        "which run?",
        "c.yaml:1: unknown key",
    ):
        assert fault in str(refusal.value)


def test_ansibles_own_variables_and_the_roles_pass():
    extra = {"ansible_user": "me", "vault_sudo": "x", "trainer_port": 1, "nproc_per_node": 2, "run": "first"}
    answer = build(extra)
    assert "trainer_port" not in answer["config"]


def test_roles_variables_are_those_of_their_specs(repository):
    found = run_config.role_variables(str(repository / "roles"))
    assert {"trainer_port", "trainer_opt_dir", "python_env_dir", "nproc_per_node"} <= found


def test_fewer_forks_than_hosts_are_refused():
    assert forks_fault(3, ["a", "b", "c"], "are followed") == ""
    assert re.fullmatch(
        r"forks: 2, but there are 3 hosts, which are followed all at once: leave -f out, or .* to 3 or more",
        forks_fault(2, ["a", "b", "c"], "are followed"),
    )
