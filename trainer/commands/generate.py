"""`trainer generate`: text from a run, a checkpoint, an adapter or a model; as it comes, once or as a conversation."""

import sys
from dataclasses import dataclass
from pathlib import Path

from trainer.data import chat as turns
from trainer.data.exchange import as_read
from trainer.errors import BadInput, OutOfMemory
from trainer.model import saved

ROOM = 1 << 30  # bytes that it takes to generate, beside a model's weights
HALF = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer makes of the first bytes of a letter
ANSWER = 4  # an answer gets at least the positions by this, before the oldest turns are remembered


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; temperature 0: always the likeliest."""

    max_new_tokens: int
    temperature: float
    top_k: int
    seed: int


def main(
    directory: Path, prompt: str | None, chat: bool, base: str | None, trust: bool, sampling: Sampling
) -> int:
    """Print the prompt and how it goes on; with `chat`, the answer to it, or without a prompt a conversation.

    base, trust: as saved.open_model has them.
    """
    import torch

    from trainer.world import lacks_memory

    try:
        (prompt or "").encode()
    except UnicodeEncodeError as error:
        raise _no_utf8("--prompt", error) from None
    model, tokenizer = saved.open_model(saved.find(directory), base, trust=trust)
    if torch.cuda.is_available():
        model = _on_the_gpu(model)
    if chat and not tokenizer.chat_template:
        raise BadInput(f"{directory}: its tokenizer has no chat template; leave --chat away")
    torch.manual_seed(sampling.seed)
    try:
        if not chat:
            # As documents begin in training (data/cache.py), for a tokenizer may end each text by a token of its own;
            # without a prompt after another's end, where no token begins them.
            ids = turns.first_token(tokenizer) + tokenizer(prompt or "", add_special_tokens=False).input_ids
            ids = ids or sorted(saved.ends(model, tokenizer))[:1]
            if not ids:
                raise BadInput(
                    f"{directory}: its tokenizer has no token that begins or ends a text; give a --prompt"
                )
            ids = torch.tensor([ids])
            _continue(model, tokenizer, ids, sampling, with_prompt=True)
        elif prompt is not None:
            _answer(model, tokenizer, [{"role": "user", "content": prompt}], sampling)
        else:
            _converse(model, tokenizer, sampling)
    except RuntimeError as error:
        if not lacks_memory(error):
            raise
        cure = "lower --max-new-tokens"
        if model.device.type == "cpu" and not isinstance(error, torch.OutOfMemoryError):
            raise OutOfMemory(f"this machine's memory has run out; {cure}") from None
        raise OutOfMemory(
            "the GPU's memory has run out; a run under way may hold it. Set CUDA_VISIBLE_DEVICES= (to nothing) for the "
            f"CPU, or {cure}"
        ) from None
    return 0


def _on_the_gpu(model):
    """The model there, if it has room for it now."""
    import torch

    from trainer import cards

    if not cards.has_code(torch.device("cuda", 0)):
        print("note: this build of torch has no code for the GPU: it speaks on the CPU", file=sys.stderr)
        return model
    free, _ = torch.cuda.mem_get_info()
    needed = ROOM + sum(one.nbytes for one in (*model.parameters(), *model.buffers()))
    if needed <= free:
        return model.to("cuda")
    print(
        f"note: the model needs {needed / 1e9:.1f} GB, and the GPU has {free / 1e9:.1f} GB free: it speaks on the CPU, "
        "slowly",
        file=sys.stderr,
    )
    return model


def _converse(model, tokenizer, sampling: Sampling) -> None:
    """Answer line by line until the input ends; Ctrl-C cuts an answer short."""
    messages = []
    at_terminal = sys.stdin.isatty()
    if at_terminal:
        print("One line a turn. Ctrl-C cuts an answer short, Ctrl-D ends.")
    while True:
        try:
            line = input("> " if at_terminal else "").strip()
            line.encode()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        except UnicodeError as error:
            raise _no_utf8("the input", error) from None
        if not line:
            continue
        messages.append({"role": "user", "content": line})
        wanted = min(sampling.max_new_tokens, _positions(model) // ANSWER)
        while _room(model, _rendered(tokenizer, messages)) < wanted and len(messages) > 1:
            del messages[:2]  # the oldest question and its answer
        try:
            answer = _answer(model, tokenizer, messages, sampling)
        except KeyboardInterrupt:
            print()
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer})


def _no_utf8(what: str, error: UnicodeDecodeError | UnicodeEncodeError) -> BadInput:
    """error: of reading it, or where Python let it in, as it does with arguments, of writing it (surrogateescape)."""
    found = error.object[error.start]
    byte = found if isinstance(found, int) else ord(found) & 0xFF
    return BadInput(f"{what} is no UTF-8: byte 0x{byte:02x}; convert it by iconv")


def _answer(model, tokenizer, messages: list[dict], sampling: Sampling) -> str:
    ids = _rendered(tokenizer, messages)
    return _continue(
        model, tokenizer, ids, sampling, with_prompt=False, also_ends=turns.end_of_turn(tokenizer)
    )


def _rendered(tokenizer, messages: list[dict]):
    """The ids (1, S) of the messages by the model's template, up to where the answer begins."""
    messages = as_read(tokenizer, messages)
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # whatever a template may raise
        raise BadInput(f"the model's chat template fails: {' '.join(str(error).split())[:200]}") from None
    return tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids


