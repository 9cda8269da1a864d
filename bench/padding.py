"""Records of many lengths: packing against padding."""

from bench.measure import HEAD, Case, against, markdown, ours, peer, prepared, rounds

CASE = Case("records", vocabulary=2048, batch_size=8, sequence_length=512, steps=18, untimed=3)
QUICK = Case("records", vocabulary=2048, batch_size=4, sequence_length=64, steps=4, untimed=1)


def table(quick: bool) -> str:
    case = QUICK if quick else CASE
    with prepared(case) as folder:
        found = rounds(
            {
                "HF Trainer, padding": lambda: peer("hf", folder),
                "Trainyard": lambda: ours(case, folder),
                "TRL SFTTrainer, defaults (padding)": lambda: peer("sft", folder),
                "TRL SFTTrainer, packing": lambda: peer("sft-packed", folder),
            },
            1 if quick else 3,
        )
    return f"""\
### Records of many lengths

The paragraphs of the text that ships with the trainer (Jane Austen), {case.batch_size} records or packed sequences of \
at most {case.sequence_length} tokens a step; the model as above. Tokens are those with a loss, not padding.

{markdown(HEAD, against(found, "HF Trainer, padding"))}

`of it`: of HF Trainer's."""
