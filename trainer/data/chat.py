"""Exchanges to text by the tokenizer's chat template, and which of the text is the answers'.

Where a template marks the answers ({% generation %}), the marks hold. Elsewhere the template is rendered up to each
answer, and to its end: what both renderings and the whole one agree on is exact. Where they do not agree, the record is
refused: a guess would train on the wrong tokens.
"""

import datetime
import itertools
import json
import re

from trainer.data.records import Sample
from trainer.errors import BadInput

# What instruction records are rendered with where the tokenizer has no template. It goes with the trained model.
INSTRUCTION_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] + eos_token }}"
    "{% else %}{{ '### Instruction:\\n' + message['content'] + '\\n\\n### Response:\\n' }}{% endif %}"
    "{% endfor %}"
)
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
THOUGHTS = (
    "reasoning_content",
    "reasoning",
    "thinking",
)  # an answer's thoughts; transformers takes one for another
MORE = "\ue000"  # a private character, put behind an answer to see where it ends
MARK = re.compile(f"{MORE}([0-9]+){MORE}")
# Some templates print today's date; the data must be the same on all hosts and days.
TODAY = datetime.date(2024, 7, 26)
FIXED = {"date_string": "26 Jul 2024"}

Span = tuple[int, int]


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

    def __call__(self, sample: Sample) -> tuple[str, list[Span]]:
        """The whole text, and in it the answers with their end-of-turn tokens, in characters. Raises BadInput.

        The end-of-text token follows where the template itself ends with none.
        """
        template = self.tokenizer.get_chat_template(tools=sample.tools)
        _explained(sample, lambda: _fix_today(template))
        sample, text = self._taken(sample)
        if self.answers and MARKED.search(template):
            text, spans = self._marked(sample)
        else:
            # One that nothing asks for, a greeting, is read; templates refuse to render what is before it.
            asked = next((n for n, one in enumerate(sample.messages) if one["role"] == "user"), 0)
            wanted = [n for n, one in enumerate(sample.messages) if n > asked and one["role"] == "assistant"]
            spans = [self._answer(sample, text, n) for n in wanted] if self.answers else []
        bare = text.rstrip()
        if not bare.endswith(self.ends):
            text = bare + self.tokenizer.eos_token
            if spans and spans[-1][1] >= len(bare):
                spans[-1] = (spans[-1][0], len(text))
        return text, spans

    def _taken(self, sample: Sample) -> tuple[Sample, str]:
        """The sample as the template takes it, and the whole text; raises BadInput where that lacks what was said.

        Most templates write a call's arguments out as JSON; some want them as OpenAI's API has them.
        """
        text, fault = self._looked_at(sample)
        calls = [call for message in sample.messages for call in _calls(message)]
        if fault or any(call["arguments"] and str(call["arguments"]) in text for call in calls):
            other = sample._replace(messages=[_as_openai(one) for one in sample.messages])
            told, wrong = self._looked_at(other) if calls else ("", fault)
            # Where the template makes JSON of it, that of a text is another one.
            if not wrong and all(_json(call["arguments"]) in told for call in calls):
                return other, told
        if fault:
            raise fault
        return sample, text

    def _looked_at(self, sample: Sample) -> tuple[str, BadInput | None]:
        """The whole text, and what is wrong with it."""
        messages = sample.messages
        try:
            text = self._rendered(sample, messages)
            there = self._there(sample)

            def stands(n: int, changed: dict) -> bool:
                """Whether another message in the place of the `n`th makes another text."""
                return self._rendered(sample, [*messages[:n], changed, *messages[n + 1 :]]) != text

            for n, one in enumerate(messages):
                for call in _calls(one):
                    if not stands(n, _with_more(one, call, "name")):
                        return text, _left_out(sample, n, f"the call of {call['name']}")
                    if call["arguments"] and not stands(n, _with_more(one, call, "arguments")):
                        return text, _left_out(sample, n, f"the arguments of the call of {call['name']}")
                looks = n not in there and _is_looked_for(one)
                if looks and not stands(n, {**one, "content": one["content"].strip() + MORE}):
                    return text, _left_out(sample, n, f"what the role {one['role']} says")
                # Those of earlier answers templates leave out on purpose, as they do when the model is asked.
                thoughts = {name: one[name] + MORE for name in THOUGHTS if isinstance(one.get(name), str)}
                looks = one is messages[-1] and any(one[name].strip() for name in thoughts)
                if looks and not stands(n, {**one, **thoughts}):
                    return text, _left_out(sample, n, f"the answer's {' and '.join(thoughts)}")
        except BadInput as fault:
            return "", fault
        return text, None

    def _there(self, sample: Sample) -> set[int]:
        """Which messages say something that the template plainly writes out; others' it may have in another form.

        By a mark of its own in each, of which one rendering tells: the words themselves may stand in another message,
        or in what the template adds.
        """
        marked = [
            {**one, "content": f"{one['content'].strip()}{MORE}{n}{MORE}"} if _is_looked_for(one) else one
            for n, one in enumerate(sample.messages)
        ]
        return {int(n) for n in MARK.findall(self._rendered(sample, marked))}

    def _answer(self, sample: Sample, text: str, n: int) -> Span:
        """Where message `n`, an answer, stands in `text`, the whole exchange."""
        messages = sample.messages
        before = self._rendered(sample, messages[:n], add_generation_prompt=True)
        if not text.startswith(before):
            raise _unclear(sample, n, "what it renders before the answer is not how the whole begins")
        upto = self._rendered(sample, messages[: n + 1])
        if text.startswith(upto):
            end = len(upto.rstrip())
        else:
            # Templates that leave out an earlier answer's thoughts: compare what follows the answer's own text.
            more = {**messages[n], "content": messages[n]["content"] + MORE}
            tail = _common_end(upto, self._rendered(sample, [*messages[:n], more])).rstrip()
            longer = self._rendered(sample, [*messages[:n], more, *messages[n + 1 :]])
            follows = _common_end(text, longer)
            if not follows.startswith(tail):
                raise _unclear(
                    sample, n, "what it renders after the answer depends on the messages that follow"
                )
            end = len(text) - len(follows) + len(tail)
        if end < len(before):
            raise _unclear(sample, n, "it does not render the answer")
        return len(before), end

    def _marked(self, sample: Sample) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        def rendering():
            return render_jinja_template(
                conversations=[sample.messages],
                tools=sample.tools,
                chat_template=self.tokenizer.get_chat_template(tools=sample.tools),
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
                **FIXED,
            )

        (text,), (spans,) = _explained(sample, rendering)
        return text, [(begin, end) for begin, end in spans]

    def _rendered(self, sample: Sample, messages: list[dict], **options) -> str:
        options = {"tools": sample.tools, "tokenize": False, **FIXED, **options}
        return _explained(sample, lambda: self.tokenizer.apply_chat_template(messages, **options))


