"""Records of many lengths: packing against padding."""

from bench.measure import HEAD, Case, Options, against, markdown, rounds

CASE = Case("records", vocabulary=2048, batch_size=8, sequence_length=512, steps=18, untimed=3)
QUICK = Case("records", vocabulary=2048, batch_size=4, sequence_length=64, steps=4, untimed=1)
ROUNDS = 3
CONTENDERS = {
    "HF Trainer, padding": "hf",
    "Trainyard": "ours",
    "TRL SFTTrainer, defaults (padding)": "sft",
    "TRL SFTTrainer, packing": "sft-packed",
}


def table(options: Options) -> str:
    case = options.fitted(CASE, QUICK)
    found = rounds(case, CONTENDERS, options.rounds(ROUNDS))
    return f"""\
### Records of many lengths

The paragraphs of the text that ships with the trainer (Jane Austen), {case.batch_size} records or packed sequences of \
at most {case.sequence_length} tokens a step; the model as above. Tokens are those with a loss, not padding.

{markdown(HEAD, against(found, "HF Trainer, padding"))}

`of it`: of HF Trainer's."""
