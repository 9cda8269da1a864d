"""Exchanges to text by the tokenizer's chat template, and which of the text is the answers'.

What a template makes of one exchange is exchange.py's. Here is in which form it gets the exchange: templates differ in
where they look for what an answer's model has thought.
"""

import functools
import itertools
import re
from pathlib import Path
from typing import NamedTuple

from trainer.data.exchange import (
    FIXED,
    MORE,
    OPENED,
    Exchange,
    Span,
    as_read,
    explained,
    fix_today,
    reads_parts,
)
from trainer.data.records import THOUGHTS, Sample
from trainer.errors import BadInput

# What instruction records are rendered with where the tokenizer has no template. It goes with the trained model.
INSTRUCTION_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] + eos_token }}"
    "{% elif message['role'] == 'system' %}{{ message['content'] + '\\n\\n' }}"
    "{% else %}{{ '### Instruction:\\n' + message['content'] + '\\n\\n### Response:\\n' }}{% endif %}"
    "{% endfor %}"
)
# An answer's thoughts in its content, as models write them: what opens them may have been the prompt's.
IN_CONTENT = re.compile(r"\s*+(<think>\s*+)?(.*?)</think>", re.DOTALL)
EMPTY = re.compile(r"\s*+<think>\s*+</think>\s*+")
HIDDEN = {
    "<think>": f"{MORE}think{MORE}",
    "</think>": f"{MORE}/think{MORE}",
}  # where a template is not to see them
ASKED_TO_THINK = {"enable_thinking": True, "thinking": True}  # by what templates call it


def settle_template(tokenizer, kinds: set[str], model: str) -> None:
    """Give the tokenizer the template that the sets' records need; raises BadInput where it must have its own."""
    if tokenizer.chat_template:
        return
    if "chat" in kinds:
        raise BadInput(
            f"model: {model}: its tokenizer has no chat template, and the data is chats; take the chat or instruct "
            "version of the model, or put the template into its directory as chat_template.jinja"
        )
    if "instruction" in kinds:
        # The model knows no text without the token that its tokenizer puts before every plain one.
        tokenizer.chat_template = "{{ bos_token }}" * len(first_token(tokenizer)) + INSTRUCTION_TEMPLATE


def end_of_turn(tokenizer) -> int | None:
    """The special token by which the tokenizer's template ends an answer; None where it does not end one so."""
    if not tokenizer.chat_template:
        return None
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MORE}]
    messages = as_read(tokenizer, messages)
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **FIXED)
    except Exception:  # whatever a template may raise; who renders with it will say so
        return None
    _, answer, follows = text.rpartition(MORE)
    ids = tokenizer(follows.lstrip(), add_special_tokens=False).input_ids if answer else []
    token = tokenizer.added_tokens_decoder.get(ids[0]) if ids else None
    return ids[0] if token and token.special else None


def first_token(tokenizer) -> list[int]:
    """The token that the tokenizer itself begins every text with, as [] or [its id]."""
    ids = tokenizer.backend_tokenizer.encode("").ids
    return [one for one in ids[:1] if one == tokenizer.bos_token_id]


