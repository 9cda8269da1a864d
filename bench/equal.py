"""The same packed sequences for all: what does the trainer cost beside a loop of a few lines?"""

from bench.measure import ALIKE, HEAD, Case, Options, against, markdown, rounds, same_losses

CASE = Case("text", vocabulary=2048, batch_size=8, sequence_length=128, steps=43, untimed=3)
QUICK = Case("text", vocabulary=2048, batch_size=4, sequence_length=64, steps=4, untimed=1)
ROUNDS = 5


def table(options: Options) -> str:
    case = options.fitted(CASE, QUICK)
    found = rounds(case, ALIKE, options.rounds(ROUNDS))
    return f"""\
### Equal settings

{case.layers} layers, {case.width} wide, vocabulary {case.vocabulary:,}, {case.batch_size} packed sequences of \
{case.sequence_length} tokens a step, float32, {case.threads} threads. {same_losses(found, "bare loop", "Trainyard")}

{markdown(HEAD, against(found, "HF Trainer"))}

`of it`: of HF Trainer's. Trainyard reaches {found["Trainyard"].speed / found["bare loop"].speed:.3f} of the bare \
loop's speed (target: 0.98)."""
