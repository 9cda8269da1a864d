"""A vocabulary of 64,000: what holding all logits costs."""

from bench.measure import ALIKE, HEAD, Case, Options, against, markdown, rounds, same_losses

CASE = Case("text", vocabulary=64_000, batch_size=8, sequence_length=256, steps=9, untimed=2)
QUICK = Case("text", vocabulary=64_000, batch_size=2, sequence_length=128, steps=3, untimed=1)
ROUNDS = 3


def table(options: Options) -> str:
    case = options.fitted(CASE, QUICK)
    found = rounds(case, ALIKE, options.rounds(ROUNDS))
    return f"""\
### A vocabulary of 64,000

The model as above but for the vocabulary, {case.batch_size} packed sequences of {case.sequence_length} tokens a step. \
{same_losses(found, "bare loop", "Trainyard")}

{markdown(HEAD, against(found, "HF Trainer"))}

`of it`: of HF Trainer's. The peak is the whole process's, code and the checkpoint at the end included."""
