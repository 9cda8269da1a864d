"""What a chat template makes of one exchange, that nothing said is left out of it, and which of it is the answers'.

Where a template marks the answers ({% generation %}), the marks hold. Elsewhere the template is rendered up to each
answer, and to its end: what both renderings and the whole one agree on is exact. Where they do not agree on more than
thoughts, which most templates show at the end alone, the record is refused: a guess would train on the wrong tokens.
"""

import datetime
import functools
import itertools
import json
import re

from trainer.data.records import LEARNT, THOUGHTS, Sample
from trainer.errors import BadInput

MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
MORE = "\ue000"  # a private character, put into a message to see where it stands
MARK = re.compile(f"{MORE}([0-9]+){MORE}")
UNSEEN = re.compile(f"{MORE}(/?think){MORE}")  # tags that a template was not to see
OPENED = re.compile(r"<think>\s*\Z")
CLOSED = re.compile(rf"</(?:\w+:)?think>|{MORE}/think{MORE}")
OPENING = re.compile(rf"\s*+(?:<(?:\w+:)?think>|{MORE}think{MORE})")
OVER = re.compile(r"</(?:\w+:)?think>\s*\Z")
# What well-known templates have of thoughts: whole ones, what opens them at the end, what closes none.
OF_THOUGHTS = re.compile(
    r"<(?:\w+:)?think>(?:.*?</(?:\w+:)?think>|\s*\Z)|</(?:\w+:)?think>"
    r"|<\|channel>thought(?:.*?<channel\|>|\s*\Z)"
    r"|<\|START_THINKING\|>(?:.*?<\|END_THINKING\|>|\s*\Z)"
    r"|\[THINK\](?:.*?\[/THINK\]|\s*\Z)",
    re.DOTALL,
)
PART_OF_A_TAG = re.compile(r"[<\[][^<>\[\]\s]*\Z")
# Some templates print today's date; the data must be the same on all hosts and days.
TODAY = datetime.date(2024, 7, 26)
FIXED = {"date_string": "26 Jul 2024"}

Span = tuple[int, int]


