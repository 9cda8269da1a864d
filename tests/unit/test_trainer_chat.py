"""Exchanges: the model's template, and a loss on the answers' tokens alone."""

import io
import itertools
import json
import time
import types

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GenerationConfig, PreTrainedTokenizerFast

from trainer.commands import generate
from trainer.config import from_mapping
from trainer.data import chat, exchange, pack, read, tokenizer
from trainer.errors import BadInput, OutOfMemory
from trainer.model import saved

# What chat templates of well-known families do, each in a template of its own.
ENDED = (  # ChatML: a header, an end-of-turn token and a line's end that is not the answer's
    "{% if tools %}<|start|>tools\n{{ tools | tojson }}<|end|>\n{% endif %}"
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}\n<call>{{ call['function'] | tojson }}</call>{% endfor %}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
THOUGHTFUL = (  # only the last answer shows that it has thought
    "{% for m in messages %}<|start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}\n<call>{{ call['function'] | tojson }}</call>{% endfor %}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
TRIMMED = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m['role'] }}<|sep|>\n\n{{ m['content'] | trim }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|sep|>\n\n{% endif %}"
)
ALTERNATING = (  # no header before an answer, and the end-of-text token behind it
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
ENDLESS = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
MARKED = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|end|>{% endif %}\n{% endfor %}"
)
COUNTING = "{{ messages | length }} messages\n" + ENDED
PROMPTING = ENDED.replace("<|start|>assistant\n{% endif %}", "<|start|>assistant\nAnswer: {% endif %}")
# What those of models that think do. What opens their thoughts is the prompt's.
_THINKS = ENDED.replace("<|start|>assistant\n{% endif %}", "<|start|>assistant\n<think>\n{% endif %}")
FORGETFUL = _THINKS.replace(  # thoughts are taken out of every answer
    "{{ m['content'] }}",
    "{{ m['content'].split('</think>')[-1] if m['role'] == 'assistant' else m['content'] }}",
)
LAST = _THINKS.replace(  # thoughts, or none, in the last answer alone, as it comes or of a field
    "{{ m['content'] }}",
    "{% set parts = [m['content']] if m.reasoning_content else m['content'].split('</think>') %}"
    "{% if m['role'] == 'assistant' and loop.last %}"
    "<think>\n{{ (m.reasoning_content or parts[0].split('<think>')[-1] if parts[1:] else m.reasoning_content or '') "
    "| trim }}\n</think>\n\n{{ parts[-1] | trim }}{% elif m['role'] == 'assistant' %}{{ parts[-1] | trim }}"
    "{% else %}{{ m['content'] }}{% endif %}",
)
OF_A_FIELD = ENDED.replace(  # thoughts of a field, between tags of its own; a content is a content
    "{{ m['content'] }}",
    "{% if m.reasoning_content %}<|sep|>{{ m.reasoning_content }}<|sep|>{% endif %}{{ m['content'] }}",
)
ON_REQUEST = OF_A_FIELD.replace("{% if m.reasoning_content %}", "{% if m.reasoning_content and thinking %}")
NOWHERE = FORGETFUL.replace(
    "<|start|>assistant\n<think>\n{% endif %}", "<|start|>assistant\n</think>{% endif %}"
)

TALK = [
    {"role": "user", "content": "Where is the cat?"},
    {"role": "assistant", "content": "On the mat, as ever."},
    {"role": "user", "content": "And the dog, 🐕?"},
    {"role": "assistant", "content": "Ünder the 🪑."},
]
ANSWERS = [TALK[1]["content"], TALK[3]["content"]]


@pytest.fixture(scope="module")
def make_tokenizer(tmp_path_factory):
    """`make_tokenizer(template)`: byte-level, with special tokens as chat models have them."""
    path = tmp_path_factory.mktemp("words") / "a.txt"
    path.write_text("the cat sat on the mat, as ever; where is the dog? assistant user system\n\n" * 9)
    text = tokenizer.train(from_mapping({"dataset": str(path), "vocab_size": 320}))

    def make(template):
        made = tokenizer.wrap(text)
        made.add_special_tokens({"additional_special_tokens": ["<|start|>", "<|end|>", "<|sep|>"]})
        made.chat_template = template
        return made

    return make


