"""Sets of data for the tests of what reads, tokenises and packs them."""

import itertools
import json

import numpy as np

from trainer.data import pack, read, tokenizer


def sampled(config):
    return [sample for one in read.everything(config) for sample in read.samples(one, config)]


def pairs(config):
    return [(sample.text, sample.ends) for sample in sampled(config)]


def prepared(config, folder):
    """(training set, held-out set) with a tokenizer trained on it."""
    tokens = tokenizer.wrap(tokenizer.train(config))
    return pack.prepare(config, read.digests(config), tokens, folder)


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def spans(positions):
    starts = [*np.flatnonzero(positions == 0).tolist(), len(positions)]
    return list(itertools.pairwise(starts))
