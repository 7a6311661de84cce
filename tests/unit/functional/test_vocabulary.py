"""Token KL over a vocabulary: what the full logits would give, without ever making them."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from keel.errors import InputError, ShapeError
from keel.functional import categorical_kl, vocabulary_kl, vocabulary_log_prob
from keel.functional.vocabulary import MAX_ELEMENTS, vocabulary_comparison


def inputs(
    *lead: int, vocabulary: int = 11, widths: tuple[int, int] = (4, 4)
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """p_hidden, p_head, q_hidden, q_head in float64, all of them leaves."""
    rng = torch.Generator().manual_seed(0)
    shapes = [shape for width in widths for shape in ((*lead, width), (vocabulary, width))]
    return tuple(
        torch.randn(shape, generator=rng, dtype=torch.float64).requires_grad_() for shape in shapes
    )


def full_kl(p_hidden, p_head, q_hidden, q_head, temperature: float = 1.0) -> Tensor:
    return categorical_kl(p_hidden @ p_head.T / temperature, q_hidden @ q_head.T / temperature)


# --- values and gradients -----------------------------------------------------------------------


@pytest.mark.parametrize("lead", [(), (5,), (2, 3)], ids=str)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_it_is_the_kl_of_the_full_logits(lead: tuple[int, ...], temperature: float):
    tensors = inputs(*lead, widths=(4, 2))
    chunked = vocabulary_kl(*tensors, temperature=temperature, max_elements=22)
    full = full_kl(*tensors, temperature=temperature)
    weights = torch.arange(1.0, 1.0 + full.numel(), dtype=torch.float64).reshape(lead)
    torch.testing.assert_close(chunked, full)
    torch.testing.assert_close(
        torch.autograd.grad((weights * chunked).sum(), tensors),
        torch.autograd.grad((weights * full).sum(), tensors),
    )


def test_gradients_are_the_derivatives():
    kl = partial(vocabulary_kl, temperature=0.7, max_elements=22)
    assert torch.autograd.gradcheck(kl, inputs(3, widths=(3, 2)))


@pytest.mark.parametrize("wanted", range(4), ids=["p_hidden", "p_head", "q_hidden", "q_head"])
def test_each_gradient_can_be_asked_for_alone(wanted: int):
    tensors = [x.detach().requires_grad_(i == wanted) for i, x in enumerate(inputs(3))]
    alone = torch.autograd.grad(vocabulary_kl(*tensors).sum(), tensors[wanted])
    torch.testing.assert_close(alone, torch.autograd.grad(full_kl(*tensors).sum(), tensors[wanted]))


def test_equal_models_are_at_zero():
    hidden, head, _, _ = inputs(3)
    kl = vocabulary_kl(hidden, head, hidden.detach(), head.detach())
    assert (kl == 0.0).all()


def test_no_tokens_no_kl():
    tensors = inputs(0)
    kl = vocabulary_kl(*tensors)
    assert kl.shape == (0,)
    assert all((g == 0.0).all() for g in torch.autograd.grad(kl.sum(), tensors))


def test_float32_extremes_stay_finite():
    """Logits of ±10⁴: 2·10⁴ nats apart."""
    p_hidden, q_hidden = torch.tensor([[[1e4]], [[-1e4]]]).requires_grad_().unbind()
    head = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    kl = vocabulary_kl(p_hidden, head, q_hidden, head)
    kl.sum().backward()
    assert kl.item() == pytest.approx(2e4)
    assert head.grad.isfinite().all()


# --- memory -------------------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """Watches every operation for the size of what it makes."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


@pytest.mark.parametrize("tokens", [10, 100])
def test_no_tensor_outgrows_the_bound(tokens: int):
    """10 rows of a vocabulary of 50 at once, in the forward and in the backward pass."""
    tensors = inputs(tokens, vocabulary=50, widths=(2, 3))
    with LargestTensor() as largest:
        torch.autograd.grad(vocabulary_kl(*tensors, max_elements=500).sum(), tensors)
    assert largest.elements == 500


def test_no_tensor_of_log_probs_outgrows_the_bound():
    hidden, head, _, _ = inputs(100, vocabulary=50, widths=(2, 3))
    token = torch.zeros(100, dtype=torch.long)
    with LargestTensor() as largest:
        chunked = vocabulary_log_prob(hidden, head, token, max_elements=500)
        torch.autograd.grad((chunked.log_prob + chunked.entropy).sum(), (hidden, head))
    assert largest.elements == 500


