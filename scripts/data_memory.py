"""Whether memory grows with the data: trains on a JSONL of 10 MB and of 1 GB, each in a process of its own.

    nice .venv/bin/python scripts/data_memory.py [MEGABYTES …]

Prints for each size the peak of memory that is the process's own, after the tokenising and after some steps. Needs free
disk space of three times the data in the directory for temporary files.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEPS = 100


def write_data(path: Path, megabytes: int) -> None:
    """A JSONL of texts of many lengths, in words that come as often as words do."""
    chance = random.Random(1)
    words = [
        "".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.randint(2, 9))) for _ in range(5000)
    ]
    weights = [1 / (n + 1) for n in range(len(words))]
    lines = [
        json.dumps(
            {"text": " ".join(chance.choices(words, weights, k=int(chance.lognormvariate(4.5, 1)) + 1))}
        )
        for _ in range(2000)
    ]
    left = megabytes * 1_000_000
    with path.open("w") as file:
        while left > 0:
            left -= file.write(chance.choice(lines) + "\n")


def peak(path: str, cache: str, steps: int, overlong: str) -> None:
    """Tokenise and train in this process; prints its peaks in MB: {"tokenised": …, "trained": …, "seconds": …}.

    Without the pages of mapped files that happen to be in memory, which the kernel takes back whenever it wants.
    """
    import torch

    sys.path.insert(0, str(ROOT))
    from trainer.config import from_mapping
    from trainer.data import index, pack, read, tokenizer
    from trainer.model.loss import TokenLoss

    seen = [0.0]

    def watch() -> None:
        while True:
            found = re.search(r"RssAnon:\s*(\d+) kB", Path("/proc/self/status").read_text())
            seen[0] = max(seen[0], int(found[1]) / 1000)
            time.sleep(0.005)

    threading.Thread(target=watch, daemon=True).start()
    torch.set_num_threads(1)
    config = from_mapping({"dataset": path, "vocab_size": 2048, "sequence_length": 128, "overlong": overlong})
    words = from_mapping({"dataset": path, "vocab_size": 2048, "max_samples": 2000})
    begin = time.time()
    tokens = tokenizer.wrap(tokenizer.train(words))
    packed, _ = pack.prepare(config, read.digests(config), tokens, Path(cache))
    seconds, tokenised = time.time() - begin, seen[0]

    from transformers import AutoModelForCausalLM, GPT2Config

    shape = {"n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 2}
    model = TokenLoss(AutoModelForCausalLM.from_config(GPT2Config(vocab_size=2048, **shape)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    order = index.Index(0, packed.sizes)
    for step in range(steps):
        batch = order.batch(16 * step, 16)
        arrays = (
            torch.stack([torch.from_numpy(one) for one in part])
            for part in zip(*(packed[k] for k in batch), strict=True)
        )
        (model(*arrays) / packed.valid[batch].sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    facts = {"tokenised": tokenised, "trained": seen[0], "seconds": seconds, "sequences": len(packed)}
    print(json.dumps(facts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("megabytes", type=int, nargs="*", default=[10, 1000])
    parser.add_argument("--overlong", default="split", choices=("split", "cut"))
    parser.add_argument("--peak", nargs=2, metavar=("FILE", "CACHE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        peak(*options.peak, STEPS, options.overlong)
        return
    with tempfile.TemporaryDirectory() as folder:
        for megabytes in options.megabytes:
            path = Path(folder, f"{megabytes}.jsonl")
            write_data(path, megabytes)
            command = [
                sys.executable,
                __file__,
                "--overlong",
                options.overlong,
                "--peak",
                str(path),
                f"{folder}/cache",
            ]
            env = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
            done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
            facts = json.loads(done.stdout.splitlines()[-1])
            path.unlink()
            print(
                f"{megabytes:,} MB of JSONL: {facts['sequences']:,} sequences; peak {facts['tokenised']:.0f} MB when "
                f"tokenised (in {facts['seconds']:.0f} s), {facts['trained']:.0f} MB after {STEPS} steps",
                flush=True,
            )


if __name__ == "__main__":
    main()
