"""The tokenizer of `model: tiny`: byte-level BPE, trained on the run's own data."""

import itertools

from trainer.config import Config
from trainer.data import read

END_OF_TEXT = "<|endoftext|>"
ENOUGH = 64 << 20  # characters to learn a vocabulary from; more hardly changes it


def train(config: Config) -> str:
    """A byte-level BPE tokenizer of at most `vocab_size` tokens, as tokenizer.json's text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    seen = itertools.accumulate(
        ((len(text), text) for text, _ in read.samples(config)), lambda a, b: (a[0] + b[0], b[1])
    )
    tokenizer.train_from_iterator(
        (text for _, text in itertools.takewhile(lambda s: s[0] <= ENOUGH, seen)), trainer
    )
    return tokenizer.to_str()


def wrap(text: str):
    """A transformers tokenizer from tokenizer.json's text."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(text),
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
    )
