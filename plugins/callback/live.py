"""What site.yml, train.yml and their like show: a line a host of what it does now, and above it what matters.

On a terminal the lower rows say what every host does, since when, and how far the play is; above them scrolls what
changed (once for all hosts that it changed on), what failed and why (once), and what the tasks themselves tell.
Elsewhere the same is written line by line. In the end, what was warned of and what failed stands together, as it has
scrolled away by then. `-v`, and anything that goes wrong in here, bring Ansible's own output.

One place writes to the terminal: Ansible's Display, which all plugins of all workers end in, is led through the region.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import sys
import time
from pathlib import Path

from ansible import constants as C
from ansible import context
from ansible.playbook.task_include import TaskInclude
from ansible.plugins.callback.default import CallbackModule as Default

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "plugins/module_utils"), str(ROOT)]

import live_frame
from live_found import FAIL, PASS, WARN, Found, warning
from live_plan import after_site, planned, rescued
from live_region import Region

from trainer.words import span

DOCUMENTATION = r"""
name: live
type: stdout
short_description: What hosts do now, and what they changed
description:
  - A line a host while it works, one for each change, each failure once; at the end warnings and failures together, and
    the next commands.
  - C(ANSIBLE_STDOUT_CALLBACK=default) brings Ansible's own output, and so does C(-v).
extends_documentation_fragment:
  - default_callback
  - result_format_callback
"""

# A warning of Ansible's on each new host: root's own directory for it was made, as it should be.
EXPECTED = re.compile(r"Module remote_tmp \S+ did not exist and was created with a mode of 0700")


def shielded(method):
    """`method`, or Ansible's own of that name: with -v, and from the first exception in here on."""

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        if not self.plain:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                self.plain = True
                if self.region:
                    self.region.end()
                with contextlib.suppress(Exception):  # what the last task did
                    self.flush()
                self._display.warning(f"the callback live stops, and Ansible's own goes on: {error!r}")
        return getattr(super(CallbackModule, self), method.__name__)(*args, **kwargs)

    return call


def quiet(name: str):
    """A method by which the event `name` is not shown."""

    def method(self, *args) -> None: ...

    method.__name__ = name
    return shielded(method)