def _positions(model) -> int:
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize


def _room(model, ids) -> int:
    """How many tokens may follow `ids` (1, S)."""
    return _positions(model) - ids.shape[1]


class _Printed:
    """Prints tokens as they come, by pieces of which the tokenizer can make text; transformers calls that a streamer.

    What a token adds is the difference of two texts that begin a piece before it: so spaces come out right with
    tokenizers that take the first one away.
    """

    def __init__(self, tokenizer, skip: int):
        """skip: tokens that come first and are not printed."""
        self.tokenizer, self.skip = tokenizer, skip
        self.tokens: list[int] = []
        self.begin = self.printed = 0  # where the last piece that was printed begins, and ends

    def put(self, tokens) -> None:
        self.tokens += tokens.flatten().tolist()
        del self.tokens[: self.skip]
        self.skip = 0
        self._print()

    def end(self) -> None:
        self._print(at_last=True)
        print(flush=True)

    def _print(self, at_last: bool = False) -> None:
        before, after = (
            self.tokenizer.decode(self.tokens[self.begin : end], skip_special_tokens=True)
            for end in (self.printed, len(self.tokens))
        )
        if len(after) > len(before) and (at_last or not after.endswith(HALF)):
            print(after[len(before) :], end="", flush=True)
            self.begin, self.printed = self.printed, len(self.tokens)


def _continue(
    model, tokenizer, ids, sampling: Sampling, with_prompt: bool, also_ends: int | None = None
) -> str:
    """Generate after `ids` (1, S), printing the text as it comes; returns what is new. It ends with an end token."""
    import torch
    from transformers import GenerationConfig

    known = model.get_input_embeddings().weight.shape[0]
    if ids.numel() and ids.max() >= known:
        word = tokenizer.convert_ids_to_tokens(int(ids.max()))
        raise BadInput(
            f"the prompt's token {word!r} has the number {ids.max()}, and the model has {known} tokens; leave it out"
        )
    room = _room(model, ids)
    if room < 1:
        raise BadInput(
            f"the prompt has {ids.shape[1]} tokens, the model {_positions(model)} positions; shorten it"
        )
    how = {"do_sample": False}
    if sampling.temperature:
        how = {"do_sample": True, "temperature": sampling.temperature, "top_k": sampling.top_k}

    def checked(_, logits):
        """The logits (1, V) of the next token, where one can be chosen by them: a softmax has a finite largest one."""
        largest = logits.max()
        if not largest.isfinite():
            raise BadInput(
                f"the model's logits: found {largest.item()}; expected finite numbers: its weights are damaged, or its "
                "training has diverged. Take an earlier checkpoint of its run, or another copy of it"
            )
        if sampling.temperature and not (largest / sampling.temperature).isfinite():
            raise BadInput(
                f"--temperature {sampling.temperature}: found so little that logits divided by it are infinite; "
                "expected 0, which takes the likeliest token, or more, such as 0.1"
            )
        return logits

    ids = ids.to(model.device)
    # What the model's maker recommends beside these would be no setting of ours, and may not go with them.
    model.generation_config = GenerationConfig(
        eos_token_id=sorted({*saved.ends(model, tokenizer), also_ends} - {None}),
        pad_token_id=tokenizer.eos_token_id,
    )
    printed = _Printed(tokenizer, skip=0 if with_prompt else ids.shape[1])
    try:
        with torch.inference_mode():
            output = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=min(sampling.max_new_tokens, room),
                logits_processor=[checked],
                streamer=printed,
                **how,
            )
    except (ValueError, NotImplementedError) as error:  # transformers' own refusals, of some architectures
        if len(printed.tokens) > (ids.shape[1] if with_prompt else 0):  # not once it generates
            raise
        reason = " ".join(str(error).split())[:300]
        raise BadInput(f"{type(model).__name__} cannot generate with this configuration: {reason}") from None
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