def prepared(folder, tokens, records, **settings):
    (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    config = from_mapping(
        {
            "dataset": str(folder / "a.jsonl"),
            "sequence_length": 256,
            "overlong": "refuse",
            "loss_on": "answers",
            **settings,
        }
    )
    packed, _ = pack.prepare(config, read.digests(config), tokens, folder / "cache")
    return packed


def whole_and_learnt(packed, tokens):
    """(the first sequence as text, the runs of tokens in it that are learnt, as texts)."""
    inputs, labels, positions = packed[0]
    end = [*np.flatnonzero(positions == 0)[1:].tolist(), len(inputs)][0]
    runs = itertools.groupby(labels[:end].tolist(), lambda label: label != pack.IGNORE)
    return tokens.decode(inputs[:end]), [tokens.decode(list(run)) for learnt, run in runs if learnt]


@pytest.mark.parametrize(
    ("template", "learnt"),
    [
        (ENDED, [one + "<|end|>" for one in ANSWERS]),
        (THOUGHTFUL, [ANSWERS[0] + "<|end|>", "<think>\n\n</think>\n\n" + ANSWERS[1] + "<|end|>"]),
        (TRIMMED, [one + "<|end|>" for one in ANSWERS]),
        (ALTERNATING, [f" {one}{tokenizer.END_OF_TEXT}" for one in ANSWERS]),
        (ENDLESS, [ANSWERS[0], ANSWERS[1] + tokenizer.END_OF_TEXT]),
        (MARKED, [one + "<|end|>" for one in ANSWERS]),
    ],
    ids=["ended", "thoughtful", "trimmed", "alternating", "endless", "marked"],
)
def test_only_the_answers_are_learnt(tmp_path, make_tokenizer, template, learnt):
    tokens = make_tokenizer(template)
    packed = prepared(tmp_path, tokens, [{"messages": TALK}])
    text, found = whole_and_learnt(packed, tokens)
    assert found == learnt
    rendered = tokens.apply_chat_template(TALK, tokenize=False)
    assert text == (rendered.rstrip() + tokenizer.END_OF_TEXT if template == ENDLESS else rendered)
    assert packed.valid.sum() == (packed[0][1] != pack.IGNORE).sum()
    everything = prepared(tmp_path, tokens, [{"messages": TALK}], loss_on="all")
    assert everything.valid.sum() == everything.token_count - 1


@pytest.mark.parametrize(
    "template", [ENDED, TRIMMED, ENDLESS, MARKED], ids=["ended", "trimmed", "endless", "marked"]
)
def test_a_greeting_that_nothing_asks_for_is_read(tmp_path, make_tokenizer, template):
    """Templates refuse to render an exchange of no message, which is before it; marks tell of themselves."""
    tokens = make_tokenizer(template)
    greeting = {"role": "assistant", "content": "Welcome."}
    packed = prepared(tmp_path, tokens, [{"messages": [greeting, *TALK]}])
    _, found = whole_and_learnt(packed, tokens)
    learnt = [one.removesuffix("<|end|>").removesuffix(tokenizer.END_OF_TEXT) for one in found]
    assert learnt == (["Welcome."] if template == MARKED else []) + ANSWERS


def test_spaces_around_an_answer_do_not_move_it(tmp_path, make_tokenizer):
    """The tokens that begin an answer would merge with the header's line end; the prompt has that one already."""
    talk = [TALK[0], {"role": "assistant", "content": " \n the mat \n\n"}]
    learnt = {ENDED: " \n the mat \n\n<|end|>", TRIMMED: "the mat<|end|>", MARKED: " \n the mat \n\n<|end|>"}
    for template, expected in learnt.items():
        tokens = make_tokenizer(template)
        _, (found,) = whole_and_learnt(prepared(tmp_path, tokens, [{"messages": talk}]), tokens)
        assert found == expected


def test_spaces_within_an_answer_are_learnt_whatever_a_tokenizer_says_of_their_place(
    tmp_path, make_tokenizer
):
    """Some trim: a token of spaces alone would stand nowhere, and an answer's indentation would not be learnt."""
    from tokenizers import processors

    tokens = make_tokenizer(ENDED)
    answer = "if the cat:\n        sat  on    the mat"
    talk = [TALK[0], {"role": "assistant", "content": answer}]
    expected = whole_and_learnt(prepared(tmp_path, tokens, [{"messages": talk}]), tokens)
    assert expected[1] == [answer + "<|end|>"]
    tokens.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    placed = tokens.backend_tokenizer.encode(answer, add_special_tokens=False).offsets
    assert any(begin == end for begin, end in placed)
    assert whole_and_learnt(prepared(tmp_path, tokens, [{"messages": talk}]), tokens) == expected


@pytest.mark.parametrize("template", [ENDED, ENDLESS, ALTERNATING, MARKED])
def test_the_prompt_is_tokenised_as_when_the_model_answers(tmp_path, make_tokenizer, template):
    """`assistant: ` and `cat` would be ` cat` in one token, which no prompt ends in."""
    tokens = make_tokenizer(template)
    talk = [TALK[0], {"role": "assistant", "content": "cat"}]
    inputs, labels, _ = prepared(tmp_path, tokens, [{"messages": talk}])[0]
    first = int(np.flatnonzero(labels != pack.IGNORE)[0]) + 1
    if template != MARKED:  # it has no prompt
        prompt = tokens.apply_chat_template(TALK[:1], tokenize=False, add_generation_prompt=True)
        assert inputs[:first].tolist() == tokens(prompt).input_ids
    assert tokens.decode(inputs[first:]).strip().startswith("cat")


def test_a_tokenizer_that_cannot_be_cut_is_refused(tmp_path):
    """As those that put a space before every text: in parts it would say something else."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    spaced = Tokenizer(models.BPE(unk_token="?"))
    spaced.pre_tokenizer, spaced.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    names = [tokenizer.END_OF_TEXT, "?"]
    words = ["user: assistant: Where is the cat? the cat the cat"]
    spaced.train_from_iterator(
        words, trainers.BpeTrainer(vocab_size=90, special_tokens=names, show_progress=False)
    )
    tokens = tokenizer.wrap(spaced.to_str())
    tokens.chat_template = ENDLESS
    with pytest.raises(BadInput, match=r"a\.jsonl:1: the tokenizer makes one token of a prompt's end"):
        prepared(tmp_path, tokens, [{"messages": [TALK[0], {"role": "assistant", "content": "cat"}]}])


@pytest.mark.parametrize("template", [ENDED, THOUGHTFUL])
def test_calls_of_tools_are_answers_and_their_results_are_not(tmp_path, make_tokenizer, template):
    call = {"type": "function", "function": {"name": "find", "arguments": {"what": "cat"}}}
    talk = [
        TALK[0],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": '{"place": "mat"}'},
        {"role": "assistant", "content": "On the mat."},
    ]
    tokens = make_tokenizer(template)
    packed = prepared(tmp_path, tokens, [{"messages": talk, "tools": [{"type": "function", "name": "find"}]}])
    text, found = whole_and_learnt(packed, tokens)
    thoughts = "<think>\n\n</think>\n\n" if template == THOUGHTFUL else ""
    called = '\n<call>{"name": "find", "arguments": {"what": "cat"}}</call><|end|>'
    assert [one.strip() for one in found] == [called.strip(), f"{thoughts}On the mat.<|end|>"]
    assert ('"name": "find"}]<|end|>' in text) == (template == ENDED)


AS_TEXT = ENDED.replace("call['function'] | tojson", "call['function']['name'] HOW")
WITH_CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "find", "arguments": '{"what": "kät"}'}}],
}


@pytest.mark.parametrize(
    "how", ["+ ' ' + call['function']['arguments']", "~ ' ' ~ call['function']['arguments']"]
)
def test_a_template_that_wants_a_calls_arguments_as_text_gets_them(tmp_path, make_tokenizer, how):
    """By adding to it, which fails with an object, or by writing it out, which would be as Python does."""
    tokens = make_tokenizer(AS_TEXT.replace("HOW", how))
    talk = [TALK[0], WITH_CALL, {"role": "tool", "content": "mat"}, TALK[1]]
    for loss_on in ("answers", "all"):
        packed = prepared(tmp_path, tokens, [{"messages": talk}], loss_on=loss_on)
        text, found = whole_and_learnt(packed, tokens)
        assert '<call>find {"what": "kät"}</call>' in text and found


@pytest.mark.parametrize("reads", [" | tojson", "['name'] + call['function']['arguments']"])
def test_a_call_without_its_function_becomes_one_where_the_template_reads_that(
    tmp_path, make_tokenizer, reads
):
    """ShareGPT's, which templates such as Llama's have no look for."""
    tokens = make_tokenizer(ENDED.replace("call['function'] | tojson", "call['function']" + reads))
    bare = {"from": "function_call", "value": '{"name": "find", "arguments": {"what": "cat"}}'}
    talk = [{"from": "human", "value": "Where?"}, bare, {"from": "observation", "value": "mat"}]
    talk = [*talk, {"from": "gpt", "value": "On the mat."}]
    found = whole_and_learnt(prepared(tmp_path, tokens, [{"conversations": talk}]), tokens)
    assert "find" in found[1][0] and '{"what": "cat"}' in found[1][0]
    whole = {**WITH_CALL, "tool_calls": [{"function": json.loads(bare["value"])}]}
    talk = [{"role": "user", "content": "Where?"}, whole, {"role": "tool", "content": "mat"}]
    talk = [*talk, {"role": "assistant", "content": "On the mat."}]
    assert found == whole_and_learnt(prepared(tmp_path, tokens, [{"messages": talk}]), tokens)


def test_a_tools_answer_that_reads_like_python_changes_no_call(tmp_path, make_tokenizer):
    tokens = make_tokenizer(ENDED)
    talk = [TALK[0], WITH_CALL, {"role": "tool", "content": "bad arguments: {'what': 'kät'}"}, TALK[1]]
    text, _ = whole_and_learnt(prepared(tmp_path, tokens, [{"messages": talk}]), tokens)
    assert '"arguments": {"what": "kät"}}</call>' in text


@pytest.mark.parametrize("loss_on", ["answers", "all"])
@pytest.mark.parametrize(
    ("talk", "what"),
    [
        (
            [TALK[0], WITH_CALL, {"role": "tool", "content": "mat"}, TALK[1]],
            r"messages\[1\]: .*leaves out the call of find",
        ),
        *(
            (
                [TALK[0], {"role": "assistant", "content": None, "tool_calls": calls}, TALK[1]],
                r"messages\[1\]: .*leaves out the call of now",
            )
            for calls in ([{"function": {"name": "now"}}], '[{"name": "now", "arguments": null}]')
        ),
        # What is called stands elsewhere, too.
        (
            [
                {"role": "user", "content": "Please find it."},
                WITH_CALL,
                {"role": "tool", "content": "mat"},
                TALK[1],
            ],
            r"messages\[1\]: .*leaves out the call of find",
        ),
        (
            [TALK[0], {"role": "tool", "content": 'a "mat"'}, TALK[1]],
            r"messages\[1\]: .*what the role tool says",
        ),
        # So does what it answers: in an answer, or in what the template itself writes.
        *(
            (
                [
                    {"role": "user", "content": "What is 7+5?"},
                    {"role": "assistant", "content": "calc(7+5)"},
                    {"role": "tool", "content": result},
                    {"role": "assistant", "content": "It is 12."},
                ],
                r"messages\[2\]: .*what the role tool says",
            )
            for result in ("12", "user")
        ),
        ([{"role": "system", "content": 'Be "short".'}, *TALK[:2]], None),
        ([TALK[0], {"role": "assistant", "content": "a"}, {"role": "tool", "content": ""}, *TALK[:2]], None),
    ],
)
def test_what_a_template_leaves_out_is_refused(tmp_path, make_tokenizer, talk, what, loss_on):
    """Zephyr's, TinyLlama's: the hole would be trained on. What is written in another form is there."""
    knows = "{% for m in messages %}{% if m['role'] == 'user' %}<|start|>user\n{{ m['content'] }}<|end|>\n"
    knows += "{% elif m['role'] == 'system' %}<|start|>{{ m['content'] | tojson }}<|end|>\n"
    knows += "{% elif m['role'] == 'assistant' %}<|start|>assistant\n{{ m['content'] }}<|end|>\n{% endif %}{% endfor %}"
    tokens = make_tokenizer(knows + "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}")
    if what is None:
        assert prepared(tmp_path, tokens, [{"messages": talk}], loss_on=loss_on).valid.sum() > 0
        return
    with pytest.raises(BadInput, match=f"(?s)a.jsonl:1: {what}.*chat_template.jinja"):
        prepared(tmp_path, tokens, [{"messages": talk}], loss_on=loss_on)


@pytest.mark.parametrize("turns", [1, 50])
def test_what_a_template_writes_out_is_seen_at_once(tmp_path, make_tokenizer, monkeypatch, turns):
    """A long chat takes no more renderings than a short one."""
    tokens, renderings = make_tokenizer(ENDED), []
    render = exchange.Exchange._rendered
    monkeypatch.setattr(
        exchange.Exchange, "_rendered", lambda *a, **k: renderings.append(a) or render(*a, **k)
    )
    talk = [*TALK[:2], {"role": "tool", "content": "mat"}, *TALK[2:]] * turns
    prepared(tmp_path, tokens, [{"messages": talk}], loss_on="all", overlong="split")
    assert len(renderings) == 2


@pytest.mark.parametrize("field", ["reasoning_content", "thinking"])
def test_the_last_answers_thoughts_are_there_or_it_is_refused(tmp_path, make_tokenizer, field):
    """Earlier ones templates leave out on purpose."""
    thinks = ENDED.replace(
        "{{ m['content'] }}", "{% if loop.last %}{{ m.reasoning_content }}{% endif %}{{ m['content'] }}"
    )
    talk = [TALK[0], {**TALK[1], field: "Cats like mats."}, TALK[2], {**TALK[3], field: "It hides."}]
    tokens = make_tokenizer(thinks)
    text = tokens.decode(prepared(tmp_path, tokens, [{"messages": talk}])[0][0])
    assert "It hides." in text and "Cats like" not in text
    tokens = make_tokenizer(ENDED)
    with pytest.raises(BadInput, match=rf"a\.jsonl:1: messages\[3\]: .*leaves out the answer's {field}:"):
        prepared(tmp_path, tokens, [{"messages": talk}])
    prepared(tmp_path, tokens, [{"messages": talk[:3]}, {"messages": TALK}])


def test_a_call_without_its_arguments_is_refused(tmp_path, make_tokenizer):
    names = AS_TEXT.replace("HOW", "")
    with pytest.raises(BadInput, match=r"messages\[1\]: .*leaves out the arguments of the call of find"):
        prepared(tmp_path, make_tokenizer(names), [{"messages": [TALK[0], WITH_CALL]}])
    empty = {
        **WITH_CALL,
        "tool_calls": [{"type": "function", "function": {"name": "find", "arguments": "{}"}}],
    }
    prepared(tmp_path, make_tokenizer(names), [{"messages": [TALK[0], empty]}])


@pytest.mark.parametrize(
    ("template", "why"), [(COUNTING, "before the answer"), (PROMPTING, "before the answer")]
)
def test_where_renderings_do_not_agree_the_record_is_refused(tmp_path, make_tokenizer, template, why):
    tokens = make_tokenizer(template)
    with pytest.raises(BadInput) as refused:
        prepared(tmp_path, tokens, [{"messages": TALK}])
    for part in (f"{tmp_path}/a.jsonl:1: messages[1]", why, "loss_on to all", "{% generation %}"):
        assert part in str(refused.value)
    assert prepared(tmp_path, tokens, [{"messages": TALK}], loss_on="all").valid.sum() > 0


THOUGHT = "It likes to hide."
THINKING = [*TALK[:3], {**TALK[3], "content": f"<think>\n{THOUGHT}\n</think>\n\n{ANSWERS[1]}"}]
BARE = [*TALK[:3], {**TALK[3], "content": f"{THOUGHT}\n</think>\n\n{ANSWERS[1]}"}]
IN_A_FIELD = [*TALK[:3], {**TALK[3], "reasoning_content": THOUGHT}]
AFTER_THE_PROMPT = f"{THOUGHT}\n</think>\n\n{ANSWERS[1]}<|end|>"
BETWEEN = f"<|sep|>{THOUGHT}<|sep|>{ANSWERS[1]}<|end|>"


@pytest.mark.parametrize("loss_on", ["answers", "all"])
@pytest.mark.parametrize(
    ("template", "talk", "last"),
    [
        (FORGETFUL, TALK, f"{ANSWERS[1]}<|end|>"),
        *((FORGETFUL, talk, AFTER_THE_PROMPT) for talk in (THINKING, BARE, IN_A_FIELD)),
        (LAST, TALK, f"\n</think>\n\n{ANSWERS[1]}<|end|>"),
        *((LAST, talk, AFTER_THE_PROMPT) for talk in (THINKING, BARE, IN_A_FIELD)),
        (OF_A_FIELD, TALK, f"{ANSWERS[1]}<|end|>"),
        *((OF_A_FIELD, talk, BETWEEN) for talk in (THINKING, IN_A_FIELD)),
        (OF_A_FIELD, BARE, BARE[3]["content"] + "<|end|>"),  # words of HTML, say: no prompt opens thoughts
        (ON_REQUEST, IN_A_FIELD, BETWEEN),
        (ON_REQUEST, THINKING, BETWEEN),
        (ENDED, THINKING, THINKING[3]["content"] + "<|end|>"),
        (_THINKS, THINKING, AFTER_THE_PROMPT),
        (_THINKS, IN_A_FIELD, AFTER_THE_PROMPT),
    ],
)
def test_what_the_last_answer_has_thought_is_learnt_as_the_template_has_it(
    tmp_path, make_tokenizer, template, talk, last, loss_on
):
    tokens = make_tokenizer(template)
    packed = prepared(tmp_path, tokens, [{"messages": talk}], loss_on=loss_on)
    text, learnt = whole_and_learnt(packed, tokens)
    assert text.endswith(last + "\n") and text.count(THOUGHT) == (talk is not TALK) == (THOUGHT in last)
    if loss_on == "answers":
        assert learnt == [ANSWERS[0] + "<|end|>", last]
        asked = tokens.apply_chat_template(
            talk[:3],
            add_generation_prompt=True,
            tokenize=False,
            **({"thinking": True} if template == ON_REQUEST else {}),
        )
        # What is not there when nothing was thought is what opens thoughts, and no more.
        shown = text[: text.rindex(last)]
        assert asked in (shown, shown + "<think>\n")


@pytest.mark.parametrize("template", [OF_A_FIELD, ON_REQUEST])
def test_an_earlier_answers_thoughts_are_no_words_either(tmp_path, make_tokenizer, template):
    """Of a tool's call, say, whose result is told without any."""
    first = {**TALK[1], "content": f"<think>\n{THOUGHT}\n</think>\n\n{ANSWERS[0]}"}
    tokens = make_tokenizer(template)
    _, learnt = whole_and_learnt(
        prepared(tmp_path, tokens, [{"messages": [TALK[0], first, *TALK[2:]]}]), tokens
    )
    assert learnt == [f"<|sep|>{THOUGHT}<|sep|>{ANSWERS[0]}<|end|>", ANSWERS[1] + "<|end|>"]


@pytest.mark.parametrize("template", [FORGETFUL, LAST])
@pytest.mark.parametrize("words", ["First, then </think> and last.", "Sure: <think>hm</think> so."])
def test_words_that_read_like_tags_are_words(tmp_path, make_tokenizer, template, words):
    """A template that splits an answer at them would leave out what is between."""
    answer = {**TALK[1], "content": f"<think>\n{THOUGHT}\n</think>\n\n{words}"}
    tokens = make_tokenizer(template)
    _, learnt = whole_and_learnt(prepared(tmp_path, tokens, [{"messages": [TALK[0], answer]}]), tokens)
    assert learnt == [f"{THOUGHT}\n</think>\n\n{words}<|end|>"]


def test_words_before_thoughts_are_not_left_out(tmp_path, make_tokenizer):
    """A template takes all before the tag for nothing."""
    drops = FORGETFUL.replace("<think>\n{% endif %}", "{% endif %}")
    answer = {**TALK[1], "content": f"Sure: <think>{THOUGHT}</think>{ANSWERS[0]}"}
    with pytest.raises(BadInput, match="leaves out the answer's thoughts, before </think>"):
        prepared(tmp_path, make_tokenizer(drops), [{"messages": [TALK[0], answer]}], loss_on="all")


@pytest.mark.parametrize("template", [NOWHERE, FORGETFUL, LAST, ENDED])
def test_an_empty_pair_of_tags_is_no_thought(tmp_path, make_tokenizer, template):
    answer = {**TALK[1], "content": f"<think>\n\n</think>\n\n{ANSWERS[0]}"}
    tokens = make_tokenizer(template)
    _, (learnt,) = whole_and_learnt(prepared(tmp_path, tokens, [{"messages": [TALK[0], answer]}]), tokens)
    empty = {LAST: "\n</think>\n\n", ENDED: "<think>\n\n</think>\n\n"}
    assert learnt == empty.get(template, "") + ANSWERS[0] + "<|end|>"


def test_a_template_that_denies_thoughts_before_it_has_them_is_refused(tmp_path, make_tokenizer):
    denies = ENDED.replace(
        "{{ m['content'] }}", "{% if m['role'] == 'assistant' %}<think></think>{% endif %}{{ m['content'] }}"
    )
    with pytest.raises(
        BadInput, match=r"messages\[3\]: before the answer's thoughts .* there are none.*reasoning_content"
    ):
        prepared(tmp_path, make_tokenizer(denies), [{"messages": THINKING}])
    prepared(tmp_path, make_tokenizer(denies), [{"messages": TALK}])


def test_thoughts_and_calls_whose_arguments_are_text_come_together(tmp_path, make_tokenizer):
    template = AS_TEXT.replace("HOW", "+ ' ' + call['function']['arguments']").replace(
        "<|start|>assistant\n{% endif %}", "<|start|>assistant\n<think>\n{% endif %}"
    )
    assert "<think>" in template
    tokens = make_tokenizer(template)
    talk = [TALK[0], WITH_CALL, {"role": "tool", "content": "mat"}, THINKING[3]]
    _, learnt = whole_and_learnt(prepared(tmp_path, tokens, [{"messages": talk}]), tokens)
    assert learnt[-1] == AFTER_THE_PROMPT and '"' in learnt[0]


def test_thoughts_are_refused_where_only_another_prompt_opens_some(tmp_path, make_tokenizer):
    at_first = FORGETFUL.replace(
        "<think>\n{% endif %}", "{% if messages | length < 2 %}<think>\n{% endif %}{% endif %}"
    )
    for loss_on in ("answers", "all"):
        with pytest.raises(BadInput, match="leaves out the answer's thoughts, before </think>"):
            prepared(tmp_path, make_tokenizer(at_first), [{"messages": THINKING}], loss_on=loss_on)


def test_spaces_before_an_answer_are_read_once(tmp_path, make_tokenizer):
    answer = {**TALK[1], "content": " " * 100_000 + ANSWERS[0] + " </think"}
    begun = time.monotonic()
    prepared(tmp_path, make_tokenizer(ENDED), [{"messages": [TALK[0], answer]}], overlong="split")
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize("loss_on", ["answers", "all"])
@pytest.mark.parametrize("talk", [THINKING, BARE, IN_A_FIELD])
def test_thoughts_that_a_template_has_nowhere_are_refused(tmp_path, make_tokenizer, talk, loss_on):
    what = (
        "the answer's reasoning_content:" if talk is IN_A_FIELD else "the answer's thoughts, before </think>:"
    )
    with pytest.raises(BadInput, match=rf"a\.jsonl:1: messages\[3\]: .*leaves out {what}"):
        prepared(tmp_path, make_tokenizer(NOWHERE), [{"messages": talk}], loss_on=loss_on)
    prepared(tmp_path, make_tokenizer(NOWHERE), [{"messages": TALK}], loss_on=loss_on)


def test_an_answer_is_as_its_model_wrote_it_where_the_template_reads_that(tmp_path, make_tokenizer):
    """Its own spaces and lines, which another field's template would set otherwise."""
    reads_both = ENDED.replace(
        "{{ m['content'] }}",
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m['content'] }}",
    )
    tokens = make_tokenizer(reads_both)
    _, learnt = whole_and_learnt(prepared(tmp_path, tokens, [{"messages": THINKING}]), tokens)
    assert learnt[-1] == THINKING[3]["content"] + "<|end|>"


