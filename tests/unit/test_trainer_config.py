"""The configuration: what is refused, where it stands, and what to write instead."""

import dataclasses
import datetime
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trainer import config, others
from trainer.errors import BadInput

ROOT = Path(__file__).parents[2]

REFUSED = {
    "unknown key": ("step: 3", ":1: unknown key 'step'; did you mean 'steps'?"),
    "another trainer's key": ("learning_rate: 1e-4", ":1: unknown key 'learning_rate'; here it is lr"),
    "as an option": ("--load-in-4bit: true", "here it is quantize: 4bit, with adapter: lora"),
    "one that is like ours": ("save_steps: 100", "'save_steps'; here it is checkpoint_every, in steps"),
    "another trainer's, misspelt": (
        "gradient_acumulation_steps: 4",
        "did you mean 'gradient_accumulation_steps'? here it is batch_size, which counts over all ranks",
    ),
    "what is not done here": ("use_dora: true", "'use_dora'; here there is nothing of the kind"),
    "what nobody sets here": ("template: llama3", "here there is nothing to set: a chat goes by the model's"),
    "unknown key, far from any": ("zzzzzz: 3", "the keys are: run, model,"),
    "line of the second": (
        "lr: 0.1\nbach_size: 3",
        ":2: unknown key 'bach_size'; did you mean 'batch_size'?",
    ),
    "below the range": ("batch_size: 0", ":1: batch_size: expected at least 1, found 0"),
    "not above": ("lr: 0", "lr: expected more than 0, found 0.0"),
    "over the range": ("beta1: 1.5", "beta1: expected at most 0.9999, found 1.5"),
    "a word for a number": ("steps: many", "steps: expected a whole number, found 'many'"),
    "a fraction for a whole number": ("steps: 1.5", "steps: expected a whole number, found 1.5"),
    "yes for a number": ("batch_size: yes", "batch_size: expected a whole number, found True"),
    "a number for a text": ("run: 12", "run: expected a text, found 12; quote it: '12'"),
    "a number for a text, as it stands": ("run: 007", "run: expected a text, found 007; quote it: '007'"),
    "a date for a text": ("run: 2024-01-01", "found 2024-01-01; quote it: '2024-01-01'"),
    "a number by colons": ("balance: 8:4:4", "balance: expected a text, found 8:4:4; quote it"),
    "no for a word": ("adapter: no", "adapter: expected none or lora, found 'no'"),
    "a number for a word": ("quantize: 4", "found '4'; did you mean '4bit'?"),
    "a time for a number": ("checkpoint_minutes: 1:30", "expected a number, found '1:30'"),
    "a date for a number": ("steps: 2024-01-01", "expected a whole number, found"),
    "nothing": ("batch_size:", "batch_size: expected a whole number, found nothing"),
    "not a number": ("lr: .nan", "lr: expected a finite number"),
    "infinity": ("lr: .inf", "lr: expected a finite number"),
    "unknown strategy": ("strategy: dpd", "strategy: expected ddp or fsdp or zero1"),
    "a strategy of nobody": ("strategy: zero4", "found 'zero4'; did you mean 'zero3'?"),
    "another trainer's word": ("device: gpu", "found 'gpu'; did you mean 'cuda'?"),
    "another trainer's word, in capitals": ("dtype: BF16", "found 'BF16'; did you mean 'bfloat16'?"),
    "unknown schedule": ("lr_schedule: cosin", "expected cosine or linear or constant, found 'cosin'"),
    "a list": ("model: [a, b]", "model: expected one value, found a list"),
    "a list of shares": (
        "balance: [8, 4, 4]",
        'balance: expected one value, found a list; keys are flat; write them by commas, balance: "8,4,4"',
    ),
    "a list for another trainer's key": (
        "lora_target_modules: [q_proj, v_proj]",
        ":1: unknown key 'lora_target_modules'; here it is lora_targets; write them by commas, lora_targets: "
        '"q_proj,v_proj"',
    ),
    "a list of one": ("report_to: [wandb]", "found a list; keys are flat; write it alone, report_to: wandb"),
    "within a mapping": (
        "train:\n  epochs: 1\n  global_batch_size: 8",
        ":3: 'train.global_batch_size': keys are flat; here it is batch_size, which counts",
    ),
    "within a mapping, a key of ours": (
        "optimizer:\n  params: {lr: 1}",
        "'optimizer.params.lr': keys are flat; here it",
    ),
    "within a mapping that is its own part": (
        "train: &train\n  epochs: 1\n  again: *train",
        ":2: 'train.epochs': keys are flat; here it is epochs",
    ),
    "within mappings of mappings, ten times each": (
        "a0: &a0 {epochs: 1}\n"
        + "\n".join(
            f"a{n}: &a{n} {{{', '.join(f'{k}: *a{n - 1}' for k in 'bcdefghijk')}}}" for n in range(1, 9)
        ),
        ":1: 'a0.epochs': keys are flat",
    ),
    "a list as a key within a mapping": ("train: {? [1] : 2}", ":1: unknown key 'train'"),
    "a rank that is no LoRA's": (
        "local_rank: 0",
        "'local_rank'; here there is nothing to set: the hosts agree",
    ),
    "a mapping": ("model: {name: a}", "model: expected one value, found a mapping"),
    "twice": ("lr: 1\nseed: 1\nlr: 2", ":3: 'lr' stands twice (first at"),
    "a run name with a slash": ("run: a/b", "'a/b' must begin with a letter or digit"),
    "a run name of dots": ("run: ..", "'..' must begin with a letter or digit"),
    "no mapping": ("- a", ":1: expected lines 'key: value', found a list"),
    "not YAML": ("lr: [1", "not YAML"),
    "a tab": ("lr:\t- 1\n\t x", "not YAML"),
    "bad date": ("run: 2024-99-99", "run"),
    "a Python object": ("lr: !!python/object/apply:os.system [ls]", "expected one value, found a list"),
    "a Python scalar": ("lr: !!python/name:os.system x", "not YAML"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(tmp_path, name):
    text, message = REFUSED[name]
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(BadInput) as refused:
        config.load(path)
    assert message in str(refused.value)
    assert str(path) in str(refused.value)


def test_a_number_in_a_file_is_the_one_that_it_would_be_after_e(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("seed: 010\nsteps: 1_000\nlr: 2e-4\ncompile: on\nvalidation:\n")
    assert config.read(path) == {
        "seed": "010",
        "steps": "1_000",
        "lr": "2e-4",
        "compile": True,
        "validation": None,
    }
    found = config.load(path)
    assert (found.seed, found.steps, found.lr, found.compile) == (10, 1000, 2e-4, True)
    assert found == config.load(None, ["seed=010", "steps=1_000", "lr=2e-4", "compile=on"])


def test_what_ansible_hands_over_as_yaml_reads_it_has_its_cure():
    with pytest.raises(BadInput, match="found 2024-01-01; quote it: '2024-01-01'"):
        config.from_mapping({"run": datetime.date(2024, 1, 1)})
    with pytest.raises(BadInput, match="adapter: expected a text, found False; to YAML the words yes, no,"):
        config.from_mapping({"adapter": False})


def test_a_list_that_ansible_hands_over_is_refused_with_its_cure():
    with pytest.raises(BadInput, match=r'found \[8, 4\]; write them by commas, balance: "8,4"'):
        config.from_mapping({"balance": [8, 4]})


def test_settings_that_do_not_go_together():
    with pytest.raises(BadInput, match="set optimizer to adamw, found adamw_8bit"):
        config.check_together(config.from_mapping({"strategy": "infinity", "optimizer": "adamw_8bit"}))
    for value in (0.5, 1):
        with pytest.raises(BadInput, match=f"spike_factor: found {value}, .*; expected above 1"):
            config.check_together(config.from_mapping({"spike_factor": value}))
    flash = {"attention": "flash_attention_2"}
    with pytest.raises(
        BadInput, match="attention: flash_attention_2 computes in 16 bits alone; set dtype to"
    ):
        config.check_together(config.from_mapping(flash))
    config.check_together(config.from_mapping({**flash, "dtype": "float16"}))
    for name in ("eval_every", "patience"):
        with pytest.raises(
            BadInput, match=f"^{name}: found 3, and nothing is held out .*, or set {name} to 0$"
        ):
            config.check_together(config.from_mapping({name: 3}))
        for held_out in ({"validation_split": 0.1}, {"validation": "austen"}):
            config.check_together(config.from_mapping({name: 3, **held_out}))


def test_settings_that_do_not_go_together_have_their_places(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("lr: 1e-4\nspike_factor: 1\nvalidation_split: 0.1\n")
    overrides = ["quantize=4bit", "validation=austen"]
    with pytest.raises(BadInput) as refused:
        config.load_whole(path, overrides)
    first, second, third = str(refused.value).splitlines()
    assert first.startswith("override 'quantize=4bit': quantize: 4bit freezes")
    assert second.startswith(f"{path}:2: spike_factor: found 1,")
    assert third.startswith("override 'validation=austen': validation, validation_split: both")


@pytest.mark.parametrize("name", ["lr", "steps", "epochs", "threads", "batch_size", "compile"])
def test_a_shells_variable_that_is_not_set_is_no_default(name):
    with pytest.raises(BadInput, match=f"{name}: expected .*, found an empty text; give one, or leave"):
        config.load(None, [f"{name}="])


def test_null_takes_away_what_is_set_of_texts_too():
    found = config.from_mapping({"validation": "null", "steps": "null", "model": "null"})
    assert (found.validation, found.steps, found.model) == (None, None, "null")


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("BATCH_SIZE=4", "batch_size"),
        ("Batch-Size=4", "batch_size"),
        ("LR=1", "lr"),
        ("strategy=DDP", "ddp"),
        ("strategy=FSDP", "fsdp"),
        ("adapter=LoRA", "lora"),
        ("device=CPU", "cpu"),
        ("dtype=BFloat16", "bfloat16"),
    ],
)
def test_capitals_and_hyphens_hide_no_name(word, meant):
    with pytest.raises(BadInput, match=f"did you mean '{meant}'"):
        config.load(None, [word])


def test_all_problems_at_once(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("lr: -1\nstepss: 3\n")
    with pytest.raises(BadInput) as refused:
        config.load(path, ["seed=x", "nonsense"])
    assert len(str(refused.value).splitlines()) == 4


def test_another_trainers_file_is_told_of_at_once_and_the_keys_but_once(tmp_path):
    """DeepSpeed's stage is told by its section, and not taken for LLaMA-Factory's."""
    path = tmp_path / "run.yaml"
    path.write_text(
        "base_model: a\ndatasets:\n  - path: b\n    type: alpaca\nqqqqq: 1\nwwwww: [a]\nzero_optimization: {stage: 3}\n"
    )
    with pytest.raises(BadInput) as refused:
        config.load(path)
    said = [line.removeprefix(f"{path}:") for line in str(refused.value).splitlines()]
    assert said[:2] == [
        "1: unknown key 'base_model'; here it is model",
        "2: unknown key 'datasets'; here it is dataset, several by commas",
    ]
    assert said[2].startswith("5: unknown key 'qqqqq'; the keys are: run, model,")
    assert said[3] == "6: unknown key 'wwwww'; no key here is like it"
    assert (
        said[4].startswith("7: unknown key 'zero_optimization'; here it is strategy: zero1,") and not said[5:]
    )


def test_missing_and_unreadable_files(tmp_path):
    with pytest.raises(BadInput, match="no such file"):
        config.load(tmp_path / "none.yaml")
    with pytest.raises(BadInput, match="cannot be read"):
        config.load(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"model: caf\xe9")
    with pytest.raises(BadInput, match="cannot be read"):
        config.load(tmp_path / "latin.yaml")


def test_overrides_come_last_and_are_read_as_yaml(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("lr: 1.0\nsteps: '7'\n# a comment\n")
    found = config.load(
        path, ["lr=3e-4", "run=2024", "epochs=2", "trust_remote_code=true", "max_samples=null"]
    )
    assert (found.lr, found.steps, found.run, found.epochs) == (3e-4, 7, "2024", 2.0)
    assert found.trust_remote_code is True and found.max_samples is None


@pytest.mark.parametrize("name", sorted(others.KEYS))
def test_what_other_trainers_keys_are_here_is_there(name):
    """Of what is said after "here it is", each key is one, and each value that is written out is taken."""
    said = others.KEYS[name]
    assert name not in config.FIELDS and others.here(name.replace("_", "-").upper()).endswith(said)
    if said.startswith("nothing "):
        return
    first = re.match(r"[a-z_0-9]+", said)[0]
    assert first in config.FIELDS or first in ("trainer_hub_token", "nproc_per_node")
    for key, value in re.findall(r"([a-z_0-9]+): (\w+)", said):
        config.from_mapping({key: value})
    for last in re.findall(r": \w+(?:, \w+)* or (\w+)", said):
        key = said.partition(":")[0]
        config.from_mapping({key: last})


def test_what_other_trainers_values_are_here_is_taken():
    for key, values in others.VALUES.items():
        choices = config.FIELDS[key].metadata["choices"]
        assert {*values.values()} <= {*choices} and not {*values} & {*choices}
        assert [one.lower() for one in values] == list(values)


def test_what_may_be_a_secret_is_not_printed():
    with pytest.raises(BadInput, match="'hf_token=…': unknown key 'hf_token'; here it is trainer_hub_token"):
        config.load(None, ["hf_token=hf_abc"])


def test_an_empty_file_is_the_defaults(tmp_path):
    (tmp_path / "run.yaml").write_text("")
    assert config.load(tmp_path / "run.yaml") == config.load() == config.Config()


def test_a_mapping_in_memory():
    assert config.from_mapping({"lr": "1e-3", "steps": 3}).lr == 1e-3
    with pytest.raises(BadInput, match=r"train\.yml: unknown key 'stepz'; did you mean 'steps'"):
        config.from_mapping({"stepz": 1}, "train.yml")


def test_the_defaults_obey_their_own_rules_and_every_key_is_described():
    values = {name: value for name, value in dataclasses.asdict(config.Config()).items() if value is not None}
    assert config.from_mapping(values) == config.Config()
    described = config.describe()
    assert [entry["name"] for entry in described] == list(config.FIELDS)
    assert all(entry["doc"] for entry in described)
    (found,) = [entry for entry in described if entry["name"] == "max_samples"]
    assert {"name": "max_samples", "type": "int (optional)", "default": None}.items() <= found.items()


def test_strategies_are_those_that_there_are():
    from trainer.strategies import STRATEGIES

    assert tuple(STRATEGIES) == config.STRATEGIES


def test_the_controller_needs_no_torch():
    """config, environment, errors, metrics and the read-only half of the command line come without torch."""
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = sys.modules['numpy'] = None\n"
        "from trainer import cli, config, environment, errors, metrics\n"
        "sys.exit(cli.main(['check', '--config-only', sys.argv[1], 'steps=3']))"
    )
    assert subprocess.run([sys.executable, "-c", code, "/dev/null"], cwd=ROOT).returncode == 0
