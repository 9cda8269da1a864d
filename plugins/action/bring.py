"""Bring files of the controller to all hosts, in a time that hardly grows with their number.

The hosts are a chain. The controller feeds the first one, in pieces, over the connection that Ansible has; each host
fetches from the one before while the files still grow there. All workers run at once. What has come stays where
something breaks off, and is not sent again. The module bring_host is a host's part.
"""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

sys.path.append(str(Path(__file__).parents[1] / "module_utils"))

from telling import brought

display = Display()

PIECE = 8 << 20  # bytes that go to the first host at once
TOLD = 10.0  # seconds between two words about how far it is


class ActionModule(ActionBase):
    """Arguments: files (each with source, path, bytes and sha256), hosts (in the chain's order), state_dir, user.

    A file without a source has been laid out on the first host (`trainer fetch`).
    """

    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        args, host = self._task.args, task_vars["inventory_hostname"]
        files = [{key: one[key] for key in ("path", "bytes", "sha256")} for one in args["files"]]
        hosts = [str(one) for one in args["hosts"]]
        place = {"files": files, "state_dir": str(args["state_dir"]), "user": str(args["user"])}

        def step(name: str, **more) -> dict:
            answer = self._execute_module(
                "bring_host", module_args={**place, "step": name, **more}, task_vars=task_vars
            )
            if answer.get("failed"):
                raise AnsibleActionFail(answer.get("msg", "the module bring_host failed"), result=answer)
            return answer

        if host != hosts[0]:
            return {**result, **step("pull", source=hosts[hosts.index(host) - 1])}
        begun = step("begin")
        if self._task.check_mode or not begun["missing"]:
            return {**result, "changed": begun["changed"]}
        self._feed(args["files"], begun["missing"], place, host)
        return {**result, **step("settle")}

    def _feed(self, files: list[dict], missing: dict[str, int], place: dict, host: str) -> None:
        """Append the rest of every file to what the host has of it. Raises AnsibleActionFail."""
        state_dir, user = place["state_dir"], place["user"]
        wanted = [one for one in files if missing.get(one["path"], one["bytes"]) < int(one["bytes"])]
        total = sum(int(one["bytes"]) for one in wanted)
        sent, told = sum(missing.values()), time.monotonic()
        for one in wanted:
            if "source" not in one:
                raise AnsibleActionFail(
                    f"{host}: {one['path']} was fetched there, and is gone; run train.yml again"
                )
            target = f"{state_dir}/incoming/{one['path']}"
            # As the service user, whose directory it is: root would follow a link that it has put there. sh ends with
            # an error where the disk is full.
            append = f"cat >> {shlex.quote(target)}"
            if self._connection.become:
                append = f"runuser -u {shlex.quote(user)} -- sh -c {shlex.quote(append)}"
            with open(one["source"], "rb") as file:
                file.seek(missing[one["path"]])
                while piece := file.read(PIECE):
                    answer = self._low_level_execute_command(append, in_data=piece)
                    if answer["rc"] != 0:
                        said = (answer["stderr"] or answer["stdout"]).strip().splitlines()
                        raise AnsibleActionFail(
                            f"{one['source']} does not get to {target}: {said[-1] if said else 'no word of why'}. "
                            "See whether there is room."
                        )
                    sent += len(piece)
                    if time.monotonic() - told > TOLD:
                        told = time.monotonic()
                        display.display(brought(host, sent, total))