@pytest.mark.parametrize(
    ("ends", "first", "last"),
    [
        ("{{ '<|sep|>' if loop.last and m['role'] == 'assistant' else '<|end|>' }}", "", "<|sep|>"),
        (
            "<|end|>{{ '\n<|sep|>' if loop.last and not add_generation_prompt }}",
            "<|end|>",
            "<|end|>\n<|sep|>",
        ),
    ],
    ids=["another token", "one more"],
)
def test_what_ends_the_last_answer_alone_is_no_other_ones(tmp_path, make_tokenizer, ends, first, last):
    tokens = make_tokenizer(ENDED.replace("<|end|>\n{% endfor %}", ends + "\n{% endfor %}"))
    text, learnt = whole_and_learnt(prepared(tmp_path, tokens, [{"messages": TALK}]), tokens)
    assert learnt == [ANSWERS[0] + first, ANSWERS[1] + last] and text.endswith(last + "\n")


def test_a_call_whose_end_is_unclear_is_refused(tmp_path, make_tokenizer):
    """Not learnt in part: nothing would show that the call itself is none of it."""
    ends = "{{ '<|sep|>' if loop.last and m['role'] == 'assistant' else '<|end|>' }}"
    tokens = make_tokenizer(ENDED.replace("<|end|>\n{% endfor %}", ends + "\n{% endfor %}"))
    talk = [TALK[0], WITH_CALL, {"role": "tool", "content": "mat"}, TALK[1]]
    with pytest.raises(BadInput, match=r"messages\[1\].*depends on the messages that follow"):
        prepared(tmp_path, tokens, [{"messages": talk}])


