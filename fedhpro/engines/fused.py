"""BatchNorm together with the sum and the ReLU behind it: Triton kernels for channels_last tensors on a GPU.

A training step of a small ResNet spends a third of its time in these element-wise passes. Here a layer takes two of
them forward (statistics; normalise, add, ReLU) and two backward, instead of up to nine. Sums run in float32 around the
first pixel as a pivot, in a fixed order: the same bits every time.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

COLUMNS, ROWS = 64, 32  # of a tile
PROGRAMS = 264  # two for each multiprocessor of an H200, which is where more stop to help


def batch_norm(norm: nn.BatchNorm2d, x: Tensor, add: Tensor | None = None, relu: bool = False) -> Tensor:
    """relu(norm(x) + add), in the mode that `norm` is in."""
    x = x.contiguous(memory_format=torch.channels_last)
    if add is not None:
        add = add.contiguous(memory_format=torch.channels_last)
    if norm.training:
        return _Train.apply(x, norm.weight, norm.bias, add, norm, relu)
    assert norm.running_mean is not None and norm.running_var is not None
    scale = torch.rsqrt(norm.running_var + norm.eps)
    return _normalised(x, norm.running_mean, scale, norm.weight, norm.bias, add, relu)


def crop_and_flip(x: Tensor, rows: Tensor, moves: Tensor, crop: int, offset: Tensor, scale: Tensor) -> Tensor:
    """Images `rows` of uint8 x, moved (data/batches.py) and normalised, as float32 in channels_last."""
    n, (C, H, W) = len(rows), x.shape[1:]
    out = torch.empty(n, C, H, W, device=x.device, memory_format=torch.channels_last)
    _crop_and_flip[(n, triton.cdiv(H * W, 256))](x, rows, moves, offset, scale, out, n, crop, C, H, W, 256)
    return out


class _Train(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, add: Tensor | None, norm: nn.BatchNorm2d, relu: bool
    ) -> Tensor:
        C, M = x.shape[1], x.numel() // x.shape[1]
        parts = _parts(M, C)
        sums = torch.empty(2, parts, C, device=x.device)
        mean, scale = torch.empty(2, C, device=x.device)
        grid = (triton.cdiv(C, COLUMNS), parts)
        _sums[grid](x, sums, M, C, triton.cdiv(M, parts), ROWS, COLUMNS, num_warps=4)
        _statistics[(triton.cdiv(C, 16),)](
            x, sums, mean, scale, norm.running_mean, norm.running_var, M, C, parts, norm.momentum, norm.eps,
            triton.next_power_of_2(parts), 16, num_warps=4,
        )  # fmt: skip
        y = _normalised(x, mean, scale, weight, bias, add, relu)
        ctx.save_for_backward(x, y if relu else None, weight, mean, scale)
        ctx.relu, ctx.added = relu, add is not None
        return y

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        x, y, weight, mean, scale = ctx.saved_tensors
        dy = slopes[0].contiguous(memory_format=torch.channels_last)
        C, M = x.shape[1], x.numel() // x.shape[1]
        parts = _parts(M, C)
        sums = torch.empty(2, parts, C, device=x.device)
        dbias, dweight = torch.empty(2, C, device=x.device)
        grid = (triton.cdiv(C, COLUMNS), parts)
        y = x if y is None else y  # any pointer will do where it is not read
        _slope_sums[grid](
            dy, x, y, mean, scale, sums, M, C, triton.cdiv(M, parts), ctx.relu, ROWS, COLUMNS, num_warps=4
        )
        _total[(triton.cdiv(C, 16),)](sums, dbias, dweight, C, parts, triton.next_power_of_2(parts), 16, num_warps=4)
        dx = torch.empty_like(x)
        dadd = torch.empty_like(x) if ctx.added and ctx.relu else dy if ctx.added else None
        _slopes[(triton.cdiv(C, COLUMNS), triton.cdiv(M, ROWS))](
            dy, x, y, weight, mean, scale, dbias, dweight, dx, dx if dadd is None else dadd, M, C,
            ctx.relu, ctx.added and ctx.relu, ROWS, COLUMNS, num_warps=4,
        )  # fmt: skip
        return dx, dweight, dbias, dadd, None, None


def _normalised(
    x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, bias: Tensor, add: Tensor | None, relu: bool
) -> Tensor:
    C, M = x.shape[1], x.numel() // x.shape[1]
    y = torch.empty_like(x)
    _normalise[(triton.cdiv(C, COLUMNS), triton.cdiv(M, ROWS))](
        x, mean, scale, weight, bias, x if add is None else add, y, M, C, add is not None, relu, ROWS, COLUMNS,
        num_warps=4,
    )  # fmt: skip
    return y


def _parts(M: int, C: int) -> int:
    """Into how many parts the rows are cut, so that the sums fill the GPU."""
    return max(1, min(triton.cdiv(M, ROWS), PROGRAMS // triton.cdiv(C, COLUMNS)))


@triton.jit(do_not_specialize=["M", "rows_each"])
def _sums(x, sums, M, C, rows_each, R: tl.constexpr, B: tl.constexpr):
    """Of x - pivot and its square over a part of the rows [M], for a block of channels."""
    part, parts = tl.program_id(1), tl.num_programs(1)
    c = tl.program_id(0) * B + tl.arange(0, B)
    pivot = tl.load(x + c, c < C, 0.0).to(tl.float32)[None, :]
    first = tl.zeros([R, B], tl.float32)
    second = tl.zeros([R, B], tl.float32)
    stop = tl.minimum((part + 1) * rows_each, M)
    for start in range(part * rows_each, stop, R):
        m = start + tl.arange(0, R)
        inside = (m < stop)[:, None] & (c < C)[None, :]
        value = tl.load(x + m[:, None] * C + c[None, :], inside, 0.0).to(tl.float32)
        value = tl.where(inside, value - pivot, 0.0)
        first += value
        second += value * value
    tl.store(sums + part * C + c, tl.sum(first, 0), c < C)
    tl.store(sums + (parts + part) * C + c, tl.sum(second, 0), c < C)


@triton.jit(do_not_specialize=["M", "parts"])
def _statistics(
    x, sums, mean, scale, running_mean, running_var, M, C, parts, momentum, eps, P: tl.constexpr, B: tl.constexpr
):
    c = tl.program_id(0) * B + tl.arange(0, B)
    p = tl.arange(0, P)
    inside = (p < parts)[:, None] & (c < C)[None, :]
    at = p[:, None] * C + c[None, :]
    first = tl.sum(tl.load(sums + at, inside, 0.0), 0) / M
    second = tl.sum(tl.load(sums + parts * C + at, inside, 0.0), 0) / M
    centre = tl.load(x + c, c < C, 0.0).to(tl.float32) + first
    variance = tl.maximum(second - first * first, 0.0)
    tl.store(mean + c, centre, c < C)
    tl.store(scale + c, 1.0 / tl.sqrt(variance + eps), c < C)
    old = tl.load(running_mean + c, c < C, 0.0)
    tl.store(running_mean + c, old + momentum * (centre - old), c < C)
    old = tl.load(running_var + c, c < C, 0.0)
    tl.store(running_var + c, old + momentum * (variance * M / (M - 1) - old), c < C)


@triton.jit(do_not_specialize=["M"])
def _normalise(
    x, mean, scale, weight, bias, add, y, M, C, ADD: tl.constexpr, RELU: tl.constexpr, R: tl.constexpr, B: tl.constexpr
):
    c = tl.program_id(0) * B + tl.arange(0, B)
    m = tl.program_id(1) * R + tl.arange(0, R)
    inside = (m < M)[:, None] & (c < C)[None, :]
    at = m[:, None] * C + c[None, :]
    factor = tl.load(scale + c, c < C, 0.0) * tl.load(weight + c, c < C, 0.0)
    value = tl.load(x + at, inside, 0.0).to(tl.float32) - tl.load(mean + c, c < C, 0.0)[None, :]
    value = value * factor[None, :] + tl.load(bias + c, c < C, 0.0)[None, :]
    if ADD:
        value += tl.load(add + at, inside, 0.0).to(tl.float32)
    if RELU:
        value = tl.maximum(value, 0.0)
    tl.store(y + at, value.to(y.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["M", "rows_each"])
def _slope_sums(dy, x, y, mean, scale, sums, M, C, rows_each, RELU: tl.constexpr, R: tl.constexpr, B: tl.constexpr):
    """Of dy and of dy times the normalised x over a part of the rows: the slopes of bias and weight."""
    part, parts = tl.program_id(1), tl.num_programs(1)
    c = tl.program_id(0) * B + tl.arange(0, B)
    centre = tl.load(mean + c, c < C, 0.0)[None, :]
    factor = tl.load(scale + c, c < C, 0.0)[None, :]
    first = tl.zeros([R, B], tl.float32)
    second = tl.zeros([R, B], tl.float32)
    stop = tl.minimum((part + 1) * rows_each, M)
    for start in range(part * rows_each, stop, R):
        m = start + tl.arange(0, R)
        inside = (m < stop)[:, None] & (c < C)[None, :]
        at = m[:, None] * C + c[None, :]
        slope = tl.load(dy + at, inside, 0.0).to(tl.float32)
        if RELU:
            slope = tl.where(tl.load(y + at, inside, 0.0).to(tl.float32) > 0, slope, 0.0)
        value = (tl.load(x + at, inside, 0.0).to(tl.float32) - centre) * factor
        first += slope
        second += slope * value
    tl.store(sums + part * C + c, tl.sum(first, 0), c < C)
    tl.store(sums + (parts + part) * C + c, tl.sum(second, 0), c < C)


@triton.jit(do_not_specialize=["parts"])
def _total(sums, dbias, dweight, C, parts, P: tl.constexpr, B: tl.constexpr):
    c = tl.program_id(0) * B + tl.arange(0, B)
    p = tl.arange(0, P)
    inside = (p < parts)[:, None] & (c < C)[None, :]
    at = p[:, None] * C + c[None, :]
    tl.store(dbias + c, tl.sum(tl.load(sums + at, inside, 0.0), 0), c < C)
    tl.store(dweight + c, tl.sum(tl.load(sums + parts * C + at, inside, 0.0), 0), c < C)


@triton.jit(do_not_specialize=["M"])
def _slopes(
    dy, x, y, weight, mean, scale, dbias, dweight, dx, dadd, M, C,
    RELU: tl.constexpr, ADD: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0) * B + tl.arange(0, B)
    m = tl.program_id(1) * R + tl.arange(0, R)
    inside = (m < M)[:, None] & (c < C)[None, :]
    at = m[:, None] * C + c[None, :]
    slope = tl.load(dy + at, inside, 0.0).to(tl.float32)
    if RELU:
        slope = tl.where(tl.load(y + at, inside, 0.0).to(tl.float32) > 0, slope, 0.0)
    if ADD:
        tl.store(dadd + at, slope.to(dadd.dtype.element_ty), inside)
    factor = tl.load(scale + c, c < C, 0.0)
    value = (tl.load(x + at, inside, 0.0).to(tl.float32) - tl.load(mean + c, c < C, 0.0)[None, :]) * factor[None, :]
    common = (tl.load(dbias + c, c < C, 0.0)[None, :] + value * tl.load(dweight + c, c < C, 0.0)[None, :]) / M
    result = (slope - common) * (factor * tl.load(weight + c, c < C, 0.0))[None, :]
    tl.store(dx + at, result.to(dx.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["stride", "crop"])
def _crop_and_flip(
    x, rows, moves, offset, scale, out, stride, crop,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0)
    pixel = tl.program_id(1) * B + tl.arange(0, B)
    i, j = pixel // W, pixel % W
    row = tl.load(rows + image)
    top = tl.load(moves + image)
    left = tl.load(moves + stride + image)
    flipped = tl.load(moves + 2 * stride + image)
    from_i = i + top - crop
    from_j = tl.where(flipped > 0, W - 1 - j, j) + left - crop
    inside = (pixel < H * W) & (from_i >= 0) & (from_i < H) & (from_j >= 0) & (from_j < W)
    for c in tl.static_range(C):
        value = tl.load(x + ((row * C + c) * H + from_i) * W + from_j, inside, 0).to(tl.float32)
        add = tl.load(offset + c * H * W + pixel, pixel < H * W, 0.0)
        value = add + value * tl.load(scale + c * H * W + pixel, pixel < H * W, 0.0)
        tl.store(out + (image * H * W + pixel) * C + c, value, pixel < H * W)
