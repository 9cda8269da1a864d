"""A host that is to have NVIDIA's driver: which of its cards are to be served, and all that the choice goes by.

Given: the answers of the module nvidia_survey, facts, the role's options and its tables. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nvidia_installed import numbers
from pci_cards import UNUSABLE

GUIDE = "docs/gpus.md"


class Refused(Exception):
    """What stands in the way on this host, and the cure."""


@dataclass(frozen=True)
class Host:
    """A host with `cards` to serve (as usable_cards has them); survey, facts, options, tables: nvidia_plan's."""

    survey: Mapping[str, Any]
    facts: Mapping[str, Any]
    options: Mapping[str, Any]
    tables: Mapping[str, Any]
    cards: list[dict]

    @property
    def family(self) -> str:
        return self.facts["distribution"]

    @property
    def release(self) -> str:
        """As the tables name it: Debian 12 of 12.5, Ubuntu 24.04."""
        version = str(self.facts["distribution_version"])
        return f"{self.family} {version.split('.')[0] if self.family == 'Debian' else version}"

    @property
    def distribution(self) -> Mapping[str, Any]:
        """What the tables have of its release."""
        return self.tables["distributions"][self.release]

    def scheme(self, source: str) -> Mapping[str, Any]:
        """How a source names its packages for this host's distribution."""
        return self.tables["packages"][source][self.family]

    @property
    def fifth_nvlink(self) -> bool:
        """Whether cards are joined by switches that do not stand on the PCI bus."""
        return any(card["device"] in self.tables["fifth_nvlink"] for card in self.cards)

    @property
    def fabric(self) -> bool:
        """Whether cards are joined by switches, so that they start CUDA with a fabric manager alone."""
        return bool(self.survey["nvswitches"]) or self.fifth_nvlink

    @property
    def cuda(self) -> dict[str, str | None]:
        """{from, to}: the CUDA for which code can be built for all of the cards."""
        limits = [card["generation"]["cuda"] for card in self.cards]
        return {"from": newest(one["from"] for one in limits), "to": oldest(one.get("to") for one in limits)}


def newest(versions: Iterable[str | None]) -> str | None:
    return max(filter(None, versions), key=numbers, default=None)


def oldest(versions: Iterable[str | None]) -> str | None:
    return min(filter(None, versions), key=numbers, default=None)


# ---- the cards ----


def usable_cards(
    survey: Mapping[str, Any], options: Mapping[str, Any], tables: Mapping[str, Any], notes: list[str]
) -> list[dict]:
    """The cards to serve, {address, device, generation}; what is left out, and why, goes to `notes`."""
    cards = []
    for card in survey["cards"]:
        where = f"{card['address']} (PCI id 10de:{card['device']})"
        if (card["driver"] or "").endswith(UNUSABLE):
            notes.append(f"the card at {where} is reserved for virtual machines ({card['driver']}): left out")
        elif within(card["device"], tables["too_old"]):
            notes.append(
                f"the card at {where} is of Kepler or an older generation, which no driver for today's CUDA "
                "serves: left out"
            )
        else:
            generation = generation_of(card["device"], tables) or as_told(where, options)
            cards.append({"address": card["address"], "device": card["device"], "generation": generation})
    served = [card["address"] for card in cards]
    for card in survey["cards"]:
        if served and card["driver"] == "nouveau" and card["address"] not in served:
            notes.append(
                f"nouveau, which drives the card at {card['address']}, is kept from loading for the others' sake: a "
                "screen at it has the firmware's plain picture after a reboot; attach it to another card"
            )
    return cards


def generation_of(device: str, tables: Mapping[str, Any]) -> dict | None:
    """{name, modules, branch {from, to}, cuda {from, to}} of a PCI device id (4 digits); None if unknown."""
    row = next((row for row in tables["generations"] if within(device, row["devices"])), None)
    if not row:
        return None
    later = [int(branch) for branch, ids in tables["later_cards"].items() if device in ids]
    least = max([row["branch"]["from"], *later])
    return {**row, "branch": {"from": least, "to": row["branch"].get("to")}}


def within(device: str, ranges: Iterable[str]) -> bool:
    """Whether the PCI device id lies in one of `ranges`, first-last."""
    ends = [text.partition("-") for text in ranges]
    return any(int(first, 16) <= int(device, 16) <= int(last or first, 16) for first, _, last in ends)


def as_told(where: str, options: Mapping[str, Any]) -> dict:
    """What stands for the generation of an unknown card: the inventory's word, both of its words."""
    if options["modules"] == "auto" or not options["branch"]:
        raise Refused(
            f"the card at {where} is none that Trainyard knows, perhaps because it is too new, so neither its "
            "kernel modules nor its driver branch can be chosen. Set both for this host, as NVIDIA's list of "
            "supported cards has them: nvidia_modules (open or proprietary) and nvidia_branch (such as 580)."
        )
    return {
        "name": "unknown",
        "modules": [options["modules"]],
        "branch": {"from": int(options["branch"]), "to": None},
        "cuda": {"from": "0"},
    }


def card_name(card: Mapping[str, Any]) -> str:
    return f"{card['generation']['name']} card at {card['address']} (PCI id 10de:{card['device']})"