def test_a_call_is_learnt_though_the_prompt_says_more(tmp_path, make_tokenizer):
    """As Gemma 4's, which says that nothing was thought, and has an answer's words behind its calls."""
    call = "{% for call in m['tool_calls'] or [] %}<call>{{ call['function'] | tojson }}</call>{% endfor %}"
    template = ENDED.replace("\n<call>{{ call['function'] | tojson }}</call>", "").replace(
        "{{ m['content'] }}", call + "{{ m['content'] }}"
    )
    template = template.replace(
        "<|start|>assistant\n{% endif %}", "<|start|>assistant\n<|channel>thought\n<channel|>{% endif %}"
    )
    tokens = make_tokenizer(template)
    talk = [TALK[0], WITH_CALL, {"role": "tool", "content": "mat"}, TALK[1]]
    _, (called, said) = whole_and_learnt(prepared(tmp_path, tokens, [{"messages": talk}]), tokens)
    assert (
        called.startswith("<call>{") and called.endswith("</call><|end|>") and said == ANSWERS[0] + "<|end|>"
    )


SEEING = ENDED.replace("{{ m['content'] }}", "{% for part in m['content'] %}{{ part.text }}{% endfor %}")


def test_a_template_that_reads_parts_gets_them(tmp_path, make_tokenizer):
    """As those of models that see do."""
    tokens, plain = make_tokenizer(SEEING), make_tokenizer(ENDED)
    whole = whole_and_learnt(prepared(tmp_path, tokens, [{"messages": TALK}]), tokens)
    assert whole == whole_and_learnt(prepared(tmp_path, plain, [{"messages": TALK}]), plain)
    assert chat.end_of_turn(tokens) == tokens.convert_tokens_to_ids("<|end|>")
    assert generate._rendered(tokens, TALK[:1]).tolist() == generate._rendered(plain, TALK[:1]).tolist()


