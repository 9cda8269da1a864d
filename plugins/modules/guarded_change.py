"""Documentation of the action plugins/action/guarded_change.py, which runs in this module's place."""

DOCUMENTATION = r"""
module: guarded_change
short_description: Change files and services so that a change that locks its user out undoes itself
description:
  - Keeps the old files on the host, writes the new ones, applies them detached, and confirms over a new
    connection. Without that connection the host puts everything back, by a timer or at its next boot.
  - Where no file differs, nothing is armed and nothing runs. The first change installs the guard.
  - Without files, it puts back what an earlier run, now dead, left unconfirmed. That comes before a change is planned
    from a look at the host; a change itself is refused while another one waits to be confirmed.
options:
  name:
    description: One change at a time goes by one name. Needed with files, as is why.
    type: str
  why:
    description: What the change is for; it stands in messages and reports.
    type: str
  files:
    description: What shall be, path by path; each has one of content, link_to, move_to and C(state=absent).
    type: list
    elements: dict
    default: []
    suboptions:
      path:
        description: Absolute path.
        type: path
        required: true
      content:
        description: The whole file.
        type: str
      state:
        description: C(absent) removes the path.
        type: str
        choices: [present, absent]
        default: present
      link_to:
        description: Make the path a symbolic link to there.
        type: str
      move_to:
        description: Move what is at path there.
        type: path
      mode:
        description: Octal mode. A file that only root may read is not shown in diffs.
        type: str
        default: "0644"
      owner:
        description: Owner.
        type: str
        default: root
      group:
        description: Group.
        type: str
        default: root
  check:
    description: Commands (lists of words) to run on the new files before anything is applied.
    type: list
    elements: list
  apply:
    description: Commands that make the new files count.
    type: list
    elements: list
  verify:
    description: Commands that must succeed on the host within some seconds after apply.
    type: list
    elements: list
  undo:
    description: Commands to run when the old files are back; default is apply.
    type: list
    elements: list
  addresses:
    description: Where the host will answer, first choice first; default is where it answers now.
    type: list
    elements: str
  timeout:
    description: Seconds until the host undoes an unconfirmed change (20 to 600).
    type: int
    default: 45
  live:
    description: C(false) applies the change where no file differs, too, because the files are not in force.
    type: bool
    default: true
  cuts_logins:
    description:
      - The change may cut off SSH logins of which Ansible's own connection says nothing, if that one is local or comes
        from the host itself. It is refused then while there are such logins.
    type: bool
    default: false
"""

RETURN = r"""
address:
  description: Where the confirming connection reached the host.
  type: str
undone:
  description: What an earlier run had left unconfirmed and was put back.
  type: list
  elements: str
paths:
  description: The paths that differ (or would).
  type: list
  elements: str
"""
