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

from how_far import BRINGING
from meanwhile import file_on_host, told
from telling import brought

display = Display()

PIECE = 8 << 20  # bytes that go to the first host at once
TOLD = 10.0  # seconds between two words about how far it is


class ActionModule(ActionBase):
    """Arguments: files (each with source, path, bytes and sha256), hosts (in the chain's order), state_dir, user.

    A file without a source has been laid out on the first host (`trainer fetch`), or is at its path `here` of that.
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
            with told(host, file_on_host(self, BRINGING)):
                return {**result, **step("pull", source=hosts[hosts.index(host) - 1])}
        if all("here" in one for one in args["files"]):
            return {**result, **step("fill", files=args["files"])}
        begun = step("begin")
        if self._task.check_mode or not begun["missing"]:
            return {**result, "changed": begun["changed"]}
        self._feed(args["files"], begun["missing"], place, host, lambda: step("begin")["missing"])
        return {**result, **step("settle")}

    def _feed(self, files: list[dict], missing: dict[str, int], place: dict, host: str, look) -> None:
        """Write the rest of every file behind what the host has of it; `look` says what is missing there by now.

        Raises AnsibleActionFail.
        """
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
            with open(one["source"], "rb") as file:
                file.seek(missing[one["path"]])
                while piece := file.read(PIECE):
                    command = writing(target, file.tell() - len(piece))
                    # As the service user, whose directory it is: root would follow a link that it has put there.
                    if self._connection.become:
                        command = f"runuser -u {shlex.quote(user)} -- {command}"
                    answer = self._low_level_execute_command(command, in_data=piece)
                    if answer["rc"] != 0 and one["path"] not in look():
                        break  # another play has brought it meanwhile
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


def writing(target: str, at: int) -> str:
    """The command that writes its input into the file `target`, from byte `at` on. It fails where the disk is full.

    In its place, so that another play that brings the same file writes the same.
    """
    place = f"of={shlex.quote(target)} oflag=seek_bytes seek={at} conv=notrunc,nocreat"
    return f"dd {place} iflag=fullblock bs=1M status=none"