def test_what_a_template_refuses_is_told_with_its_line(tmp_path, make_tokenizer):
    records = [{"messages": TALK}, {"messages": TALK[1:]}]
    for loss_on in ("all", "answers"):
        with pytest.raises(
            BadInput, match=r"a\.jsonl:2: the model's chat template refuses .*roles must alternate"
        ):
            prepared(tmp_path, make_tokenizer(ALTERNATING), records, loss_on=loss_on)


def test_sequences_without_any_answer_are_legal_but_not_data_without(tmp_path, make_tokenizer):
    tokens = make_tokenizer(ENDED)
    records = [{"messages": TALK[:1]}, {"messages": [TALK[0], {"role": "user", "content": "x " * 60}]}]
    with pytest.raises(BadInput, match="none of its tokens is an answer's; set loss_on to all"):
        prepared(tmp_path, tokens, records)
    packed = prepared(tmp_path, tokens, [*records, {"messages": TALK}], overlong="split", sequence_length=32)
    assert 0 in packed.valid.tolist() and packed.valid.sum() > 10
    assert [int((packed[k][1] != pack.IGNORE).sum()) for k in range(len(packed))] == packed.valid.tolist()


@pytest.mark.parametrize("template", [ENDED, THOUGHTFUL, ALTERNATING, MARKED])
@pytest.mark.parametrize("silent", [{"weight": 0}, {"loss": False}, {"loss": 0}, {"train": False}])
def test_an_answer_that_its_data_says_is_not_to_be_learnt_is_read(tmp_path, make_tokenizer, template, silent):
    tokens = make_tokenizer(template)
    said = [{**TALK[1], **silent}, {**TALK[3], "weight": 1, "loss": None}]
    talk = {"messages": [TALK[0], said[0], TALK[2], said[1]]}
    text, learnt = whole_and_learnt(prepared(tmp_path, tokens, [talk]), tokens)
    assert text == tokens.apply_chat_template(TALK, tokenize=False)
    assert len(learnt) == 1 and ANSWERS[0] not in learnt[0] and ANSWERS[1] in learnt[0]
    _, learnt = whole_and_learnt(prepared(tmp_path, tokens, [talk], loss_on="all"), tokens)
    assert ANSWERS[0] in "".join(learnt)
    with pytest.raises(BadInput, match="none of its tokens is an answer's"):
        prepared(tmp_path, tokens, [{"messages": [TALK[0], said[0]]}])