def test_logits_take_sixteen_mebibytes_unless_told():
    assert torch.finfo(torch.float32).bits // 8 * MAX_ELEMENTS == 16 * 2**20


def test_a_bound_below_one_row_means_row_by_row():
    tensors = inputs(10, vocabulary=50, widths=(1, 1))
    with LargestTensor() as largest:
        vocabulary_kl(*tensors, max_elements=1)
    assert largest.elements == 50


PEAKS = """
import resource, torch
from keel.functional import vocabulary_kl

torch.set_num_threads(1)
heads = torch.randn(2, 150_000, 32).requires_grad_().unbind()

def peak_mib(tokens):
    hidden = torch.randn(2, tokens, 32).requires_grad_().unbind()
    tensors = (hidden[0], heads[0], hidden[1], heads[1])
    torch.autograd.grad(vocabulary_kl(*tensors, max_elements=1 << 20).sum(), tensors)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(start, peak_mib(64), peak_mib(512))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has other units elsewhere")
def test_the_peak_of_the_process_does_not_grow_with_the_tokens():
    """512 tokens × 150,000 words: two tables of logits alone would be 586 MiB.

    About 130 MiB are expected: 37 for the gradients of both heads, the rest for chunks of 4 MiB.
    """
    run = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, check=True)
    start, few, many = map(float, run.stdout.split())
    assert many - start < 250.0
    assert many - few < 50.0


# --- refusals -----------------------------------------------------------------------------------

h, w = torch.zeros(2, 3), torch.zeros(5, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: vocabulary_kl(torch.tensor(0.0), w, h, w), r"p_hidden: expected \[\*lead, H\]"),
        (lambda: vocabulary_kl(h, w, torch.tensor(0.0), w), r"q_hidden: expected \[\*lead, H\]"),
        (lambda: vocabulary_kl(h, w.T, h, w), r"p_head: expected \[V, 3\] .*got \[3, 5\]"),
        (lambda: vocabulary_kl(h, w, h, w[0]), r"q_head: expected \[V, 3\] .*got \[3\]"),
        (lambda: vocabulary_kl(h, w, h[:1], w), r"q: expected tokens \[2\] .*got \[1\] and 5"),
        (lambda: vocabulary_kl(h, w, h, w[:4]), r"q: .*a vocabulary of 5 .*got \[2\] and 4"),
    ],
)
def test_a_wrong_shape_is_named(call: Callable[[], Tensor], message: str):
    with pytest.raises(ShapeError, match=message):
        call()


def test_a_temperature_must_be_positive() -> None:
    hidden, head = torch.zeros(1, 2), torch.zeros(3, 2)
    with pytest.raises(ValueError, match="temperature: expected a number above 0, got 0"):
        vocabulary_kl(hidden, head, hidden, head, temperature=0.0)


# --- log-probs and entropy ----------------------------------------------------------------------


@pytest.mark.parametrize("lead", [(), (5,), (2, 3)], ids=str)
def test_log_prob_and_entropy_are_those_of_the_full_logits(lead: tuple[int, ...]):
    hidden, head, _, _ = inputs(*lead)
    token = torch.randint(11, lead, generator=torch.Generator().manual_seed(1))
    chunked = vocabulary_log_prob(hidden, head, token, max_elements=22)
    reference = torch.distributions.Categorical(logits=hidden @ head.T)
    full = reference.log_prob(token), reference.entropy()
    weights = torch.arange(1.0, 1.0 + token.numel(), dtype=torch.float64).reshape(lead)
    for ours, theirs in zip(chunked, full, strict=True):
        torch.testing.assert_close(ours, theirs)
    ours, theirs = (((x[0] - 0.3 * x[1]) * weights).sum() for x in (chunked, full))
    torch.testing.assert_close(
        torch.autograd.grad(ours, (hidden, head)), torch.autograd.grad(theirs, (hidden, head))
    )


@pytest.mark.parametrize("max_elements", [7, 1 << 20])
def test_a_comparison_is_what_the_others_say_one_by_one(max_elements: int):
    p_hidden, p_head, q_hidden, q_head = inputs(2, 3)
    token = torch.tensor([[0, 1, 2], [3, 4, 0]])
    found = vocabulary_comparison(
        p_hidden, p_head, q_hidden, q_head, token, max_elements=max_elements
    )
    log_prob, entropy = vocabulary_log_prob(q_hidden, q_head, token)
    expected = (
        vocabulary_kl(p_hidden, p_head, q_hidden, q_head),
        vocabulary_kl(q_hidden, q_head, p_hidden, p_head),
        log_prob,
        entropy,
    )
    for own, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(own, theirs.detach())


@pytest.mark.parametrize(
    ("tokens", "vocabularies", "message"),
    [
        ([0, 10, 11], (11, 11), "token: expected tokens from 0 to 10, got 0 to 11"),
        ([0, 10, -1], (11, 11), "token: expected tokens from 0 to 10, got -1 to 10"),
        ([0, 10], (11, 11), r"token: expected shape \[3\]"),
        ([0, 1, 2], (11, 7), r"q: expected tokens \[3\] and a vocabulary of 11 .* \[3\] and 7"),
    ],
)
def test_a_comparison_of_what_does_not_fit_is_refused(
    tokens: list[int], vocabularies: tuple[int, int], message: str
):
    p_hidden, p_head, q_hidden, q_head = inputs(3)
    heads = p_head[: vocabularies[0]], q_head[: vocabularies[1]]
    with pytest.raises(InputError, match=message):
        vocabulary_comparison(p_hidden, heads[0], q_hidden, heads[1], torch.tensor(tokens))


def test_a_comparison_takes_the_first_token_the_last_and_none():
    p_hidden, p_head, q_hidden, q_head = inputs(2)
    found = vocabulary_comparison(p_hidden, p_head, q_hidden, q_head, torch.tensor([0, 10]))
    assert found.log_prob.shape == (2,)
    none = vocabulary_comparison(
        p_hidden[:0], p_head, q_hidden[:0], q_head, torch.empty(0, dtype=torch.int64)
    )
    assert none.kl.shape == (0,)


def test_a_token_for_each_hidden_state():
    hidden, head, _, _ = inputs(5)
    with pytest.raises(ShapeError, match=r"token: expected shape \[5\]"):
        vocabulary_log_prob(hidden, head, torch.zeros(4, dtype=torch.long))
    with pytest.raises(ShapeError, match=r"head: expected \[V, 4\]"):
        vocabulary_log_prob(hidden, head[:, :3], torch.zeros(5, dtype=torch.long))


def test_a_token_that_is_ruled_out_adds_nothing_to_the_entropy_nor_to_gradients():
    """Logits (0, 0, −∞): two tokens of ½, entropy log 2; ∂ entropy / ∂z = −p·(log p + H) = 0."""
    hidden = torch.ones(1, 1, requires_grad=True)
    head = torch.tensor([[0.0], [0.0], [-torch.inf]], requires_grad=True)
    found = vocabulary_log_prob(hidden, head, torch.tensor([0]))
    assert found.entropy.item() == pytest.approx(math.log(2.0))
    assert found.log_prob.item() == pytest.approx(-math.log(2.0))
    (grad,) = torch.autograd.grad(found.entropy.sum() + found.log_prob.sum(), head)
    torch.testing.assert_close(grad, torch.tensor([[0.5], [-0.5], [0.0]]))
    with torch.no_grad():
        both = vocabulary_comparison(hidden, head, hidden, head, torch.tensor([0]))
    assert both.kl.item() == both.kl_reverse.item() == 0.0
    assert both.entropy.item() == pytest.approx(math.log(2.0))


def test_the_gradient_of_the_kl_is_finite_where_both_rule_a_token_out():
    """p = (¼, ¾, 0), q = (½, ½, 0): ∂KL/∂z_q = q − p, ∂KL/∂z_p = p·(log p/q − KL)."""
    hidden = torch.ones(1, 1)
    p_head = torch.tensor([[0.25], [0.75], [0.0]]).log().requires_grad_()
    q_head = torch.tensor([[0.5], [0.5], [0.0]]).log().requires_grad_()
    kl = vocabulary_kl(hidden, p_head, hidden, q_head).sum()
    to_p, to_q = torch.autograd.grad(kl, (p_head, q_head))
    exact = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    assert kl.item() == pytest.approx(exact)
    torch.testing.assert_close(to_q, torch.tensor([[0.25], [-0.25], [0.0]]))
    expected = [0.25 * (math.log(0.5) - exact), 0.75 * (math.log(1.5) - exact), 0.0]
    torch.testing.assert_close(to_p, torch.tensor(expected)[:, None])
