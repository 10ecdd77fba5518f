"""Models: published sizes, the split into features and classifier, seeding, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhpro.data.batches import WINDOW, trimmed
from fedhpro.models import MODELS, Dropout, Net, build, textcnn
from fedhpro.models.cnn import halve

IMAGE_MODELS = [name for name in MODELS if name != "textcnn"]
NATURAL = {"cnn": 512, "mobilenetv2": 1280, "googlenet": 1024, "textcnn": 300}


def small(name: str, num_classes: int = 7, **options: Any) -> Net:
    """The model at the width tests can afford."""
    if name.startswith("resnet"):
        options = {"width": 16, **options}
    if name == "textcnn":
        options = {"vocab": 50, **options}
    return build(name, num_classes, **options)


def batch(name: str, n: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if name == "textcnn":
        return torch.randint(0, 50, (n, 12), generator=generator)
    return torch.randn(n, 3, 32, 32, generator=generator)


def natural_dim(name: str) -> int:
    return NATURAL.get(name, 16 * 8 * (4 if name in ("resnet50", "resnet101") else 1))


def count(net: Net) -> int:
    return sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize(
    ("name", "stem", "classes", "expected"),
    [
        ("resnet18", "7x7", 1000, 11_689_512),
        ("resnet34", "7x7", 1000, 21_797_672),
        ("resnet50", "7x7", 1000, 25_557_032),
        ("resnet101", "7x7", 1000, 44_549_160),
        ("mobilenetv2", "7x7", 1000, 3_504_872),
        ("googlenet", "7x7", 1000, 6_624_904),
        ("resnet10", "3x3", 10, 4_903_242),
        ("cnn", "3x3", 10, 878_538),
    ],
)
def test_published_parameter_counts(name: str, stem: str, classes: int, expected: int) -> None:
    with torch.device("meta"):
        assert count(build(name, classes, stem=stem)) == expected


def test_textcnn_parameter_count() -> None:
    convolutions = sum(32 * 100 * kernel + 100 for kernel in (3, 4, 5))
    assert count(build("textcnn", 4, vocab=1000)) == 1000 * 32 + convolutions + 300 * 4 + 4


def test_resnet10_running_statistics() -> None:
    with torch.device("meta"):
        buffers = dict(build("resnet10", 10).named_buffers())
    assert sum(b.numel() for key, b in buffers.items() if key.endswith(("running_mean", "running_var"))) == 5_760


@pytest.mark.parametrize("name", MODELS)
def test_forward_is_classify_of_features(name: str) -> None:
    net, x = small(name).eval(), batch(name)
    with torch.no_grad():
        z, logits = net.features(x), net(x)
        assert z.shape == (3, net.dim) and net.dim == natural_dim(name)
        assert logits.shape == (3, 7) and net.num_classes == 7
        assert torch.equal(logits, net.classify(z))
        assert torch.equal(logits, F.linear(z, net.classifier.weight, net.classifier.bias))
        assert torch.equal(logits, net(x))
    assert logits.isfinite().all() and logits.std() > 0
    assert (z >= 0).all()


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_stages_are_five_vectors_before_their_relu(name: str) -> None:
    net, x = small(name).eval(), batch(name)
    with torch.no_grad():
        stages, z = net.stages_and_features(x)
        again = net.stages(x)
        depths, _ = net.trunk(x)
        assert torch.equal(z, net.features(x))
    assert len(stages) == 5 and all(torch.equal(a, b) for a, b in zip(stages, again, strict=True))
    assert all(s.dim() == 2 and len(s) == 3 for s in stages)
    assert all((depth < 0).any() for depth in depths)  # rectified values could not be negative
    assert stages[-1].shape == z.shape


def test_last_stage_becomes_the_features_by_relu() -> None:
    """With 1x1 maps the pooling vanishes: only the ReLU stands between the last stage and the features."""
    for name in ("resnet10", "resnet50", "cnn", "googlenet"):
        net = small(name).eval()
        x = torch.randn(2, 3, 32, 32) if name == "cnn" else torch.randn(2, 3, 8, 8)
        with torch.no_grad():
            stages, z = net.stages_and_features(x)
        torch.testing.assert_close(F.relu(stages[-1]), z)


def test_cnn_matches_its_description() -> None:
    net, x = small("cnn"), batch("cnn")
    x = F.max_pool2d(F.relu(F.conv2d(x, net.conv1.weight, net.conv1.bias)), 2)  # type: ignore[union-attr, arg-type]
    x = F.max_pool2d(F.relu(F.conv2d(x, net.conv2.weight, net.conv2.bias)), 2)  # type: ignore[union-attr, arg-type]
    torch.testing.assert_close(net.features(batch("cnn")), F.relu(net.hidden(x.flatten(1))))  # type: ignore[operator]


@pytest.mark.parametrize("side", [24, 25])
def test_the_max_pool_of_the_cnn_is_that_of_torch(side: int) -> None:
    start = torch.randn(4, 16, side, side, generator=torch.Generator().manual_seed(0)).relu()  # with ties, at 0
    ours, theirs = start.clone().requires_grad_(), start.clone().requires_grad_()
    pooled, expected = halve(ours), F.max_pool2d(theirs, 2)
    pooled.backward(start[:, :, : side // 2, : side // 2])
    expected.backward(start[:, :, : side // 2, : side // 2])
    assert torch.equal(pooled, expected)
    assert ours.grad is not None and theirs.grad is not None and torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("lengths", [(3, 7, 1), (20, 4, 9), (0, 2, 2), (0, 0, 0), (17, 16, 15)])
def test_padding_that_no_word_is_near_changes_nothing(lengths: tuple[int, ...]) -> None:
    assert max(textcnn.KERNELS) <= WINDOW
    net, whole = small("textcnn"), torch.zeros(3, 20, dtype=torch.int64)
    for row, length in zip(whole, lengths, strict=True):
        row[:length] = torch.randint(1, 50, (length,))
    found = []
    for x in (trimmed(whole), whole):
        net.zero_grad()
        z = net.features(x)
        (z * torch.linspace(-1, 1, net.dim)).sum().backward()
        found.append([z, *(p.grad for p in net.parameters() if p.grad is not None)])
    assert trimmed(whole).shape[1] == min(20, max(lengths) + 5) and len(found[0]) == 8
    for short, long in zip(*found, strict=True):
        torch.testing.assert_close(short, long)


def test_textcnn_has_no_stages() -> None:
    with pytest.raises(NotImplementedError, match="no stages"):
        small("textcnn").stages(batch("textcnn"))


@pytest.mark.parametrize(("stem", "sides"), [("3x3", (32, 32, 4)), ("3x3/2", (16, 16, 2)), ("7x7", (16, 8, 1))])
def test_resnet_stems(stem: str, sides: tuple[int, int, int]) -> None:
    net = small("resnet10", stem=stem).eval()
    depths, _ = net.trunk(batch("resnet10"))
    assert (depths[0].shape[-1], depths[1].shape[-1], depths[4].shape[-1]) == sides


@pytest.mark.parametrize(
    ("name", "stem", "size", "sides"),
    [
        ("mobilenetv2", "7x7", 224, [112, 56, 28, 14, 7]),
        ("mobilenetv2", "3x3", 32, [32, 16, 8, 4, 2]),
        ("mobilenetv2", "3x3/2", 32, [16, 8, 4, 2, 1]),
        ("googlenet", "7x7", 224, [112, 56, 28, 14, 7]),
        ("googlenet", "3x3", 32, [32, 32, 16, 8, 4]),
        ("googlenet", "3x3/2", 32, [16, 16, 8, 4, 2]),
    ],
)
def test_stems_of_mobilenet_and_googlenet(name: str, stem: str, size: int, sides: list[int]) -> None:
    with torch.no_grad():
        depths, _ = build(name, 3, stem=stem).eval().trunk(torch.randn(1, 3, size, size))
    assert [depth.shape[-1] for depth in depths] == sides


@pytest.mark.parametrize("name", MODELS)
def test_gradients_reach_every_parameter(name: str) -> None:
    net = small(name)
    F.cross_entropy(net(batch(name, 4)), torch.tensor([0, 1, 2, 3])).backward()
    for key, parameter in net.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), key


@pytest.mark.parametrize("name", ["resnet10", "resnet50", "mobilenetv2", "googlenet", "cnn"])
def test_stages_carry_gradients(name: str) -> None:
    """No in-place activation may spoil the values that FedRCL differentiates through."""
    net = small(name)
    stages, z = net.stages_and_features(batch(name, 4))
    (sum(s.square().sum() for s in stages) + net.classify(z).sum()).backward()
    assert all(p.grad is not None for p in net.parameters())


@pytest.mark.parametrize("name", ["resnet10", "mobilenetv2", "googlenet", "cnn", "textcnn"])
def test_seed_alone_decides_the_weights(name: str) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, same, other = small(name, seed=3), small(name, seed=3), small(name, seed=4)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(value, same.state_dict()[key]) for key, value in one.state_dict().items())
    assert not torch.equal(one.classifier.weight, other.classifier.weight)


def test_projection_only_when_asked() -> None:
    x = batch("resnet10")
    assert small("resnet10", dim=128).state_dict().keys() == small("resnet10").state_dict().keys()
    projected = small("resnet10", dim=40)
    assert projected.dim == 40 and projected.classifier.weight.shape == (7, 40)
    z = projected.features(x)
    assert z.shape == (3, 40) and (z < 0).any()  # no ReLU follows the projection


def test_pool_to_averages_neighbours() -> None:
    x = batch("googlenet")
    plain, pooled = small("googlenet").eval(), small("googlenet", pool_to=512).eval()
    pooled.load_state_dict({**plain.state_dict(), "classifier.weight": torch.zeros(7, 512)})
    with torch.no_grad():
        torch.testing.assert_close(pooled.features(x), plain.features(x).view(3, 512, 2).mean(2))
    assert isinstance(small("cnn", pool_to=512).pool, nn.Identity)
    assert small("mobilenetv2", pool_to=512).features(x).shape == (3, 512)
    both = small("cnn", pool_to=256, dim=64)
    assert both.features(x).shape == (3, 64) and both.project.weight.shape == (64, 256)


def test_data_shapes() -> None:
    assert build("cnn", 5, channels=1, image_size=28)(torch.randn(2, 1, 28, 28)).shape == (2, 5)
    assert small("resnet10", channels=1)(torch.randn(2, 1, 28, 28)).shape == (2, 7)
    assert small("textcnn", vocab=50, width=8)(batch("textcnn")).shape == (3, 7)


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_last_images_are_made_contiguous(channels: int) -> None:
    permuted = torch.randn(2, 16, 16, channels).permute(0, 3, 1, 2)
    depths, _ = small("resnet10", channels=channels).trunk(permuted)
    assert not depths[0].is_contiguous()  # the layout would spread through the network ...
    seen: list[Tensor] = []
    net = small("resnet10", channels=channels)
    net.get_submodule("stem").register_forward_hook(lambda _, inputs, output: seen.append(output))
    net(permuted)
    assert seen[0].is_contiguous()  # ... were it not stopped at the door


def test_dropout_draws_from_its_generator() -> None:
    net, x = small("textcnn").train(), batch("textcnn")
    z = net.features(x).detach()
    net.dropout.generator = torch.Generator().manual_seed(9)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first, second = net.classify(z), net.classify(z)
    assert torch.equal(torch.get_rng_state(), before)
    net.dropout.generator = torch.Generator().manual_seed(9)
    assert torch.equal(first, net.classify(z)) and not torch.equal(first, second)
    assert torch.equal(copy.deepcopy(net).classify(z), net.classify(z))  # a copy goes on from the same state


def test_dropout_rate_and_scale() -> None:
    dropout, x = Dropout(0.8), torch.ones(20_000)
    dropout.generator = torch.Generator().manual_seed(0)
    y = dropout(x)
    assert abs((y > 0).float().mean() - 0.2) < 0.01
    torch.testing.assert_close(y[y > 0].unique(), torch.tensor([5.0]))
    assert torch.equal(dropout.eval()(x), x)
    dropout.generator = None
    torch.manual_seed(1)
    y = dropout.train()(x)
    torch.manual_seed(1)
    assert torch.equal(dropout(x), y)


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="resnet18"):
        build("resnet-18", 10)
    with pytest.raises(ValueError, match="at least 16"):
        build("resnet10", 10, width=8)
    with pytest.raises(ValueError, match="unknown stem"):
        build("resnet10", 10, stem="5x5")
    with pytest.raises(ValueError, match="fixed width"):
        build("cnn", 10, width=16)
    with pytest.raises(ValueError, match="vocab"):
        build("textcnn", 10)
    with pytest.raises(ValueError, match="16 pixels"):
        build("cnn", 10, image_size=12)


@pytest.mark.parametrize("name", MODELS)
def test_half_the_bits_in_the_trunk_alone(name: str) -> None:
    """In bf16 features and gradients are float32 all the same, and near those of float32."""
    full = small(name, stem="3x3/2").eval()
    half = copy.deepcopy(full)
    half.precision = torch.bfloat16
    expected, z = full.features(batch(name)), half.features(batch(name))
    assert z.dtype == torch.float32
    assert not torch.equal(z, expected) and torch.dist(z, expected) < 0.03 * expected.norm()
    half.classify(z).sum().backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype and p.grad.isfinite().all() for p in half.parameters())