def _is_looked_for(message: dict) -> bool:
    """Whether what the message says is looked for; of a plain answer that is gone, `_answer` finds no place."""
    return bool(message["content"].strip()) and (message["role"] != "assistant" or bool(_calls(message)))


def _calls(message: dict) -> list[dict]:
    """A message's calls of tools, each with its name and its arguments (records.py)."""
    return [_inner(one) for one in message.get("tool_calls") or []]


def _inner(call: dict) -> dict:
    return call["function"] if isinstance(call.get("function"), dict) else call


def _json(arguments) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _changed(message: dict, change) -> dict:
    """The message with `change(call)`, a dictionary of other values, in each of its calls."""

    def changed(call):
        other = {**_inner(call), **change(_inner(call))}
        return other if _inner(call) is call else {**call, "function": other}

    return {**message, "tool_calls": [changed(one) for one in message["tool_calls"]]}


def _with_more(message: dict, call: dict, what: str) -> dict:
    """The message with another `what`, name or arguments, in that call."""
    found = call[what]
    other = found + MORE if isinstance(found, str) else {**found, MORE: MORE}
    return _changed(message, lambda one: {what: other} if one is call else {})


def _as_openai(message: dict) -> dict:
    """The message as OpenAI's API has it, with its calls' arguments as a text of JSON."""
    if not _calls(message):
        return message
    return _changed(message, lambda one: {"arguments": _json(one["arguments"])})


def _left_out(sample: Sample, n: int, what: str) -> BadInput:
    return BadInput(
        f"{sample.place}: messages[{n}]: the model's chat template leaves out {what}: answers would be trained on "
        "without it. Take a model whose template has it, put one that does into the model's directory as "
        "chat_template.jinja, or leave such records away"
    )


def _fix_today(template: str) -> None:
    """Have the template's own clock stand, in this process: what it is passed is no function any more when it runs."""
    from transformers.utils.chat_template_utils import (
        _compile_jinja_template,
    )  # its cache; nothing public reaches it

    _compile_jinja_template(template).globals["strftime_now"] = TODAY.strftime


def _explained(sample: Sample, rendering):
    """`rendering()`; whatever a template may raise becomes one message."""
    try:
        return rendering()
    except MemoryError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        raise BadInput(f"{sample.place}: the model's chat template refuses these messages: {text}") from None


def _unclear(sample: Sample, n: int, why: str) -> BadInput:
    return BadInput(
        f"{sample.place}: messages[{n}]: the chat template does not tell which tokens are the answer's: {why}. Set "
        "loss_on to all, or mark the answers in the template: {% generation %}…{% endgeneration %}"
    )


def _common_end(a: str, b: str) -> str:
    pairs = zip(reversed(a), reversed(b), strict=False)
    length = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return a[len(a) - length :]
