"""Names of the hub in a run's configuration, and the token on its way."""

import os
import stat
from pathlib import Path

import pytest
from ansible.errors import AnsibleFilterError

from plugins.filter import hub

NAMES = [{"kind": "model", "key": "model", "name": "org/model"}]


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"model": "tiny", "dataset": "austen"}, []),
        ({"model": "/var/lib/trainyard/models/1/m", "dataset": "/data/x.jsonl"}, []),
        ({"model": "org/model", "dataset": "austen"}, ["org/model"]),
        ({"model": "gpt2", "dataset": "org/rows@main:*.jsonl,austen"}, ["gpt2", "org/rows@main:*.jsonl"]),
        ({"model": "tiny", "dataset": "texts/mine.jsonl", "validation": "org/held"}, ["org/held"]),
    ],
)
def test_which_names_are_the_hubs(config, found):
    assert [one["name"] for one in hub.hub_names(config)] == found


def test_what_is_brought_from_the_controller_is_not_fetched():
    uploads = [{"key": "dataset", "name": "org/rows"}]
    assert hub.hub_names({"model": "tiny", "dataset": "org/rows"}, uploads) == []


def test_the_first_host_that_reaches_the_hub_fetches():
    hosts = {"a": {"__trainer_hub": {"status": -1}}, "b": {"__trainer_hub": {"status": 404}}, "c": {}}
    assert hub.hub_host(["a", "b", "c"], hosts, NAMES, "https://hub.example") == "b"
    with pytest.raises(
        AnsibleFilterError, match=r"no host reaches https://hub\.example.*hf download org/model"
    ):
        hub.hub_host(["a", "c"], hosts, NAMES, "https://hub.example")


def test_what_was_fetched_looks_like_an_upload():
    results = [{"text": 'a warning\n{"path": "models/1/org--model", "files": []}\n'}]
    (one,) = hub.hub_fetched(NAMES, results)
    assert one == {"path": "models/1/org--model", "files": [], "key": "model", "name": "org/model"}


def test_a_secret_is_in_a_file_of_its_users_alone_and_in_no_command_line(load_module):
    module = load_module("trainer_command")
    with module.secret_files({"hub_token": "hf_secret"}) as paths:
        assert Path(paths["hub_token"]).read_text() == "hf_secret"
        assert stat.S_IMODE(os.stat(paths["hub_token"]).st_mode) == 0o600
        assert stat.S_IMODE(os.stat(os.path.dirname(paths["hub_token"])).st_mode) == 0o700
        words = module.as_unit(["trainer"], "trainyard", "/var/lib/trainyard", False, {"A": "b"}, paths)
        assert (
            f"--property=LoadCredential=hub_token:{paths['hub_token']}" in words and "--setenv=A=b" in words
        )
        assert not any("hf_secret" in word for word in words)
    assert not os.path.exists(paths["hub_token"])
