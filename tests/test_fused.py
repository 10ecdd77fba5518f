"""The Triton kernels against torch's own BatchNorm in float64; without a GPU they run in Triton's interpreter."""

import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="triton comes with torch for GPUs only")

from fedhpro.data.batches import Transform
from fedhpro.engines.fused import batch_norm, crop_and_flip

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def outcome(norm, x, add, relu, slope, training, fused):
    norm.train(training)
    x, add = x.clone().requires_grad_(), None if add is None else add.clone().requires_grad_()
    if fused and not training:
        with torch.no_grad():
            return {"y": batch_norm(norm, x, add, relu)}
    if fused:
        y = batch_norm(norm, x, add, relu)
    else:
        y = norm(x) if add is None else norm(x) + add
        y = F.relu(y) if relu else y
    if not training:
        return {"y": y.detach()}
    y.backward(slope)
    found = {"y": y.detach(), "dx": x.grad, "dw": norm.weight.grad, "db": norm.bias.grad}
    found |= {"mean": norm.running_mean, "var": norm.running_var}
    return found if add is None else found | {"dadd": add.grad}


@pytest.mark.parametrize("shape", [(7, 64, 5, 3), (33, 128, 4, 4), (2, 100, 3, 3), (64, 16, 8, 8), (3, 512, 1, 1)])
@pytest.mark.parametrize("with_add", [False, True])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("training", [True, False])
def test_as_in_float64(shape, with_add, relu, training):
    rng = torch.Generator().manual_seed(0)
    x, add, slope = (torch.randn(shape, generator=rng).to(DEVICE) for _ in range(3))
    x = 3 * x + 50  # far from 0: where sums of squares lose their digits
    add = add if with_add else None
    norms = []
    for dtype in (torch.float64, torch.float32):
        norm = nn.BatchNorm2d(shape[1], device=DEVICE, dtype=dtype)
        with torch.no_grad():
            norm.weight.copy_(torch.linspace(0.5, 2, shape[1]))
            norm.bias.copy_(torch.linspace(-1, 1, shape[1]))
            norm.running_mean.fill_(49.0)
        norms.append(norm)
    double = None if add is None else add.double()
    expected = outcome(norms[0], x.double(), double, relu, slope.double(), training, fused=False)
    found = outcome(norms[1], x, add, relu, slope, training, fused=True)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        scale = float(expected[name].abs().max())
        assert float((value - expected[name]).abs().max()) < 2e-5 * max(scale, 1), name


def test_bfloat16():
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(8, 32, 4, 4, generator=rng).to(DEVICE, torch.bfloat16)
    norm = nn.BatchNorm2d(32, device=DEVICE)
    expected = F.relu(F.batch_norm(x.float(), None, None, training=True))
    y = batch_norm(norm, x, None, True)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize(("crop", "flip"), [(4, True), (2, False), (0, True)])
def test_crop_and_flip(crop, flip):
    rng = torch.Generator().manual_seed(2)
    x = torch.randint(0, 256, (40, 3, 18, 12), generator=rng).byte().to(DEVICE)
    rows = torch.randint(0, 40, (9,), generator=rng)
    transform = Transform((0.1, 0.2, 0.3), (0.5, 0.4, 0.6), crop, flip)
    expected = transform.batch(x.cpu(), rows, torch.Generator().manual_seed(3))
    moves = transform.draw(9, torch.Generator().manual_seed(3)).contiguous().to(DEVICE)
    found = crop_and_flip(x, rows.to(DEVICE), moves, crop, *transform.normalisation(x))
    assert found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=1e-6)