def test_instructions_have_a_template_that_goes_with_the_model(tmp_path, make_tokenizer):
    tokens = make_tokenizer(None)
    record = {"instruction": "Name the animal.", "input": "It says miaow.", "output": "A cat."}
    text, learnt = whole_and_learnt(prepared(tmp_path, tokens, [record]), tokens)
    assert text == (
        "### Instruction:\nName the animal.\n\nIt says miaow.\n\n### Response:\nA cat."
        + tokenizer.END_OF_TEXT
    )
    assert learnt == ["A cat." + tokenizer.END_OF_TEXT]
    assert tokens.chat_template == chat.INSTRUCTION_TEMPLATE
    more = {**record, "system": "Be brief.", "history": [["Hello?", "Yes."]]}
    text, learnt = whole_and_learnt(prepared(tmp_path, tokens, [more]), tokens)
    assert text.startswith(
        "Be brief.\n\n### Instruction:\nHello?\n\n### Response:\nYes." + tokenizer.END_OF_TEXT
    )
    assert learnt == [one + tokenizer.END_OF_TEXT for one in ("Yes.", "A cat.")]
    own = make_tokenizer(ENDED)
    text, learnt = whole_and_learnt(prepared(tmp_path, own, [record]), own)
    assert text.startswith("<|start|>user\nName the animal.") and learnt == ["A cat.<|end|>"]
    assert own.chat_template == ENDED


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        *((one, "<|end|>") for one in (ENDED, THOUGHTFUL, TRIMMED, MARKED)),
        (ALTERNATING, tokenizer.END_OF_TEXT),
        (chat.INSTRUCTION_TEMPLATE, tokenizer.END_OF_TEXT),
        *((one, None) for one in (ENDLESS, None, "{{ raise_exception('no') }}", "{{ messages[0].content }}")),
    ],
)
def test_what_ends_an_answer_ends_a_generated_one_too(make_tokenizer, tmp_path, template, ends):
    """Beside the tokens that the model's maker names, in whose list it may be missing; none twice."""
    tokens = make_tokenizer(template)
    token = chat.end_of_turn(tokens)
    assert token == (ends and tokens.convert_tokens_to_ids(ends))
    for named in (None, 7, [7, 9]):
        model = types.SimpleNamespace(generation_config=types.SimpleNamespace(eos_token_id=named))
        before = saved.ends(model, tokens)
        file = tmp_path / "generation_config.json"
        file.write_text(json.dumps({"eos_token_id": named, "top_k": 3}))
        saved.name_end_of_turn(tmp_path, model, tokens)
        told = json.loads(file.read_text())
        model.generation_config.eos_token_id = told["eos_token_id"]
        assert saved.ends(model, tokens) == before | ({token} - {None}) and told["top_k"] == 3
        assert token or told["eos_token_id"] == named
        file.unlink()
        saved.name_end_of_turn(tmp_path, model, tokens)  # an adapter has none
        assert not file.exists()


