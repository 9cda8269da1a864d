"""What several unit tests ask for: Ansible's modules, as Python and as Ansible runs them; a run of one rank."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch._dynamo  # noqa: F401 - some tests need it, and it does not load once Ansible has patched sys.intern

ROOT = Path(__file__).resolve().parents[2]


class _Ended(Exception):
    """A module has answered."""


@pytest.fixture(scope="module")
def world():
    """Of a run of one rank."""
    from trainer import environment
    from trainer.config import from_mapping
    from trainer.world import World

    return World(from_mapping({}), environment.read("run"))


@pytest.fixture
def call_main(monkeypatch):
    """`call_main(module, check=False, said=None, **params)`: what main() answers in this process.

    Defaults are the module's own; types are not looked at. said: a list that gets the warnings.
    """

    def call(module, check=False, said=None, **params):
        class Module:
            check_mode = check

            def __init__(self, argument_spec, **_):
                self.params = {key: params.get(key, one.get("default")) for key, one in argument_spec.items()}

            def exit_json(self, **result):
                raise _Ended(result)

            def fail_json(self, **result):
                raise _Ended({"failed": True, **result})

            def warn(self, text):
                if said is not None:
                    said.append(text)

            def set_mode_if_different(self, path, mode, changed):
                return changed

        monkeypatch.setattr(module, "AnsibleModule", Module)
        with pytest.raises(_Ended) as ended:
            module.main()
        return ended.value.args[0]

    return call


@pytest.fixture(scope="session")
def run_module():
    """`run_module(name, check=False, **arguments)`: what the module returns when Ansible runs it here, and `output`.

    A module without an action plugin runs by itself, as Ansible starts it on a host, which takes a tenth of the time.
    """

    def run(name, check=False, **arguments):
        if (ROOT / f"plugins/action/{name}.py").exists():
            done = by_ansible(name, check, arguments)
            head, _, result = done.stdout.partition("=> ")
            assert "localhost" in head, done.stdout + done.stderr
            answer = json.JSONDecoder().raw_decode(result)[0]
        else:
            done = by_itself(name, check, arguments)
            assert done.stdout.lstrip().startswith("{"), done.stdout + done.stderr
            answer = json.loads(done.stdout)
            assert done.returncode == (1 if answer.get("failed") else 0), answer
        return {**answer, "output": done.stdout + done.stderr}

    return run


def by_ansible(name, check, arguments):
    """Ansible's own command, which runs the module on this machine."""
    command = [str(Path(sys.executable).with_name("ansible")), "localhost", "-i", "localhost,", "-c", "local"]
    command += ["-m", name, "-a", json.dumps(arguments), *(["--check"] if check else [])]
    settings = {
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_CALLBACK_RESULT_FORMAT": "json",
        "ANSIBLE_PYTHON_INTERPRETER": sys.executable,
    }
    environment = {**os.environ, **settings}
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)


# Ansible packs what a module imports beside it; here that is found where it lies.
START = """
import runpy, sys
import ansible.module_utils
path, beside = sys.argv[1:]
del sys.argv[1:]  # a module takes a word for its arguments
ansible.module_utils.__path__.append(beside)
runpy.run_path(path, run_name="__main__")
"""


def by_itself(name, check, arguments):
    """The module's file, with the arguments that Ansible gives it."""
    places = ROOT / f"plugins/modules/{name}.py", ROOT / "plugins/module_utils"
    command = [sys.executable, "-c", START, *map(str, places)]
    told = json.dumps({"ANSIBLE_MODULE_ARGS": {**arguments, "_ansible_check_mode": check}})
    return subprocess.run(command, input=told, capture_output=True, text=True, cwd=ROOT)
