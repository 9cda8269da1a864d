"""Which CUDA torch's build is for, and what that asks of a host's driver and its cards.

Given: a Host (nvidia_host), whose option `torch` is torch's requirement, as the role python_env installs it.
"""

from __future__ import annotations

import re

from nvidia_host import GUIDE, Host, Refused, card_name
from nvidia_installed import has_driver, installed_branch, numbers


def torch_cuda(host: Host) -> str:
    """The CUDA that torch's build is for, 12.6 of one tagged +cu126; "" for a build for none, or one unknown.

    Without a tag it is what the public index has.
    """
    version, _, tag = host.options.get("torch", "").partition("+")
    if not version or not tag:
        return host.tables["torch_cuda"] if version else ""
    found = re.fullmatch(r"cu(\d+)(\d)", tag)
    return f"{found[1]}.{found[2]}" if found else ""


def least_branch(host: Host) -> int:
    """The first branch that runs torch's build; 0 where that is not known. Of one major number a branch runs all."""
    cuda = torch_cuda(host)
    known = {int(major): branch for major, branch in host.tables["branch_of_cuda"].items()}
    return known.get(numbers(cuda)[0], 0) if cuda else 0


def too_old_for_torch(host: Host, branch: int) -> str:
    """What is said of a branch before least_branch."""
    return (
        f"torch's build ({host.options['torch']}) is for CUDA {torch_cuda(host)}, which {branch} does not run, "
        f"and {least_branch(host)} does"
    )


def refuse_cards_without_code(host: Host) -> None:
    """Raise Refused where torch's build is for a CUDA that makes no code for one of the cards."""
    cuda = torch_cuda(host)
    if not cuda:
        return
    for card in host.cards:
        serves = {**card["generation"]["cuda"], **card["generation"].get("torch", {})}
        older = numbers(cuda) < numbers(serves["from"])
        if older or (serves.get("to") and numbers(cuda) > numbers(serves["to"])):
            until = f" to {serves['to']}" if serves.get("to") else " or later"
            raise Refused(
                f"torch's build ({host.options['torch']}) is for CUDA {cuda}; the {card_name(card)} is served by "
                f"builds for {serves['from']}{until}. Set python_env_torch to such a build for all hosts "
                f"({other_build(host, newer=older)}), or leave this host out of the run; {GUIDE} has the table."
            )


def refuse_old_driver(host: Host, offers: list[dict]) -> None:
    """Raise Refused where a driver that is there, and that nobody asked to give way, does not run torch's build."""
    if not has_driver(host.survey) or host.options["source"] != "auto" or host.options["branch"]:
        return
    installed, least = installed_branch(host.survey["packages"]), least_branch(host)
    if installed < least:
        to_have = next((one["branch"] for one in offers if not one["fault"]), least)
        raise Refused(
            f"{too_old_for_torch(host, installed)}; a driver of {installed} is installed. Set "
            f"nvidia_branch: {to_have} to have it replaced, or python_env_torch to a build that it runs "
            f"({other_build(host)}), for all hosts; {GUIDE} has the table."
        )


def other_build(host: Host, newer: bool = False) -> str:
    version = host.options["torch"].partition("+")[0]
    if newer:
        return f"such as {version}, as the public index has it"
    return f"such as {version}+{host.tables['torch_older']}, from an index or a folder that has it"
