"""The tokenizer of `model: tiny`: byte-level BPE, trained on the run's own data."""

from collections.abc import Iterator

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
    tokenizer.train_from_iterator(_texts(config), trainer)
    return tokenizer.to_str()


def _texts(config: Config) -> Iterator[str]:
    """The beginning of every set, ENOUGH characters in all."""
    sets = read.training(config)
    for dataset in sets:
        left = ENOUGH // len(sets)
        for sample in read.samples(dataset, config):
            left -= len(sample.words)
            if left < 0:
                break
            yield sample.words


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