class CallbackModule(Default):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "stdout"
    CALLBACK_NAME = "live"

    def __init__(self) -> None:
        super().__init__()
        self.plain = self._display.verbosity > 0
        self.began = time.monotonic()
        self.board, self.region = live_frame.Board(), None
        self.book = self.role = ""
        self.plan: dict[str, int] = {}
        self.names: dict[str, str] = {}  # of tasks, as they read when these began
        # (task, outcome, words) -> the hosts of which it is told, once for all
        self.pending: dict[tuple[str, str, str], list[str]] = {}
        self.told: set[tuple[str, str]] = set()  # (task, why it failed)
        self.judged = False  # by preflight
        self.found, self.last = Found(), ""  # last: the task, where its failure is the last that was told

    def begin_region(self) -> None:
        board = self.board
        self.region = Region(
            sys.stdout, self._display._lock, lambda: board.lines(shutil.get_terminal_size(), time.monotonic())
        )
        self.region.lead(self._display, lambda text, newline: board.takes(text, newline, time.monotonic()))
        self.region.begin()

    # ---- what stays ----

    def say(self, text: str, color: str | None = None, **how) -> None:
        self.last = ""
        self._display.display(text, color=color, **how)

    def name(self, task) -> str:
        return self.names.get(task._uuid) or live_frame.cut(task.get_name().strip(), 200)

    def flush(self, all_of_it: bool = True) -> None:
        """Tell the outcomes of the tasks that no host is at any more."""
        busy = set() if all_of_it else {one.uuid for one in self.board.doing.values()}
        for key in [key for key in self.pending if key[0] not in busy]:
            (task, outcome, words), hosts = key, self.pending.pop(key)
            named = live_frame.folded(self.board.sorted(hosts))
            if outcome == "says":
                self.say(f"{named}: {words}")
            elif outcome == "changed":
                self.say(f"changed  {named}: {self.names[task]}", C.COLOR_CHANGED)
            else:
                self.say(f"{outcome:<8} {named}: {self.names[task]}: the same", C.COLOR_ERROR)
                self.last = task

    def settle(self, result, outcome: str, words: str = "") -> None:
        self.names.setdefault(result.task._uuid, self.name(result.task))
        key = (result.task._uuid, outcome, words)
        hosts = self.pending.setdefault(key, [])
        if (host := result.host.get_name()) not in hosts:
            hosts.append(host)

    def fail(self, result, outcome: str, color: str) -> None:
        """Say why a task failed, in full; hosts that say the same are named when the task is over."""
        host = live_frame.folded([result.host.get_name()])
        text = "\n".join(live_frame.failures(result.result))
        if self.verdict(result):
            self.judged = True
        else:
            self.found.fail(result.host.get_name(), result.task._uuid, self.name(result.task), text)
        self.found.cut_short |= bool(result.task.any_errors_fatal or result.task.run_once)
        if (result.task._uuid, text) in self.told:
            self.settle(result, outcome, text)
            return
        self.told.add((result.task._uuid, text))
        head = f"{outcome:<8} {host}: {self.name(result.task)}"
        self.say(
            f"{head}\n{live_frame.indented(text)}", color, stderr=self.get_option("display_failed_stderr")
        )
        self.last = result.task._uuid

    def warn(self, result) -> None:
        """Tell Ansible's warnings and the modules' at once, and keep them for the end."""
        warnings = result.warnings if result.result.get("warnings") else ()
        warnings = [one for one in warnings if not EXPECTED.match(one.event.msg)]
        result.result.pop("warnings", None)
        for one in warnings:
            self.found.warn(result.host.get_name(), one.event.msg)
            self._display._warning(live_frame.cleaned(one))
        for one in result.deprecations if result.result.pop("deprecations", None) else ():
            self._display._deprecated(live_frame.cleaned(one))

    def verdict(self, result) -> bool:
        """Whether it is preflight's, whose report passes, warns and fails hosts itself."""
        return result.task.action == "preflight_verdict" and "exit_status" in result.result

    def findings(self, counts: dict[str, dict[str, int]]) -> None:
        """What was found on the hosts that the playbook came to, in a block of its own."""
        colors = {PASS: C.COLOR_OK, WARN: C.COLOR_WARN, FAIL: C.COLOR_ERROR}
        well = [host for host, count in counts.items() if not any(count[key] for key, _ in live_frame.BAD)]
        if lines := self.found.lines([] if self.judged else well, self.board.sorted, self.last):
            self.say("")
        for kind, line in lines:
            self.say(line, colors[kind])
        self.found, self.judged = Found(), False

    # ---- Ansible's events ----

    @shielded
    def v2_playbook_on_start(self, playbook) -> None:
        self.book = os.path.realpath(playbook._file_name)
        if sys.stdout.isatty():
            if os.environ.get("TERM", "dumb") != "dumb":
                self.begin_region()
        else:
            sys.stdout.reconfigure(line_buffering=True)
        if context.CLIARGS.get("check"):
            self.say("Check mode: it says what would change, and changes nothing.")

    @shielded
    def v2_playbook_on_play_start(self, play) -> None:
        self.flush()
        self._play, self.role, self.plan = play, "", planned(play)
        name = live_frame.cut(play.get_name().strip(), 200)
        self.board.begin(name, len(self.plan), time.monotonic())
        self.say(f"\n== {name}")

    @shielded
    def v2_playbook_on_task_start(self, task, is_conditional) -> None:
        self.task_begins(task, "TASK")

    @shielded
    def v2_playbook_on_handler_task_start(self, task) -> None:
        self.task_begins(task, "RUNNING HANDLER")

    def task_begins(self, task, kind: str) -> None:
        self.flush(all_of_it=False)
        self._task_type_cache[task._uuid] = kind  # Ansible's own, should it have to go on
        self._last_task_name = task.get_name().strip()
        self.names[task._uuid] = live_frame.cut(self._last_task_name, 200)
        self.board.at, self.board.note = max(self.board.at, self.plan.get(task._uuid, 0)), ""
        role = task._role.get_name() if task._role else ""
        if role and role != self.role and not self.region:
            self.say(f"-- {role}")
        self.role = role or self.role

    @shielded
    def v2_runner_on_start(self, host, task) -> None:
        self.board.start(host.get_name(), self.name(task), task._uuid, time.monotonic())

    @shielded
    def v2_runner_on_ok(self, result) -> None:
        self.board.end(result.host.get_name())
        self.warn(result)
        if isinstance(result.task, TaskInclude):
            return
        self.judged |= self.verdict(result)
        if result.result.get("changed"):
            self.settle(result, "changed")
        elif result.result.get("_ansible_verbose_always") and "results" not in result.result:
            self.spoken(result)

    def spoken(self, result) -> None:
        """What `debug` shows."""
        self._clean_results(result.result, result.task.action)
        words = result.result.get("msg")
        if not isinstance(words, str):
            words = self._dump_results(result.result).strip()
        if found := warning(words):
            self.found.warn(result.host.get_name(), found)
        self.settle(result, "says", live_frame.clean(words))

    @shielded
    def v2_runner_on_failed(self, result, ignore_errors=False) -> None:
        self.board.end(result.host.get_name())
        self.warn(result)
        if not ignore_errors and not rescued(result.task):
            self.fail(result, "failed", C.COLOR_ERROR)

    @shielded
    def v2_runner_on_unreachable(self, result) -> None:
        self.board.end(result.host.get_name())
        self.warn(result)
        if not result.task.ignore_unreachable:
            self.fail(result, "unreachable", C.COLOR_UNREACHABLE)

    @shielded
    def v2_runner_on_skipped(self, result) -> None:
        self.board.end(result.host.get_name())

    @shielded
    def v2_runner_retry(self, result) -> None:
        if doing := self.board.doing.get(result.host.get_name()):
            doing.note = f"try {result.result['attempts'] + 1}"

    @shielded
    def v2_runner_item_on_ok(self, result) -> None:
        self.warn(result)
        if result.result.get("_ansible_verbose_always"):
            self.spoken(result)

    @shielded
    def v2_runner_item_on_failed(self, result) -> None:
        self.warn(result)  # which items failed, and whether that counts, comes with the loop's result

    v2_runner_item_on_skipped = quiet("v2_runner_item_on_skipped")
    v2_runner_on_async_poll = quiet("v2_runner_on_async_poll")
    v2_runner_on_async_ok = quiet("v2_runner_on_async_ok")
    v2_runner_on_async_failed = quiet("v2_runner_on_async_failed")  # the task fails, too
    v2_playbook_on_include = quiet("v2_playbook_on_include")
    v2_playbook_on_no_hosts_remaining = quiet("v2_playbook_on_no_hosts_remaining")
    v2_playbook_on_notify = quiet("v2_playbook_on_notify")

    @shielded
    def v2_on_file_diff(self, result) -> None:
        for one in result.result.get("results") or [result.result]:
            if isinstance(one, dict) and one.get("changed") and one.get("diff"):
                diff = self._get_diff(live_frame.cleaned(one["diff"]))
                self.say(f"differs  {live_frame.folded([result.host.get_name()])}: {self.name(result.task)}")
                self.say(diff, screen_only=True)
                self.say(live_frame.SEQUENCE.sub("", diff), log_only=True)

    @shielded
    def v2_playbook_on_stats(self, stats) -> None:
        if self.region:
            self.region.end()
        self.flush()
        counts = {host: stats.summarize(host) for host in sorted(stats.processed)}
        self.findings(counts)
        self.say("")
        for (_, count), line in zip(counts.items(), live_frame.recap(counts), strict=True):
            bad = count["failures"] or count["unreachable"]
            self.say(line, C.COLOR_ERROR if bad else C.COLOR_CHANGED if count["changed"] else C.COLOR_OK)
        failed = bool(stats.failures or stats.dark)
        self.say(f"{'Failed after' if failed else 'Done in'} {span(time.monotonic() - self.began)}")
        if failed:
            self.say("More words: the same command with -v")
        elif self.book in (str(ROOT / "site.yml"), str(ROOT / "playbooks/site.yml")):
            for line in after_site(context.CLIARGS, ROOT):
                self.say(line)