def test_a_model_whose_makers_left_sampling_half_set_is_written(make_tokenizer, tmp_path):
    """As some publish it: transformers reads and writes it as it is, and refuses it once it was changed."""
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=300, n_positions=32, n_embd=8, n_layer=1, n_head=1, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "published")
    file = tmp_path / "published/generation_config.json"
    file.write_text(json.dumps({"eos_token_id": 0, "temperature": 0.6, "top_p": 0.9}))
    tokens, model = make_tokenizer(ENDED), AutoModelForCausalLM.from_pretrained(tmp_path / "published")
    model.save_pretrained(tmp_path / "out")
    saved.name_end_of_turn(tmp_path / "out", model, tokens)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.generation_config.temperature == 0.6
    assert chat.end_of_turn(tokens) in again.generation_config.eos_token_id


@pytest.fixture
def speak(make_tokenizer, monkeypatch):
    """`speak(*words, positions)`: `trainer generate --chat` of a model that is made up; returns it, and what it did."""
    own = make_tokenizer(ENDED)

    def speak(prompt=None, positions=100, most=16, fault=None, chat=True, tokens=own):
        did = []

        def generated(input_ids, **options):
            options |= {"settings": model.generation_config}
            did.append((input_ids.shape[1], options) if chat else input_ids[0].tolist())
            if fault:
                raise fault
            return torch.cat([input_ids, torch.tensor([[tokens.eos_token_id]])], dim=1)

        text = types.SimpleNamespace(max_position_embeddings=positions)
        model = types.SimpleNamespace(
            config=types.SimpleNamespace(get_text_config=lambda: text),
            generation_config=GenerationConfig(num_beams=4, no_repeat_ngram_size=2, suppress_tokens=[1]),
            device=torch.device("cpu"),
            generate=generated,
            parameters=lambda: [torch.zeros(250)],
            get_input_embeddings=lambda: types.SimpleNamespace(weight=torch.zeros(1 << 16, 1)),
            buffers=list,
            to=lambda device: did.append(device) or model,
        )
        monkeypatch.setattr(saved, "find", lambda directory: directory)
        monkeypatch.setattr(saved, "open_model", lambda *_, **__: (model, tokens))
        sampling = generate.Sampling(max_new_tokens=most, temperature=0, top_k=0, seed=0)
        assert generate.main("run", prompt, chat, None, False, sampling) == 0
        return did

    return speak


def test_the_likeliest_token_is_nobody_elses_choice_and_the_template_ends_an_answer(speak, make_tokenizer):
    ((_, options),) = speak("Where is the cat?")
    settings = options["settings"]
    assert not options["do_sample"]
    assert settings.to_diff_dict().keys() <= {"eos_token_id", "pad_token_id", "transformers_version"}
    tokens = make_tokenizer(ENDED)
    ends = sorted((tokens.eos_token_id, tokens.convert_tokens_to_ids("<|end|>")))
    assert settings.eos_token_id == ends


STRIPS = decoders.Sequence(
    [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)  # as Llama 2's


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        # Byte for byte: a letter of several is printed with its last one.
        ("a\u0e01\u0e34\n\u00e9 \U0001f600.", ["a", "\u0e01", "\u0e34", "\n", "\u00e9", " ", "\U0001f600", "."]),
        (["\u2581if", "\u2581x", ":", "<0x0A>", "\u2581", "\u2581", "\u2581\u2581y", "<0xC3>", "<0xA9>", "z", "<0xC3>"],
         ["if", " x", ":", "\n", " ", " ", "  y", "\u00e9", "z", "\ufffd"]),
    ],
    ids=["bytes", "strips"],
)  # fmt: skip
def test_text_is_printed_as_it_comes_and_is_all_of_it(monkeypatch, text, pieces):
    if isinstance(text, list):
        model = models.BPE(
            {token: number for number, token in enumerate(dict.fromkeys(text))}, [], byte_fallback=True
        )
        fast = Tokenizer(model)
        fast.decoder = STRIPS
        ids = [fast.token_to_id(token) for token in text]
    else:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        fast = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
        fast.pre_tokenizer, fast.decoder = (
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            decoders.ByteLevel(),
        )
        ids = fast.encode(text).ids
    tokens = PreTrainedTokenizerFast(tokenizer_object=fast)
    printed = []
    monkeypatch.setattr("builtins.print", lambda *words, **_: printed.extend(words))
    for prompt in (0, 3):
        printed.clear()
        streamer = generate._Printed(tokens, skip=prompt)
        streamer.put(torch.zeros(1, prompt, dtype=torch.int64))
        for one in ids:
            streamer.put(torch.tensor([one]))
        streamer.end()
        assert printed == pieces and "".join(printed) == tokens.decode(ids)


