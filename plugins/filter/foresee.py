"""What a run will take on each of its hosts, from what `trainer plan` says there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

from trainer import link, ways

MIB = 1 << 20
TABLE = "{:16} {:>5}  {:8} {:>13} {:>13}  {:14} {:>10}"


def foresee_link(hosts: list[str], results: str, rdma: list[str]) -> dict:
    """What is known of the link between just these hosts: {mbit, source}, or nothing.

    results: where the playbooks keep what they have measured, by TCP. rdma: the hosts that have more than that.
    """
    found = link.between(Path(results), hosts, rdma)
    return {"mbit": found[0].bits / 1e6, "source": found[0].source} if found else {}


def foresee_arguments(
    config: dict, measured: dict, found: dict[str, str] | None = None, facts: dict[str, dict] | None = None
) -> list[str]:
    """The words of `trainer plan` for a run.

    measured: foresee_link's answer. found: what the command said on each host, as JSON, of which the speeds are taken;
    facts: run_host's, in node order.
    """
    words = ["plan", "/dev/null", *(f"{key}={_word(value)}" for key, value in config.items())]
    if measured:
        words += ["--link", f"{measured['mbit']:.3f}mbit"]
    if found and sum(fact["processes"] for fact in facts.values()) > 1:
        speeds = {
            host: json.loads(text)["estimate"]["matrix_flops_per_second"] for host, text in found.items()
        }
        least = min(speeds.values())
        ranks = [
            f"{speeds[host] / least:.2f}" for host, fact in facts.items() for _ in range(fact["processes"])
        ]
        words += ["--speeds", ",".join(ranks)]
    return words


def _word(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def foresee_text(first: str, measured: dict, found: dict[str, str], facts: dict[str, dict]) -> str:
    """The plan of the run's `first` host, and what each has for its ranks; the others as above."""
    plans = {host: json.loads(text) for host, text in found.items()}
    of_first = next(iter(plans.values()))
    strategy = of_first["strategy"]
    title = TABLE.format("host", "ranks", "on", "a rank needs", "there is", "", "TFLOP/s")
    lines = [first.rstrip("\n"), "", f"each host, with strategy {strategy}:", title]
    for host, plan in plans.items():
        mine = plan["strategies"][strategy]
        verdict = "fits" if mine["fits"] else "does not fit"
        lines.append(
            TABLE.format(
                host,
                facts[host]["processes"],
                plan["device"],
                f"{mine['memory_bytes'] / MIB:,.0f} MiB",
                f"{plan['memory_there'] / MIB:,.0f} MiB",
                verdict,
                f"{plan['estimate']['matrix_flops_per_second'] / 1e12:.3g}",
            ).rstrip()
        )
        if mine["host_memory"]:
            lines.append(
                TABLE.format(
                    "", "", "its host", f"{mine['host_memory_bytes'] / MIB:,.0f} MiB",
                    f"{plan['host_memory_there'] / MIB:,.0f} MiB", "", "",
                ).rstrip()
            )  # fmt: skip
    comm = of_first["comm"]
    everywhere = [
        name
        for name in of_first["strategies"]
        if all(_fits(plan, name) for plan in plans.values()) and (name == "ddp" or comm in ways.EXACT)
    ]
    forced = {name for plan in plans.values() for name in plan["want_force"]}
    everywhere = [f"{name} (with force_strategy: true)" if name in forced else name for name in everywhere]
    fewer = [plan.get("proposed_micro_batch_size") for plan in plans.values() if not _fits(plan, "ddp")]
    if fewer and all(fewer):
        everywhere.insert(0, f"ddp with micro_batch_size: {min(fewer)}")
    others = "" if comm in ways.EXACT else f" (with comm: {comm}, which works with ddp alone)"
    if measured:
        lines.append(f"the link: {measured['source']}")
    lines += [
        f"fits on all of them: {', '.join(everywhere) or 'none of the strategies'}{others}",
        "Nothing was started: leave plan out for that.",
    ]
    return "\n".join(lines)


def _fits(plan: dict, name: str) -> bool:
    return plan["strategies"].get(name, {}).get("fits", False)


class FilterModule:
    """The filters of this file."""

    def filters(self):
        return {
            "foresee_arguments": foresee_arguments,
            "foresee_link": foresee_link,
            "foresee_text": foresee_text,
        }