class Exchange:
    """One record in one of the forms in which templates take it.

    ends: the tokenizer's special tokens. options: what the template is passed beside. in_parts: by `reads_parts`.
    Methods raise BadInput.
    """

    def __init__(self, tokenizer, ends: tuple[str, ...], sample: Sample, options: dict, in_parts: bool):
        self.tokenizer, self.ends, self.sample, self.options = tokenizer, ends, sample, options
        self.messages, self.in_parts = sample.messages, in_parts

    def of(self, messages: list[dict]) -> "Exchange":
        """The same with other messages."""
        sample = self.sample._replace(messages=messages)
        return Exchange(self.tokenizer, self.ends, sample, self.options, self.in_parts)

    @functools.cached_property
    def text(self) -> str:
        """The whole."""
        return self._rendered(self.messages)

    def before(self, n: int) -> str:
        """What the model is given when message `n`, an answer, is asked for."""
        return self._rendered(self.messages[:n], add_generation_prompt=True)

    @functools.cached_property
    def opens_thoughts(self) -> bool:
        """Whether a prompt ends so that the answer begins within thoughts."""
        try:
            return bool(OPENED.search(self.before(len(self.messages) - 1)))
        except BadInput:
            return False

    def as_openai(self) -> "Exchange":
        return self.of([_as_openai(one) for one in self.messages])

    def as_taken(self) -> "Exchange":
        """This one as the template takes it. Raises BadInput where nothing has all that was said.

        Most templates write a call's arguments out as JSON; some want them as OpenAI's API has them. Some read a
        call's `function` alone, which ShareGPT's calls have not around them.
        """
        fault = self._fault()
        calls = [call for message in self.messages for call in _calls(message)]
        if fault or any(call["arguments"] and str(call["arguments"]) in self.text for call in calls):
            other = self.as_openai()
            wrong = other._fault() if calls else fault
            # Where the template makes JSON of it, that of a text is another one.
            if not wrong and all(_json(call["arguments"]) in other.text for call in calls):
                return other
        if fault:
            whole = self.of([_in_functions(one) for one in self.messages])
            if whole.messages != self.messages:
                return whole.as_taken()
            raise fault
        return self

    def answers(self) -> list[Span]:
        """Where in `text` the answers stand, with their end-of-turn tokens."""
        if MARKED.search(self.tokenizer.get_chat_template(tools=self.sample.tools)):
            spans, said = self._marked(), [one for one in self.messages if one["role"] == "assistant"]
            if all(map(_is_learnt, said)):
                return spans
            # The marks do not tell whose they are; where each has an answer's words, in their order, they are plain.
            told = list(zip(spans, said, strict=False))
            plain = all(one["content"].strip() in self.text[begin:end] for (begin, end), one in told)
            if plain and len(spans) == len(said):
                return [span for span, one in told if _is_learnt(one)]
        # One that nothing asks for, a greeting, is read; templates refuse to render what is before it.
        asked = next((n for n, one in enumerate(self.messages) if one["role"] == "user"), 0)
        answers = [n for n, one in enumerate(self.messages) if n > asked and one["role"] == "assistant"]
        wanted = [n for n in answers if _is_learnt(self.messages[n])]
        return [self._answer(n) for n in wanted]

    def _fault(self) -> BadInput | None:
        """What is wrong with the whole text."""
        try:
            there = self._there()
            for n, one in enumerate(self.messages):
                for call in _calls(one):
                    if not self._stands(n, _with_more(one, call, "name")):
                        return self._left_out(n, f"the call of {call['name']}")
                    if call["arguments"] and not self._stands(n, _with_more(one, call, "arguments")):
                        return self._left_out(n, f"the arguments of the call of {call['name']}")
                looks = n not in there and _is_looked_for(one)
                if looks and not self._stands(n, {**one, "content": one["content"].strip() + MORE}):
                    return self._left_out(n, f"what the role {one['role']} says")
            # Those of earlier answers templates leave out on purpose, as they do when the model is asked.
            last = self.messages[-1]
            thoughts = {name: last[name] + MORE for name in THOUGHTS if isinstance(last.get(name), str)}
            looks = any(last[name].strip() for name in thoughts)
            if looks and not self._stands(-1, {**last, **thoughts}):
                return self._left_out(len(self.messages) - 1, f"the answer's {' and '.join(thoughts)}")
            return self._fault_of_thoughts(len(self.messages) - 1)
        except BadInput as fault:
            return fault

    def _fault_of_thoughts(self, n: int) -> BadInput | None:
        """What is wrong with the `n`th message, an answer, if thoughts end in its content, or words say how."""
        content = self.messages[n]["content"]
        closed = CLOSED.search(content) if self.messages[n]["role"] == "assistant" else None
        if closed is None:
            return None
        if not self._stands(n, _with_mark(self.messages[n], closed.start())):
            return self._left_out(n, f"the answer's thoughts, before {closed[0]}")
        begins = 0 if not OPENING.match(content) else closed.end()
        for at in {begins, closed.end()}:
            if not self._stands(n, _with_mark(self.messages[n], at)):
                return self._left_out(n, f"some of the answer's words, for there is {closed[0]} among them")
        begin = _common_length(self.text, self._with(n, _with_mark(self.messages[n], 0)))
        in_field = any(self.messages[n].get(name) for name in THOUGHTS)
        if OVER.search(self.text[:begin]) and not in_field:
            return BadInput(
                f"{self.sample.place}: messages[{n}]: before the answer's thoughts the model's chat template says that "
                f"there are none, and has {closed[0]} among its words then: give them as {THOUGHTS[0]}, or take a "
                "model whose template reads them"
            )
        return None

    def _there(self) -> set[int]:
        """Which messages say something that the template plainly writes out; others' it may have in another form.

        By a mark of its own in each, of which one rendering tells: the words themselves may stand in another message,
        or in what the template adds.
        """
        marked = [
            {**one, "content": f"{one['content'].strip()}{MORE}{n}{MORE}"} if _is_looked_for(one) else one
            for n, one in enumerate(self.messages)
        ]
        return {int(n) for n in MARK.findall(self._rendered(marked))}

    def _stands(self, n: int, changed: dict) -> bool:
        """Whether another message in the place of the `n`th makes another text."""
        return self._with(n, changed) != self.text

    def _with(self, n: int, changed: dict) -> str:
        """The whole with another message in the place of the `n`th."""
        messages = list(self.messages)
        messages[n] = changed
        return self._rendered(messages)

    def _answer(self, n: int) -> Span:
        """Where message `n`, an answer, stands in the whole."""
        before, upto = self.before(n), self._rendered(self.messages[: n + 1])
        is_asked_so = self.text.startswith(before)
        begin = len(before) if is_asked_so else self._begin(n, before)
        end = len(upto.rstrip()) if self.text.startswith(upto) else self._end(n, upto)
        if end < begin:
            raise self._unclear(n, "it does not render the answer")
        if _calls(self.messages[n]) and not is_asked_so:
            # Where it begins another answer for the words that there are none of, that is no part of this one.
            header = before.removeprefix(self._rendered(self.messages[:n]))
            first = next((one for one in self.ends if header.startswith(one)), None)
            if first and first in self.text[begin:end]:
                raise self._unclear(n, "it has the answer's words as another answer")
        return begin, end

    def _begin(self, n: int, before: str) -> int:
        """Where its words begin, if the whole does not begin as the model is asked.

        As templates have it that ask for thoughts, and leave out those of earlier answers.
        """
        message = self.messages[n]
        closed = CLOSED.search(message["content"])
        at = closed.end() if closed else 0
        begins = [_common_length(self.text, self._with(n, _with_mark(message, at)))]
        if _calls(message):  # behind which its words may stand
            begins.append(len(PART_OF_A_TAG.sub("", self.text[: _common_length(self.text, before)])))
        has_thoughts = closed or any(message.get(name) for name in THOUGHTS)
        for begin in begins if n < len(self.messages) - 1 or not has_thoughts else []:
            if _without_thoughts(self.text[:begin]) == _without_thoughts(before):
                return begin
        raise self._unclear(n, "what it renders before the answer is not how the whole begins")

    def _end(self, n: int, upto: str) -> int:
        """Where it ends, if the whole does not go on as it ends for the model that answers.

        As templates have it that leave out an earlier answer's thoughts, or have a token for the end of the last one:
        what follows the answer's own text is compared, and is the answer's as far as it agrees.
        """
        more = _with_mark(self.messages[n], len(self.messages[n]["content"]))
        tail = _common_end(upto, self._rendered([*self.messages[:n], more])).rstrip()
        follows = _common_end(self.text, self._with(n, more))
        agreed = tail
        if not follows.startswith(tail):
            if _calls(self.messages[n]):
                raise self._unclear(n, "what it renders after the answer depends on the messages that follow")
            agreed = self._agreed(tail, follows).rstrip()
        return len(self.text) - len(follows) + len(agreed)

    def _agreed(self, one: str, other: str) -> str:
        """How both begin, up to the end of the first special token; nothing where that is not the same."""
        first = _any_of(self.ends).search(one)
        return one[: first.end()] if first and other.startswith(one[: first.end()]) else ""

    def _marked(self) -> list[Span]:
        from transformers.utils.chat_template_utils import render_jinja_template

        def rendering():
            return render_jinja_template(
                conversations=[in_parts(self.messages) if self.in_parts else self.messages],
                tools=self.sample.tools,
                chat_template=self.tokenizer.get_chat_template(tools=self.sample.tools),
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
                **FIXED,
                **self.options,
            )

        _, (spans,) = explained(self.sample, rendering)
        return [(begin, end) for begin, end in spans]

    def _rendered(self, messages: list[dict], **options) -> str:
        options = {"tools": self.sample.tools, "tokenize": False, **FIXED, **self.options, **options}
        told = in_parts(messages) if self.in_parts else messages
        text = explained(self.sample, lambda: self.tokenizer.apply_chat_template(told, **options))
        return UNSEEN.sub(r"<\1>", text)

    def _left_out(self, n: int, what: str) -> BadInput:
        return BadInput(
            f"{self.sample.place}: messages[{n}]: the model's chat template leaves out {what}: answers would be "
            "trained on without it. Take a model whose template has it, put one that does into the model's directory "
            "as chat_template.jinja, or leave such records away"
        )

    def _unclear(self, n: int, why: str) -> BadInput:
        return BadInput(
            f"{self.sample.place}: messages[{n}]: the chat template does not tell which tokens are the answer's: {why}."
            " Set loss_on to all, or mark the answers in the template: {% generation %}…{% endgeneration %}"
        )