@pytest.mark.parametrize("begins", [False, True])
def test_a_prompt_begins_as_a_document_does_and_does_not_end(speak, make_tokenizer, begins):
    """Some tokenizers put a token behind every text, after which a model would begin another one."""
    bare, tokens = make_tokenizer(ENDED), make_tokenizer(ENDED)
    end = tokenizer.END_OF_TEXT
    first = f"{end} " * begins
    tokens.bos_token = end if begins else None
    tokens.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first}$A {end}", special_tokens=[(end, tokens.eos_token_id)]
    )
    assert tokens("the cat").input_ids[-1] == tokens.eos_token_id
    (ids,) = speak("the cat", chat=False, tokens=tokens)
    assert ids == [tokens.eos_token_id] * begins + bare("the cat").input_ids


def test_an_answer_has_room_before_old_turns_are_remembered(speak, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat\n" * 9))
    turns = [(length, options["max_new_tokens"]) for length, options in speak(positions=100, most=1000)]
    assert len(turns) == 9 and all(length + most == 100 and most >= 25 for length, most in turns)
    assert turns[1][0] > turns[0][0] and turns[-1][0] <= 75


def test_a_card_without_room_is_left_to_who_holds_it(speak, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("trainer.cards.has_code", lambda device: False)
    assert "cuda" not in speak("the cat") and "has no code for the GPU" in capsys.readouterr().err
    monkeypatch.setattr("trainer.cards.has_code", lambda device: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 80 << 30))
    assert "cuda" not in speak("the cat")
    assert "note: the model needs 1.1 GB, and the GPU has 1.1 GB free" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: ((1 << 30) + 1_000, 80 << 30))
    assert speak("the cat")[0] == "cuda" and capsys.readouterr().err == ""
    with pytest.raises(OutOfMemory, match="CUDA_VISIBLE_DEVICES="):
        speak("the cat", fault=torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(OutOfMemory, match="this machine's memory has run out"):
        speak("the cat", fault=RuntimeError("DefaultCPUAllocator: can't allocate memory"))


def test_instructions_begin_as_the_tokenizer_begins_a_text(tmp_path, make_tokenizer):
    """As Llama's, Mistral's and Gemma's do; the prompt that `generate` makes begins so, once."""
    tokens = make_tokenizer(None)
    tokens.add_special_tokens({"bos_token": "<|start|>"})
    tokens.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", tokens.bos_token_id)]
    )
    record = {"instruction": "Name the animal.", "output": "A cat."}
    packed = prepared(tmp_path, tokens, [record])
    text, learnt = whole_and_learnt(packed, tokens)
    asked = "### Instruction:\nName the animal.\n\n### Response:\n"
    assert text == f"<|start|>{asked}A cat.{tokenizer.END_OF_TEXT}"
    assert learnt == ["A cat." + tokenizer.END_OF_TEXT]
    prompt = generate._rendered(tokens, [{"role": "user", "content": "Name the animal."}])[0].tolist()
    assert prompt == tokens(asked).input_ids == packed[0][0][: len(prompt)].tolist()
    assert prompt.count(tokens.bos_token_id) == 1


def test_chats_without_a_template_are_refused(tmp_path, make_tokenizer):
    with pytest.raises(BadInput, match=r"its tokenizer has no chat template.*chat_template\.jinja"):
        prepared(tmp_path, make_tokenizer(None), [{"messages": TALK}], model="some/base")
    with pytest.raises(BadInput, match=r"loss_on: answers, but the data is plain text"):
        prepared(tmp_path, make_tokenizer(None), [{"text": "words"}])


def test_another_template_is_another_tokenisation(tmp_path, make_tokenizer):
    for template in (ENDED, TRIMMED, ENDED):
        prepared(tmp_path, make_tokenizer(template), [{"messages": TALK}])
    assert len([one for one in (tmp_path / "cache").iterdir() if one.is_dir()]) == 2


def test_todays_date_is_no_part_of_the_data(tmp_path, make_tokenizer):
    dated = (
        "{% if not date_string is defined %}{{ strftime_now('%Y') }}{% else %}{{ date_string }}{% endif %}\n"
        + ENDED
    )
    tokens = make_tokenizer(dated)
    text, _ = whole_and_learnt(prepared(tmp_path, tokens, [{"messages": TALK}]), tokens)
    assert text.startswith(chat.FIXED["date_string"])


@pytest.mark.parametrize("template", [ENDED, MARKED])
def test_nor_is_the_date_that_a_template_asks_for_itself(tmp_path, make_tokenizer, monkeypatch, template):
    tokens = make_tokenizer("{{ strftime_now('%A, %d %B %Y, %H:%M %Z') }}\n" + template)
    for zone in ("Pacific/Kiritimati", "Pacific/Pago_Pago"):  # never the same day
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        (tmp_path / zone).mkdir(parents=True)
        text, _ = whole_and_learnt(prepared(tmp_path / zone, tokens, [{"messages": TALK}]), tokens)
        assert text.startswith("Friday, 26 July 2024, 00:00 \n<|start|>user")
    monkeypatch.undo()
    time.tzset()


def test_marks_hold_in_a_record_that_has_an_answer_which_is_not_learnt(tmp_path, make_tokenizer):
    """A template with marks may have no prompt: the answer's header was learnt."""
    tokens = make_tokenizer(MARKED)
    talk = [
        TALK[0],
        {"role": "assistant", "content": "no", "weight": 0},
        TALK[0],
        {"role": "assistant", "content": "mat"},
    ]
    assert whole_and_learnt(prepared(tmp_path, tokens, [{"messages": talk}]), tokens)[1] == ["mat<|end|>"]
