import json
import os
import random

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import pytest


@pytest.fixture(scope="session")
def material(tmp_path_factory):
    """Something to train on: data.jsonl (documents of many lengths), model/ (without weights), run.yaml."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GPT2Config, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("material")
    words = "the ship sails over a calm sea and nobody on board knows where it will land".split()  # noqa: SIM905
    chance = random.Random(7)
    texts = [" ".join(chance.choices(words, k=chance.choice((1, 3, 9, 30, 90)))) + "." for _ in range(120)]
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=300, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder / "model")
    GPT2Config(
        vocab_size=tokenizer.get_vocab_size(),
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    ).save_pretrained(folder / "model")
    (folder / "run.yaml").write_text(
        f"""\
run: test
model: {folder}/model
dataset: {folder}/data.jsonl
sequence_length: 32
batch_size: 7
balance: even
micro_batch_size: 2
steps: 12
lr: 0.01
warmup_steps: 3
grad_clip: 0.5
weight_decay: 0.1
checkpoint_every: 4
threads: 1
device: cpu
timeout_seconds: 30
"""
    )
    return folder


@pytest.fixture(scope="session")
def whole(material, tmp_path_factory):
    """The losses of one process that nothing interrupted."""
    import ranks

    return ranks.run(tmp_path_factory.mktemp("whole"), 1, material / "run.yaml")