class Renderer:
    """Exchanges to text by `tokenizer`'s template. answers: find the answers, too."""

    def __init__(self, tokenizer, answers: bool):
        self.tokenizer, self.answers = tokenizer, answers
        self.ends = tuple(one.content for one in tokenizer.added_tokens_decoder.values() if one.special)
        self.in_parts = reads_parts(tokenizer)
        self._ways = functools.cache(self._ways_of_thoughts)

    def __call__(self, sample: Sample) -> tuple[str, list[Span]]:
        """The whole text, and in it the answers with their end-of-turn tokens, in characters. Raises BadInput.

        The end-of-text token follows where the template itself ends with none.
        """
        template = self.tokenizer.get_chat_template(tools=sample.tools)
        explained(sample, lambda: fix_today(template))
        text, spans = self._as_a_template_has_it(sample, template)
        bare = text.rstrip()
        if not bare.endswith(self.ends):
            text = bare + self.tokenizer.eos_token
            if spans and spans[-1][1] >= len(bare):
                spans[-1] = (spans[-1][0], len(text))
        return text, spans

    def _exchange(self, sample: Sample, options: dict) -> Exchange:
        return Exchange(self.tokenizer, self.ends, sample, options, self.in_parts)

    def _as_a_template_has_it(self, sample: Sample, template: str) -> tuple[str, list[Span]]:
        """The whole text and its answers, in the first way in which nothing is amiss."""
        plain = self._exchange(sample, {})
        found = next(filter(None, (_thoughts(one, plain) for one in sample.messages)), None)
        ways = self._ways(template, found.of_content) if found else ((_as_it_comes, {}), (_without_empty, {}))
        faults = []
        for way, options in ways:
            try:
                exchange = self._by(way, sample, options)
                if exchange is not None:
                    return exchange.text, exchange.answers() if self.answers else []
            except BadInput as fault:
                faults.append(fault)
        if faults:
            raise faults[0]
        exchange = self._by(
            _as_it_comes, sample, {}
        )  # no way is one for these messages, though it was for others
        return exchange.text, exchange.answers() if self.answers else []

    def _ways_of_thoughts(self, template: str, of_content: bool) -> list[tuple]:
        """How `template` may be given what an answer's model has thought, and with which options; the best one first.

        of_content: thoughts that come in the content. These are the ways in which nothing of such an answer is left
        out, and in which it is what follows the prompt. Where there are none, they are given as they come, and a record
        that loses them so will be refused.
        """
        answer = {"role": "assistant", "content": "It is.", THOUGHTS[0]: "Is it?"}
        if of_content:
            answer = {"role": "assistant", "content": "<think>\nIs it?\n</think>\n\nIt is."}
        probe = Sample(Path(), 0, messages=[{"role": "user", "content": "Is it?"}, answer])
        tried = [
            *itertools.product((_in_a_field, _after_the_prompt), ({}, ASKED_TO_THINK)),
            (_as_it_comes, {}),
            *itertools.product((_unseen,), ({}, ASKED_TO_THINK)),
        ]
        made = [(self._tried(way, probe, options), way, options) for way, options in tried]
        good = [(way, options) for text, way, options in made if text is not None]
        texts = ["".join(text.split()) for text, _, _ in made if text is not None]
        if (_as_it_comes, {}) in good and texts[good.index((_as_it_comes, {}))] == texts[0]:
            # Where a template has both, an answer's own spaces and lines are as its model has written them.
            good.sort(key=lambda one: one[0] is not _as_it_comes)
        return good or [(_as_it_comes, {})]

    def _tried(self, way, probe: Sample, options: dict) -> str | None:
        """What becomes of the probe this way; None where that is nothing to be trained on."""
        try:
            exchange = self._by(way, probe, options)
            if exchange is not None:
                exchange.answers()
        except BadInput:
            return None
        return exchange and exchange.text

    def _by(self, way, sample: Sample, options: dict) -> Exchange | None:
        exchange = way(self._exchange(sample, options))
        return exchange and exchange.as_taken()


class _Thoughts(NamedTuple):
    """What an answer's model has thought, and the rest of its content."""

    thoughts: str
    rest: str
    of_content: bool


def _thoughts(message: dict, exchange: Exchange) -> _Thoughts | None:
    """Of an answer in that exchange, if it has some. What nothing opens are thoughts where the prompt opens them."""
    if message["role"] != "assistant":
        return None
    for name in THOUGHTS:
        if isinstance(message.get(name), str) and message[name].strip():
            return _Thoughts(message[name], message["content"], False)
    found = IN_CONTENT.match(message["content"]) if "</think>" in message["content"] else None
    if found is None or not found[2].strip() or not (found[1] or exchange.opens_thoughts):
        return None
    return _Thoughts(found[2], message["content"][found.end() :], True)


def _as_it_comes(exchange: Exchange) -> Exchange:
    return exchange


def _without_empty(exchange: Exchange) -> Exchange | None:
    """Where nothing was thought, and an empty pair of tags says so, which the template may have in its own place."""
    told = [
        {**one, "content": EMPTY.sub("", one["content"], count=1)}
        if one["role"] == "assistant" and EMPTY.match(one["content"])
        else one
        for one in exchange.messages
    ]
    return None if told == exchange.messages else exchange.of(told)


def _in_a_field(exchange: Exchange) -> Exchange:
    """Each answer's thoughts in the field that templates look for."""

    def told(message):
        found = _thoughts(message, exchange)
        if found is None or not found.of_content:
            return message
        return {**message, THOUGHTS[0]: found.thoughts.strip(), "content": found.rest.strip("\n")}

    return exchange.of([told(one) for one in exchange.messages])


def _after_the_prompt(exchange: Exchange, hidden: bool = False) -> Exchange | None:
    """The last answer's thoughts in its content, opened as the prompt has opened them; None where it does not."""
    last = exchange.messages[-1]
    found = _thoughts(last, exchange)
    if found is None:
        return exchange
    try:
        before = exchange.before(len(exchange.messages) - 1)
    except BadInput:
        exchange = exchange.as_openai()
        before = exchange.before(len(exchange.messages) - 1)
    opened = OPENED.search(before)
    if opened is None:
        return None
    content = f"{opened[0]}{found.thoughts}</think>{found.rest}"
    if not found.of_content:
        content = f"{opened[0]}{found.thoughts.strip()}\n</think>\n\n{found.rest}"
    if hidden:
        for tag, other in HIDDEN.items():
            content = content.replace(tag, other)
    plain = {name: last[name] for name in last if name not in THOUGHTS}
    made = exchange.of([*exchange.messages[:-1], {**plain, "content": content}])
    follows = made.text.removeprefix(before)
    return made if follows != made.text and follows.startswith(found.thoughts.strip()) else None


def _unseen(exchange: Exchange) -> Exchange | None:
    """The same where the template would take them away, as it does from answers that the model is to remember."""
    return _after_the_prompt(exchange, hidden=True)
