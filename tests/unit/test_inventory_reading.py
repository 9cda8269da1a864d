"""What is read of an inventory's files: what Ansible passes over in them."""

from pathlib import Path

import inventory_reading
import pytest
import yaml

# A YAML inventory -> (group, key) of what Ansible passes over with a warning at most.
PASSED_OVER = (
    ("all: {children: {cluster: {children: {workers: {hosts: {a: {}, b: }, vars: {x: 1}}}}}}", []),
    ("all: {children: {cluster: {children: {workers: {a: {ansible_host: 10.0.0.1}, b: }}}}}",
     [("workers", "a"), ("workers", "b")]),
    ("workers: {host: {a: {}}}", [("workers", "host")]),
    ("all: {cluster_network: 10.0.0.0/24, hosts: {a: {}}}", [("all", "cluster_network")]),
    ("cluster: {children: {workers: [a, b]}}", [("workers", "['a', 'b']")]),
    ("cluster: {hosts: a, children: }", []),
    ("services: {web: {image: x}}", []),  # a file of something else, beside
    ("model: tiny", []),
    ("- a", []),
)  # fmt: skip


@pytest.mark.parametrize(("text", "found"), PASSED_OVER)
def test_what_ansible_passes_over_in_an_inventory(text, found):
    assert [(group, key) for _, group, key in inventory_reading.passed_over(yaml.safe_load(text))] == found


def test_the_files_of_an_inventory_that_are_yaml(tmp_path):
    for name in ("group_vars/all.yml", ".git/a.yml", "b/hosts.yaml", "hosts", "hosts.ini", "old.yml.bak"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    found = list(inventory_reading.yaml_files(str(tmp_path)))
    assert [str(Path(one).relative_to(tmp_path)) for one in found] == ["b/hosts.yaml", "hosts"]
    assert list(inventory_reading.yaml_files("192.168.1.1,")) == []