def reads_parts(tokenizer) -> bool:
    """Whether the template reads contents only as lists of parts, as some do of models that see and hear."""
    messages = [{"role": "user", "content": MORE}]

    def reads(told):
        try:
            return MORE in tokenizer.apply_chat_template(told, tokenize=False, **FIXED)
        except Exception:  # whatever a template may raise; who renders with it will say so
            return False

    return not reads(messages) and reads(in_parts(messages))


def as_read(tokenizer, messages: list[dict]) -> list[dict]:
    """The messages as the template reads them."""
    return in_parts(messages) if reads_parts(tokenizer) else messages


def in_parts(messages: list[dict]) -> list[dict]:
    return [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in messages]


def fix_today(template: str) -> None:
    """Have the template's own clock stand, in this process: what it is passed is no function any more when it runs."""
    from transformers.utils.chat_template_utils import (
        _compile_jinja_template,
    )  # its cache; nothing public reaches it

    _compile_jinja_template(template).globals["strftime_now"] = TODAY.strftime


def explained(sample: Sample, rendering):
    """`rendering()`; whatever a template may raise becomes one message."""
    try:
        return rendering()
    except MemoryError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        raise BadInput(f"{sample.place}: the model's chat template refuses these messages: {text}") from None


@functools.cache
def _any_of(tokens: tuple[str, ...]) -> re.Pattern:
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))


