"""What is made of exchanges by chat templates of others: chat_templates.py DIRECTORY [NAME], of files *.jinja.

llama.cpp (models/templates) and TRL (trl/chat_templates) keep those of well-known models. For each and each kind of
exchange: the answers that `loss_on: answers` would learn, or why the record is refused.
"""

import re
import sys
from collections import Counter
from pathlib import Path

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.data.chat import Renderer
from trainer.data.records import Sample
from trainer.errors import BadInput

SPECIAL = re.compile(r"<[|\uff5c][^<>\s{}'\"]+?[|\uff5c]>|<(?:start|end)_of_turn>|\[/?INST\]|<turn\|>|<\|turn>")
THOUGHTS = "<think>\nLet me look.\n</think>\n\n"
ASKED, AGAIN = {"role": "user", "content": "Where is the cat?"}, {"role": "user", "content": "And the dog?"}
FOUND = {"type": "function", "function": {"name": "find", "arguments": {"what": "cat"}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Finds things.",
        "parameters": {"type": "object", "properties": {"what": {"type": "string", "description": "what"}}},
    },
}


def answer(content: str, **more) -> dict:
    return {"role": "assistant", "content": content, **more}


EXCHANGES = {
    "plain": [ASKED, answer("On the mat.")],
    "system": [{"role": "system", "content": "Be brief."}, ASKED, answer("On the mat.")],
    "two turns": [ASKED, answer("On the mat."), AGAIN, answer("Under it.")],
    "thoughts": [ASKED, answer(f"{THOUGHTS}On the mat."), AGAIN, answer(f"{THOUGHTS}Under it.")],
    "in a field": [ASKED, answer("On the mat.", reasoning_content="Let me look.")],
    "a tool": [
        ASKED,
        answer("", tool_calls=[FOUND]),
        {"role": "tool", "content": "mat"},
        answer("On the mat."),
    ],
}


def tokenizer_for(template: str) -> PreTrainedTokenizerFast:
    """One that knows the template's special tokens."""
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), bos_token="<|bos|>", eos_token="<|eos|>"
    )
    made.add_special_tokens({"additional_special_tokens": sorted(set(SPECIAL.findall(template)))})
    made.chat_template = template
    return made


def main(directory: str, wanted: str = "") -> None:
    learnt = Counter()
    paths = sorted(path for path in Path(directory).glob("*.jinja") if wanted in path.name)
    for path in paths:
        render = Renderer(tokenizer_for(path.read_text(encoding="utf-8")), True)
        for kind, messages in EXCHANGES.items():
            sample = Sample(path, 1, messages=messages, tools=[TOOL] if kind == "a tool" else None)
            try:
                text, spans = render(sample)
                learnt[kind] += 1
                print(f"{path.stem}, {kind}: {[text[begin:end] for begin, end in spans]}")
            except BadInput as refused:
                print(f"{path.stem}, {kind}: refused: {str(refused).partition(': ')[2]}")
    print(f"of {len(paths)} templates: {', '.join(f'{kind} {learnt[kind]}' for kind in EXCHANGES)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
