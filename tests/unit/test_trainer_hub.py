"""Sets by their names on the hub, and what is said where it does not answer."""

import errno

import pytest
from corpora import pairs, write_lines

from trainer.config import from_mapping
from trainer.data import hub, read
from trainer.errors import BadInput


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository on the hub, as it lies on disk after a download; what was asked for is in `.asked`."""
    import huggingface_hub

    folder = tmp_path / "snapshot"
    (folder / "data").mkdir(parents=True)
    names = (
        "data/train-0.jsonl",
        "data/train-1.jsonl",
        "data/test-0.jsonl",
        "data/dev.jsonl",
        "latest.jsonl",
    )
    for name in names:
        write_lines(folder / name, [{"text": name}])
    (folder / "LICENSE.txt").write_text("You may.")  # beside records a text is about them
    asked = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *a, **k: asked.append((*a, k)) or str(folder)
    )
    hub.fetch.cache_clear()
    return asked


def test_a_name_of_the_hub_is_fetched_at_its_revision(repository):
    def texts(name):
        return [text for text, _ in pairs(from_mapping({"dataset": name}))]

    assert texts("org/set") == ["data/train-0.jsonl", "data/train-1.jsonl", "latest.jsonl"]
    assert texts("org/set@0123abc:data/test-*.jsonl") == ["data/test-0.jsonl"]
    name, asked = repository[1]
    assert name == "org/set" and asked["repo_type"] == "dataset"
    assert (asked["revision"], asked["allow_patterns"]) == ("0123abc", ["data/test-*.jsonl"])
    with pytest.raises(BadInput, match=r"org/set@refs/convert/parquet"):
        texts("org/set:*.parquet")
    assert texts("org/set") and len(repository) == 3  # once in a process


def test_what_is_held_out_is_no_part_of_what_is_trained_on(repository, tmp_path):
    def held_out(name, dataset="org/set"):
        return read.everything(from_mapping({"dataset": dataset, "validation": name}))[-1].files

    assert [path.name for path in held_out("org/set")] == ["dev.jsonl"]
    assert [path.name for path in held_out("org/set:data/test-*.jsonl")] == ["test-0.jsonl"]
    with pytest.raises(BadInput, match=r"validation: .*train-0\.jsonl: dataset org/set has this file, too"):
        held_out("org/set:data/train-*.jsonl")
    own = tmp_path / "own"
    (own / "below").mkdir(parents=True)
    for name in ("a.jsonl", "below/b.jsonl"):
        write_lines(own / name, [{"text": name}])
    (tmp_path / "link.jsonl").symlink_to(own / "below/b.jsonl")
    (tmp_path / "copy.jsonl").write_bytes((own / "a.jsonl").read_bytes())  # as what is brought to a host is
    for name in (own / "below/b.jsonl", own / "below", tmp_path / "link.jsonl", tmp_path / "copy.jsonl"):
        with pytest.raises(BadInput, match=f"dataset {own} has this file, too.*validation_split"):
            held_out(str(name), str(own))
        config = from_mapping({"dataset": str(own), "validation": str(name)})
        with pytest.raises(BadInput, match=f"dataset {own} has this file, too"):
            read.check(config, controller=True)
    assert held_out(str(own / "below"), str(own / "a.jsonl")) == (own / "below/b.jsonl",)
    (tmp_path / "snapshot/data/dev.jsonl").unlink()
    hub.fetch.cache_clear()
    with pytest.raises(
        BadInput, match=r"validation: org/set: found .*; expected .*, called validation, dev or eval"
    ):
        held_out("org/set")


def test_without_a_network_a_name_of_the_hub_is_one_message(monkeypatch):
    import huggingface_hub

    def no_network(*_, **__):
        raise ConnectionError("Max retries exceeded")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_network)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.fetch.cache_clear()
    with pytest.raises(BadInput) as refused:
        read.training(from_mapping({"dataset": "org/set"}))
    for part in (
        "org/set",
        "neither a file here",
        "HF_HUB_OFFLINE is set",
        "hf download org/set --repo-type dataset",
    ):
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("error", "cure"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "make room where what is fetched is kept"),
        (OSError("Cannot access gated repo for url X"), "accept its terms on the hub"),
    ],
)
def test_what_helps_against_the_hub_goes_by_what_it_said(monkeypatch, error, cure):
    import huggingface_hub

    def fails(*_, **__):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    hub.fetch.cache_clear()
    with pytest.raises(BadInput, match=cure) as refused:
        read.training(from_mapping({"dataset": "org/set"}))
    assert "Check the name" not in str(refused.value)


def test_the_controller_leaves_to_the_hosts_what_it_cannot_read(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "fetch", None)  # would fail
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    config = from_mapping({"dataset": f"org/set,{tmp_path}/a.parquet,austen", "loss_on": "answers"})
    with pytest.raises(BadInput, match="cannot be read as parquet"):
        read.check(config, controller=True)
    monkeypatch.setattr(read.importlib.util, "find_spec", lambda name: None)
    samples, letters = read.check(config, controller=True)
    assert samples > 500 and letters > 300_000
    with pytest.raises(BadInput, match="loss_on: answers, but the data is plain text"):
        read.check(from_mapping({"loss_on": "answers"}), controller=True)
