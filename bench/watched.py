"""The trainer alone, and with a page for Prometheus that is read each second: what does being watched cost?"""

from bench.measure import HEAD, Case, Options, against, markdown, rounds, same_losses

CASE = Case("text", vocabulary=2048, batch_size=8, sequence_length=128, steps=63, untimed=3)
QUICK = Case("text", vocabulary=2048, batch_size=4, sequence_length=64, steps=20, untimed=1)
ROUNDS = 7
CONTENDERS = {"not watched": "ours", "watched": "watched"}


def table(options: Options) -> str:
    case = options.fitted(CASE, QUICK)
    found = rounds(case, CONTENDERS, options.rounds(ROUNDS))
    cost = 1 - found["watched"].cpu_speed / found["not watched"].cpu_speed
    return f"""\
### Watched

The settings of "Equal settings"; watched: `metrics_port`, and somebody reads the page each second. \
{same_losses(found, "not watched", "watched")}

{markdown(HEAD, against(found, "not watched"))}

It costs {cost:.1%} of the tokens a CPU second (target: under 1 %)."""
