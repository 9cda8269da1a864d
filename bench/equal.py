"""The same packed sequences for all: what does the trainer cost beside a loop of a few lines?

Of a large step a trainer's own cost, which is the same for each step, is a smaller part: so by several sizes. What it
saves by never holding all logits grows with the vocabulary: so with one as Llama's and Mistral's, too.
"""

from bench.measure import (
    ALIKE,
    HEAD,
    Case,
    Options,
    against,
    beside,
    markdown,
    quotients,
    rounds,
    same_losses,
)

CASES = [
    Case("text", vocabulary=vocabulary, batch_size=batch_size, sequence_length=128, steps=steps, untimed=3)
    for vocabulary, batch_size, steps in ((2048, 8, 43), (2048, 2, 123), (2048, 1, 203), (32_000, 8, 23))
]
QUICK = Case("text", vocabulary=2048, batch_size=4, sequence_length=64, steps=4, untimed=1)
ROUNDS = 5
BESIDE = {title: ALIKE[title] for title in ("bare loop", "Trainyard", "HF Trainer")}


def table(options: Options) -> str:
    cases = [options.fitted(case, QUICK) for case in CASES]
    return "\n\n".join(_of(case, options.rounds(ROUNDS)) for case in dict.fromkeys(cases))


def _of(case: Case, count: int) -> str:
    found = rounds(case, ALIKE, count)
    pairs = beside(case, BESIDE, count)
    return f"""\
### Equal settings, {case.batch_size * case.sequence_length:,} tokens a step, vocabulary {case.vocabulary:,}

{case.layers} layers, {case.width} wide, {case.batch_size} packed sequences of {case.sequence_length} tokens a step, \
float32, {case.threads} threads. {same_losses(found, "bare loop", "Trainyard")}

{markdown(HEAD, against(found, "HF Trainer"))}

`of it`: of HF Trainer's. Trainyard reaches {found["Trainyard"].speed / found["bare loop"].speed:.3f} of the bare \
loop's speed (target: 0.98) and {found["Trainyard"].speed / found["HF Trainer"].speed:.2f} of HF Trainer's \
(target: 1.2).

At the same time on one core, a thread each, by tokens a CPU second, medians of the rounds' own quotients: Trainyard \
has {quotients(pairs, "Trainyard", "bare loop")} of the bare loop's and {quotients(pairs, "Trainyard", "HF Trainer")} \
of HF Trainer's, the bare loop {quotients(pairs, "bare loop", "HF Trainer")} of the latter's."""