def _is_looked_for(message: dict) -> bool:
    """Whether what the message says is looked for; of a plain answer that is gone, `_answer` finds no place."""
    return bool(message["content"].strip()) and (message["role"] != "assistant" or bool(_calls(message)))


def _is_learnt(message: dict) -> bool:
    """Whether its data does not say otherwise: OpenAI's `weight` of 0, ms-swift's `loss`, Axolotl's `train`."""
    is_said = all(message.get(name, 1) for name in LEARNT) and message.get("train") is not False
    return message["role"] != "assistant" or is_said


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


def _with_mark(message: dict, at: int) -> dict:
    """The message with a mark in its content."""
    return {**message, "content": message["content"][:at] + MORE + message["content"][at:]}


def _as_openai(message: dict) -> dict:
    """The message as OpenAI's API has it, with its calls' arguments as a text of JSON."""
    if not _calls(message):
        return message
    return _changed(message, lambda one: {"arguments": _json(one["arguments"])})


def _in_functions(message: dict) -> dict:
    """The message with each of its calls as a `function`."""
    if not _calls(message):
        return message
    calls = [{"function": one} if _inner(one) is one else one for one in message["tool_calls"]]
    return {**message, "tool_calls": calls}


def _without_thoughts(text: str) -> str:
    """Without spaces, too, which go with them."""
    return "".join(OF_THOUGHTS.sub("", text).split())


def _common_end(a: str, b: str) -> str:
    return a[len(a) - _common_length(reversed(a), reversed(b)) :]


def _common_length(a, b) -> int:
    """How many of both are the same from the beginning."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
