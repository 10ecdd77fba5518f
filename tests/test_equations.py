"""Each equation against a plain reference written from the paper, against autograd, and at its edges."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

from fedhpro import equations as eq

SIZES = [(2, 3, 4), (5, 2, 7), (397, 5, 16)]  # C, I, d


def sample(C, d, n=40, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randn(n, d, generator=g, dtype=dtype),
        torch.randint(0, C, (n,), generator=g),
        torch.randn(C, d, generator=g, dtype=dtype),
        torch.randn(C, generator=g, dtype=dtype),
    )


def hyper_sample(C, I, d, seed=1):
    return torch.randn(C, I, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Eq 2


@pytest.mark.parametrize("C,I,d", SIZES)
def test_class_means(C, I, d):
    z, y, *_ = sample(C, d)
    means, counts = eq.class_means(z, y, C)
    for c in range(C):
        rows = z[y == c]
        assert counts[c] == len(rows)
        torch.testing.assert_close(means[c], rows.mean(0) if len(rows) else torch.zeros(d, dtype=z.dtype))


# Eq 4


def test_global_prototypes_three_weightings():
    means = torch.tensor([[[1.0, 2.0], [9.0, 9.0]], [[5.0, 6.0], [7.0, 8.0]]])
    counts = torch.tensor([[3, 0], [1, 4]])
    weighted, present = eq.global_prototypes(means, counts)
    torch.testing.assert_close(weighted, torch.tensor([[2.0, 3.0], [7.0, 8.0]]))
    assert present.tolist() == [True, True]
    paper, _ = eq.global_prototypes(means, counts, "paper")
    torch.testing.assert_close(paper, torch.tensor([[1.0, 1.5], [7.0, 8.0]]))  # halved where two clients hold it
    uniform, _ = eq.global_prototypes(means, counts, "uniform")
    torch.testing.assert_close(uniform, torch.tensor([[3.0, 4.0], [7.0, 8.0]]))
    with pytest.raises(ValueError, match="allowed are"):
        eq.global_prototypes(means, counts, "median")


@pytest.mark.parametrize("weighting", ["weighted", "paper", "uniform"])
def test_global_prototypes_ignore_what_an_absent_class_carries(weighting):
    means = torch.full((2, 3, 4), float("nan"))
    means[1, 2] = 1.0
    prototypes, present = eq.global_prototypes(means, torch.tensor([[0, 0, 0], [0, 0, 5]]), weighting)
    assert present.tolist() == [False, False, True]
    assert prototypes.isfinite().all() and (prototypes[2] == 1).all() and (prototypes[:2] == 0).all()


# Eq 5 and 6


@pytest.mark.parametrize("C,I,d", SIZES)
def test_class_gradients_equal_autograd_through_a_classifier(C, I, d):
    z, y, *_ = sample(C, d)
    classifier = torch.nn.Linear(d, C).double()
    z.requires_grad_()
    F.cross_entropy(classifier(z), y, reduction="sum").backward()
    gradients, counts = eq.class_gradients(z.detach(), y, classifier.weight.detach(), classifier.bias.detach())
    for c in range(C):
        expected = z.grad[y == c].mean(0) if (y == c).any() else torch.zeros(d, dtype=z.dtype)
        torch.testing.assert_close(gradients[c], expected)
        assert counts[c] == (y == c).sum()


def test_mean_gradients_is_unweighted_over_holders():
    gradients = torch.tensor([[[2.0], [1.0]], [[4.0], [99.0]], [[0.0], [3.0]]])
    mean, present = eq.mean_gradients(gradients, torch.tensor([[100, 1], [1, 0], [1, 1]]))
    torch.testing.assert_close(mean, torch.tensor([[2.0], [2.0]]))
    assert present.all()


# Eq 7 to 9


@pytest.mark.parametrize("C,I,d", SIZES)
def test_hyper_gradients_equal_autograd(C, I, d):
    _, _, W, b = sample(C, d)
    S = hyper_sample(C, I, d).requires_grad_()
    labels = torch.arange(C)[:, None].expand(C, I)
    F.cross_entropy((S @ W.T + b).reshape(C * I, C), labels.reshape(-1), reduction="sum").backward()
    torch.testing.assert_close(eq.hyper_gradients(S.detach(), W, b), S.grad.mean(1))


def test_matching_loss_values():
    target = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 0.0], [1e-30, 0.0]])
    ours = torch.tensor([[5.0, 0.0], [-2.0, 0.0], [0.0, 3.0], [1.0, 1.0], [1e-25, 0.0]])
    expected = torch.tensor([0.0, 2.0, 1.0, 0.0, 0.0])
    torch.testing.assert_close(eq.matching_loss(target, ours), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("C,I,d", SIZES)
def test_match_equals_autograd_descent(C, I, d):
    z, y, W, b = sample(C, d, n=4 * C)
    target, counts = eq.class_gradients(z, y, W, b)
    S, lr, losses = hyper_sample(C, I, d), 0.3, []
    ours, trace = eq.match(S, target, counts > 0, W, b, steps=3, lr=lr)
    for _ in range(3):
        S = S.detach().requires_grad_()
        cosine = F.cosine_similarity(target, eq.hyper_gradients(S, W, b), dim=1, eps=1e-30)
        loss = torch.where(counts > 0, 1 - cosine, 0.0)
        losses.append(loss.detach())
        (grad,) = torch.autograd.grad(loss.sum(), S)
        S = S - lr * grad
    torch.testing.assert_close(ours, S.detach())
    torch.testing.assert_close(trace, torch.stack(losses), atol=1e-9, rtol=1e-7)


def test_match_reduces_the_loss_and_starts_its_trace_before_the_first_step():
    z, y, W, b = sample(6, 12, n=200)
    target, counts = eq.class_gradients(z, y, W, b)
    S = hyper_sample(6, 5, 12)
    matched, trace = eq.match(S, target, counts > 0, W, b, steps=200, lr=1.0)
    torch.testing.assert_close(trace[0], eq.matching_loss(target, eq.hyper_gradients(S, W, b)))
    assert trace.shape == (200, 6)
    assert (trace[-1] < trace[0]).all()
    assert eq.matching_loss(target, eq.hyper_gradients(matched, W, b)).max() < 0.05


def test_match_leaves_untouched_a_class_with_no_target():
    z, y, W, b = sample(4, 6)
    target, counts = eq.class_gradients(z, y, W, b)
    present = counts > 0
    present[1] = False  # nobody holds class 1
    target[2] = 0  # class 2 is perfectly fitted by all that hold it
    S = hyper_sample(4, 3, 6)
    matched, trace = eq.match(S, target, present, W, b)
    assert torch.equal(matched[1:3], S[1:3]) and not torch.equal(matched[0], S[0])
    assert (trace[:, 1:3] == 0).all()


def test_match_with_no_steps_is_the_frozen_control():
    z, y, W, b = sample(3, 4)
    target, counts = eq.class_gradients(z, y, W, b)
    S = hyper_sample(3, 2, 4)
    matched, trace = eq.match(S, target, counts > 0, W, b, steps=0)
    assert torch.equal(matched, S) and trace.shape == (0, 3)


def test_match_survives_the_tiny_gradients_of_a_fitted_client():
    z, y, W, b = sample(3, 4, dtype=torch.float32)
    target, counts = eq.class_gradients(z, y, W, b)
    S = hyper_sample(3, 2, 4).float()
    normal, _ = eq.match(S, target, counts > 0, W, b)
    tiny, trace = eq.match(S, target * 1e-25, counts > 0, W, b)
    torch.testing.assert_close(tiny, normal)
    assert trace.isfinite().all()


def direct_match(hyper, target, weight, bias, steps, lr):
    """Eq 9 with every step taken in all d dimensions, by autograd; cosines that tiny vectors do not bring to 0 / 0."""

    def unit(v):
        v = v / v.detach().abs().amax(1, keepdim=True)
        return v / v.norm(dim=1, keepdim=True)

    for _ in range(steps):
        hyper = hyper.detach().requires_grad_()
        loss = 1 - (unit(target) * unit(eq.hyper_gradients(hyper, weight, bias))).sum(1)
        hyper = hyper - lr * torch.autograd.grad(loss.sum(), hyper)[0]
    return hyper.detach()


@pytest.mark.parametrize("dtype, rtol", [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("C,I,d", [(10, 5, 512), (100, 5, 64), (60, 2, 16)])
def test_match_in_the_row_space_is_the_descent_in_all_dimensions(C, I, d, dtype, rtol):
    z, y, W, b = sample(C, d, n=4 * C, dtype=dtype)
    W = W / d**0.5 + 1  # rows with much in common, which no gradient sees
    target, counts = eq.class_gradients(z, y, W, b)
    S = hyper_sample(C, I, d).to(dtype)
    matched, _ = eq.match(S, target, counts > 0, W, b, steps=30, lr=0.1)
    expected = direct_match(S.double(), *(v.double() for v in (target, W, b)), steps=30, lr=0.1)
    torch.testing.assert_close(matched.double(), torch.where((counts > 0)[:, None, None], expected, S.double()),
                               rtol=rtol, atol=rtol)  # fmt: skip


@pytest.mark.parametrize("gap", [20, 80, 92, 95, 98, 103, 110])
def test_match_is_finite_where_other_classes_have_next_to_no_probability(gap):
    """From a gap of 88 in float32 they are below the smallest normal number: slopes must not become infinite."""
    C = 4
    S, target = (
        gap * torch.eye(C)[:, None].repeat(1, 2, 1),
        torch.randn(C, C, generator=torch.Generator().manual_seed(0)),
    )
    matched, trace = eq.match(S, target, torch.ones(C, dtype=torch.bool), torch.eye(C), torch.zeros(C))
    assert matched.isfinite().all() and trace.isfinite().all() and (trace >= -1e-5).all()


def test_match_of_hyper_prototypes_that_the_classifier_knows_already():
    """Their own gradients are of the order of 1e-20: squares of them do not exist in float32."""
    C, d = 4, 8
    g = torch.Generator().manual_seed(0)
    W = torch.eye(C, d) + 0.1 * torch.randn(C, d, generator=g)
    S = 45 * torch.eye(C, d)[:, None] + torch.randn(C, 3, d, generator=g)
    b, target = torch.zeros(C), torch.randn(C, d, generator=g)
    exact = [v.double() for v in (S, target, W, b)]
    gradients = eq.hyper_gradients(exact[0], *exact[2:])
    assert 1e-22 < gradients.abs().amax(1).min() < 1e-17
    torch.testing.assert_close(eq.hyper_gradients(S, W, b).double(), gradients, rtol=1e-4, atol=0)
    matched, trace = eq.match(S, target, torch.ones(C, dtype=torch.bool), W, b, steps=30, lr=0.1)
    torch.testing.assert_close(matched.double(), direct_match(*exact, steps=30, lr=0.1), rtol=1e-4, atol=1e-4)
    assert (trace[-1] < trace[0]).all()


# Eq 10


def test_client_margin_by_hand():
    means = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 0.0]])
    all_present = eq.client_margin(means, torch.tensor([1, 2, 3]))
    assert all_present.item() == pytest.approx(2 * (5 + 0 + 5) / 4)  # ordered pairs over (C-1)^2
    two = eq.client_margin(means, torch.tensor([1, 2, 0]))
    assert two.item() == pytest.approx(2 * 5 / 4)  # the divisor keeps all classes
    assert eq.client_margin(means, torch.tensor([0, 7, 0])).item() == 0
    assert eq.client_margin(means, torch.tensor([0, 0, 0])).item() == 0


# Eq 11 to 13


@pytest.mark.parametrize("C,I,d", SIZES)
def test_similarity(C, I, d):
    z, *_ = sample(C, d, n=4)
    S = hyper_sample(C, I, d)
    expected = F.cosine_similarity(z[:, None, None], S[None], dim=3).mean(2)
    torch.testing.assert_close(eq.similarity(z, S), expected)


def printed_hpcl(z, y, S, margin, tau):
    """Eq 12 with its exponentials as printed: only for margins small enough not to overflow."""
    s = eq.similarity(z, S)
    loss = z.new_zeros(())
    for i, c in enumerate(y.tolist()):
        others = [j for j in range(len(S)) if j != c]
        loss = loss + torch.log(1 + torch.exp((s[i, others] + margin) / tau).sum() / torch.exp(s[i, c] / tau))
    return loss / len(y)


@pytest.mark.parametrize("C,I,d", SIZES)
@pytest.mark.parametrize("margin", [0.0, 1.0])
def test_hpcl_as_printed(C, I, d, margin):
    z, y, *_ = sample(C, d, n=6)
    S = hyper_sample(C, I, d)
    torch.testing.assert_close(eq.hpcl(z, y, S, margin, 0.1), printed_hpcl(z, y, S, margin, 0.1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("margin", [0.0, 1.0, 20.0, 400.0])
def test_hpcl_is_finite_with_the_right_gradient_for_any_margin(margin, dtype):
    z, y, *_ = sample(5, 8, dtype=dtype)
    S = hyper_sample(5, 3, 8).to(dtype)
    z.requires_grad_()
    loss = eq.hpcl(z, y, S, margin, 0.05)
    (grad,) = torch.autograd.grad(loss, z)
    assert loss.isfinite() and grad.isfinite().all() and grad.abs().max() > 0
    # d/ds of softplus(LSE - own) by hand: sigmoid(.) * (softmax over negatives - onehot) / tau / n
    s = eq.similarity(z, S)
    with torch.no_grad():
        onehot = F.one_hot(y, 5).bool()
        negatives = (s / 0.05).masked_fill(onehot, -math.inf)
        gate = torch.sigmoid(negatives.logsumexp(1) - s[onehot] / 0.05 + margin / 0.05)
        slope = gate[:, None] * (negatives.softmax(1) - onehot.to(dtype)) / 0.05 / len(y)
    (expected,) = torch.autograd.grad(s, z, slope)
    torch.testing.assert_close(grad, expected)


def test_hpcl_and_hpal_skip_classes_without_anchors():
    z, y, *_ = sample(4, 6)
    S = hyper_sample(4, 1, 6)
    present = torch.tensor([True, True, False, True])
    kept = torch.tensor([0, 1, 3])
    rows = y != 2
    renumbered = torch.tensor([0, 1, -1, 2])[y[rows]]
    share = rows.double().mean()
    torch.testing.assert_close(
        eq.hpcl(z, y, S, 0.3, 0.1, present), eq.hpcl(z[rows], renumbered, S[kept], 0.3, 0.1) * share
    )
    torch.testing.assert_close(eq.hpal(z, y, S, present), eq.hpal(z[rows], renumbered, S[kept]) * share)
    nobody = torch.zeros(4, dtype=torch.bool)
    z.requires_grad_()
    loss = eq.hpcl(z, y, S, 20.0, 0.05, nobody) + eq.hpal(z, y, S, nobody)
    (grad,) = torch.autograd.grad(loss, z)
    assert loss == 0 and (grad == 0).all()


def test_hpal_by_hand():
    S = torch.tensor([[[0.0, 0.0], [2.0, 0.0]], [[5.0, 5.0], [5.0, 5.0]]])  # mean of class 0: (1, 0)
    z = torch.tensor([[1.5, 3.0], [5.0, 5.0]])
    expected = (0.5 * 0.5**2 + (3 - 0.5)) / 2  # one quadratic and one linear coordinate, mean over two samples
    assert eq.hpal(z, torch.tensor([0, 1]), S).item() == pytest.approx(expected)


def test_gradcheck_all_of_them():
    C, I, d, n = 3, 2, 4, 7
    z, y, W, b = sample(C, d, n=n)
    S, K = hyper_sample(C, I, d), 2
    means, counts = hyper_sample(K, C, d, seed=3), torch.tensor([[1, 2, 0], [2, 0, 0]])
    present = torch.tensor([True, True, False])
    target = hyper_sample(1, C, d, seed=4)[0]
    for t in (z, W, b, S, means, target):
        t.requires_grad_()
    margin = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    cases = [
        (lambda z: eq.class_means(z, y, C)[0], (z,)),
        (lambda m: eq.global_prototypes(m, counts)[0], (means,)),
        (lambda m: eq.global_prototypes(m, counts, "paper")[0], (means,)),
        (lambda m: eq.mean_gradients(m, counts)[0], (means,)),
        (lambda z, W, b: eq.class_gradients(z, y, W, b)[0], (z, W, b)),
        (eq.hyper_gradients, (S, W, b)),
        (eq.matching_loss, (target, S.mean(1).detach().requires_grad_())),
        (lambda S, t, W, b: eq.match(S, t, present, W, b, steps=2, lr=0.5), (S, target, W, b)),
        (lambda m: eq.client_margin(m, torch.tensor([1, 1, 1])), (means[0].detach().requires_grad_(),)),
        (eq.similarity, (z, S)),
        (lambda z, S, m: eq.hpcl(z, y, S, m, 0.1), (z, S, margin)),
        (lambda z, S: eq.hpal(z, y, S), (z, S)),
    ]
    for function, inputs in cases:
        assert gradcheck(function, inputs)


def test_zero_gradients_give_no_nan():
    target, zeros = torch.ones(2, 3, requires_grad=True), torch.zeros(2, 3, requires_grad=True)
    loss = eq.matching_loss(target, zeros)
    assert loss.tolist() == [1, 1]
    loss.sum().backward()
    assert target.grad.isfinite().all() and zeros.grad.isfinite().all()
    target = torch.tensor([[1.0, 2.0], [0.0, 0.0]], requires_grad=True)
    ours = torch.ones(2, 2, requires_grad=True)
    eq.matching_loss(target, ours).sum().backward()
    assert target.grad.isfinite().all() and ours.grad.isfinite().all() and (ours.grad[1] == 0).all()
    # a classifier so sure of itself that the hyper-prototypes' own gradients are exactly 0
    W, S = 1e4 * torch.eye(2), 1e4 * torch.eye(2)[:, None]
    matched, trace = eq.match(S, torch.ones(2, 2), torch.tensor([True, True]), W, torch.zeros(2))
    assert torch.equal(matched, S) and trace.isfinite().all()


def test_client_margin_ignores_what_an_absent_class_carries():
    means = torch.tensor([[0.0, 0.0], [3.0, 4.0], [float("nan"), 1.0]])
    assert eq.client_margin(means, torch.tensor([1, 2, 0])).item() == pytest.approx(2 * 5 / 4)
