"""The loss of a model's logits, in chunks and in the whole way, in each precision."""

import sys
import types

import pytest
import torch
from small_models import ARCHITECTURES, make

from trainer.config import from_mapping
from trainer.data.pack import IGNORE
from trainer.errors import BadInput
from trainer.model import lora, packing
from trainer.model.loss import HALF, TokenLoss, autocast

torch.set_num_threads(1)

CHANGES_LOGITS = {"gemma2", "gemma3_text", "granite", "cohere"}


def test_torch_is_told_how_many_logits_may_be_there_at_once(monkeypatch):
    """loss_chunk, or as many as make 128 MiB, on a CPU 16 MiB, 256 at least."""
    seen = []
    really = torch.nn.functional.linear_cross_entropy

    def noted(*args, **kwargs):
        seen.append(kwargs["options"])
        return really(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "linear_cross_entropy", noted)
    inputs, labels = torch.randint(2, 96, (2, 20, 24))
    for chunk in (None, 7, 479, 480, 0):
        TokenLoss(make("llama"), chunk)(inputs, labels, torch.arange(24).expand(20, 24))
    assert [one.batch_chunk_size for one in seen] == [
        7,
        479,
    ]  # 480 tokens fit what 96 words are given at once
    assert TokenLoss(make("llama", vocab_size=1 << 13)).chunk == 512
    assert TokenLoss(make("llama", vocab_size=1 << 15), device="cuda").chunk == 1024
    assert TokenLoss(make("llama", vocab_size=1 << 18)).chunk == 256


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("adapter", ["none", "lora"])
@pytest.mark.parametrize(
    "kind", ["llama", "phi", "granite"]
)  # phi's head has a bias; granite scales its logits
def test_in_half_precision_the_head_multiplies_so_and_its_sums_are_float32(kind, adapter, dtype, monkeypatch):
    """Also of weights that autocast alone brings to it. Loss and gradients in chunks are the whole way's."""
    from torch.utils._python_dispatch import TorchDispatchMode

    half = HALF[dtype]

    class Seen(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.products, self.softmaxes, self.count = set(), set(), 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            name = function.overloadpacket.__name__
            tensors = [one for one in args if isinstance(one, torch.Tensor)]
            if name in ("mm", "addmm") and any(97 in one.shape for one in tensors):
                self.products |= {one.dtype for one in tensors}
                self.count += 1
            if name in ("_log_softmax", "exp_") and result.shape[-1] == 97:
                self.softmaxes.add(result.dtype)
            return result

    monkeypatch.setitem(ARCHITECTURES, "phi", {"num_key_value_heads": 4})
    model = make(kind, vocab_size=97)
    if adapter == "lora":
        model = lora.add(model.to(half), from_mapping({"adapter": "lora", "lora_rank": 2}))
    inputs, labels = torch.randint(2, 96, (2, 40, 24))
    labels[0, 5:9] = IGNORE
    positions = torch.arange(24).expand(40, 24)
    found = []
    for chunk in (0, 100):
        module = TokenLoss(model, chunk)
        model.zero_grad()
        with Seen() as seen, autocast(torch.device("cpu"), dtype):
            loss = module(inputs, labels, positions)
            (loss / 1000).backward()
        assert seen.products == {half} and seen.softmaxes == {torch.float32} and loss.dtype == torch.float32
        with Seen() as evaluated, torch.no_grad(), autocast(torch.device("cpu"), dtype):
            assert module(inputs, labels, positions).item() == pytest.approx(loss.item(), rel=1e-6)
        assert evaluated.count == (10 if chunk else 1)  # no gradients
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        found.append((loss.item(), gradient))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
    assert (found[1][1] - found[0][1]).norm() < 0.02 * found[0][1].norm()


@pytest.mark.parametrize("kind", sorted(CHANGES_LOGITS))
@pytest.mark.parametrize("chunk", [5, 16])
def test_no_more_changed_logits_than_asked_for_are_there_at_once(kind, chunk):
    """By the tensors of a vocabulary's width that a pass makes, forward and backward."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Widest(TorchDispatchMode):
        rows = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for one in tree_leaves(result):
                if (
                    isinstance(one, torch.Tensor) and one.shape[-1:] == (97,) and one.shape[0] != 32
                ):  # the head's
                    self.rows = max(self.rows, one.numel() // 97)
            return result

    model = make(kind, vocab_size=97, tie_word_embeddings=False)
    inputs, labels = torch.randint(2, 96, (2, 2, 24))
    with Widest() as seen:
        TokenLoss(model, chunk)(inputs, labels, torch.arange(24).expand(2, 24)).backward()
    assert 0 < seen.rows <= chunk


def test_a_head_whose_logits_are_changed_in_an_unknown_way_takes_the_whole_way():
    """Of architectures that have the same key, some multiply where Granite divides, or do more."""
    for model in (make("llama"), make("granite", logits_scaling=2.0, final_logit_softcapping=3.0)):
        if model.config.model_type == "llama":
            model.config.logits_scaling = 2.0
        assert TokenLoss(model, 16).chunk == 0
    assert TokenLoss(make("granite", logits_scaling=1.0), 16).chunk == 16


@pytest.mark.parametrize("kernel", ["torch", "liger"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_head_with_layers_of_its_own_takes_the_whole_way(kernel, dtype, world, monkeypatch):
    """ModernBERT's decoder has a layer and a norm before the matrix, which would get no gradient in chunks."""
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    monkeypatch.setitem(
        ARCHITECTURES, "modernbert-decoder", {**sizes, "intermediate_size": 48, "pad_token_id": 0}
    )
    module = TokenLoss(make("modernbert-decoder"), 16)
    assert module.headless
    if kernel == "liger":
        module.fused = lambda weight, hidden, labels, bias: torch.nn.functional.cross_entropy(
            torch.nn.functional.linear(hidden, weight, bias), labels, reduction="sum"
        )
        with pytest.raises(
            BadInput, match=r"that of ModernBertDecoderForCausalLM is not; set loss_kernel to torch"
        ):
            packing.check(from_mapping({"dtype": dtype}), module, world)
        return
    packing.check(from_mapping({"dtype": dtype}), module, world)
    assert (module.headless, module.chunk) == (False, 0)
    inputs, labels = torch.randint(2, 96, (2, 2, 24))
    module(inputs, labels, torch.arange(24).expand(2, 24)).backward()
    assert all(one.grad is not None for one in module.model.lm_head.parameters())


def test_liger_computes_the_loss_where_that_is_asked_for(monkeypatch):
    """With a stand-in for its kernel, which wants a GPU: what it is given, and what is refused."""
    from trainer.model import loss

    class Fused:
        def __init__(self, ignore_index, reduction):
            self.how = {"ignore_index": ignore_index, "reduction": reduction}

        def __call__(self, weight, hidden, labels, bias):
            return torch.nn.functional.cross_entropy(
                torch.nn.functional.linear(hidden, weight, bias), labels, **self.how
            )

    package = types.SimpleNamespace(LigerFusedLinearCrossEntropyLoss=Fused)
    monkeypatch.setitem(sys.modules, "liger_kernel", types.SimpleNamespace(transformers=package))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", package)
    inputs, labels = torch.randint(2, 96, (2, 2, 24))
    labels[0, 5:9] = IGNORE
    model, positions = make("llama"), torch.arange(24).expand(2, 24)
    module = TokenLoss(model, None, "liger")
    assert module(inputs, labels, positions).item() == pytest.approx(
        TokenLoss(model, 0)(inputs, labels, positions).item(), rel=1e-6
    )
    assert isinstance(module.fused, Fused)
    with pytest.raises(BadInput, match=r"that of Gemma2ForCausalLM is not; set loss_kernel to torch"):
        TokenLoss(make("gemma2"), None, "liger")
    asked = from_mapping({"loss_kernel": "liger"})
    with pytest.raises(BadInput, match="liger runs on GPUs alone"):
        loss.check(asked, torch.device("cpu"))
    monkeypatch.setattr(loss.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match="liger-kernel is not installed beside the trainer"):
        loss.check(asked, torch.device("cuda"))
    loss.check(from_mapping({}), torch.device("cpu"))
