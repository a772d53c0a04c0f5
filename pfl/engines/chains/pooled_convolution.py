"""A convolution followed by 2x2 max pooling, as one matrix product, for TorchScript.

The convolutions of PyTorch use a part of a CPU's vector units if there are few output channels,
and its pooling is slow. Here the four outputs that are pooled are four rows of a matrix, whose
columns are the pixels that any of the four reads. Memory has the samples last, so that each
operation works on long rows; the tensors still are [B, C, H, W].
"""

# No annotations from __future__: `kernels` compiles these functions with TorchScript.
import torch
from torch import Tensor


def windows(x: Tensor, height: int, width: int, padding: list[int]) -> Tensor:
    """Returns the windows of images x [B, C, H, W], two pixels apart: [C height width, n B].

    A window is what a convolution reads for a 2x2 square of its outputs. The samples come last
    in memory, so that one matrix product serves all of them.
    """
    b = x.size(0)
    channels = x.size(1)
    rows = x.size(2) + 2 * padding[0]
    columns = x.size(3) + 2 * padding[1]
    images = x.permute(1, 2, 3, 0)
    if padding[0] + padding[1] > 0:
        images = x.new_zeros([channels, rows, columns, b])
        inner = images.narrow(1, padding[0], x.size(2)).narrow(2, padding[1], x.size(3))
        inner.copy_(x.permute(1, 2, 3, 0))
    n = (rows - height) // 2 + 1
    m = (columns - width) // 2 + 1
    row = columns * b
    read = images.contiguous().as_strided(
        [channels, height, width, n, m, b], [rows * row, row, b, 2 * row, 2 * b, 1]
    )
    return read.reshape(channels * height * width, n * m * b)


def sum_windows(d: Tensor, height: int, width: int, padding: list[int], x: Tensor) -> Tensor:
    """Returns the derivative by the images x of a function whose derivative by `windows` is d."""
    b = x.size(0)
    channels = x.size(1)
    rows = x.size(2) + 2 * padding[0]
    columns = x.size(3) + 2 * padding[1]
    n = (rows - height) // 2 + 1
    m = (columns - width) // 2 + 1
    # Images consist of 2x2 tiles, and windows of whole tiles: first sum over the rows of tiles.
    parts = d.view(channels, height // 2, 2, width, n, m * b)
    total = d.new_zeros([channels, 2, width, (rows + 1) // 2, m * b])
    for i in range(height // 2):
        total.narrow(3, i, n).add_(parts.select(1, i))
    parts = total.view(channels, 2, width // 2, 2, (rows + 1) // 2, m, b)
    total = d.new_zeros([channels, 2, 2, (rows + 1) // 2, (columns + 1) // 2, b])
    for j in range(width // 2):
        total.narrow(4, j, m).add_(parts.select(2, j))
    images = total.permute(0, 3, 1, 4, 2, 5).reshape(channels, rows + rows % 2, -1, b)
    images = images.narrow(1, padding[0], x.size(2)).narrow(2, padding[1], x.size(3))
    return images.permute(3, 0, 1, 2)


def copies(matrix: Tensor, w: Tensor) -> Tensor:
    """Returns the places [2, 2, *w] of kernels w in the matrix for `windows`, a view of it.

    A row of the matrix is one output of a square: the kernel, moved by a row, a column, or both.
    """
    outputs = w.size(0)
    channels = w.size(1)
    height = w.size(2)
    width = w.size(3)
    a, b, c, d, e, f = matrix.view(2, 2, outputs, channels, height + 1, width + 1).stride()
    sizes = [2, 2, outputs, channels, height, width]
    return matrix.as_strided(sizes, [a + e, b + f, c, d, e, f])


def squares(x: Tensor, w: Tensor, padding: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a convolution's outputs, by their place in a square, and what `..._backward` needs.

    Kernels w [K, C, h, w] have odd sides and move by one pixel. The outputs are [4, K, n B], the
    places of a square are 0 1 above 2 3; a last row or column without a pair is left out.
    """
    read = windows(x, w.size(2) + 1, w.size(3) + 1, padding)
    matrix = w.new_zeros([4 * w.size(0), read.size(0)])
    copies(matrix, w).copy_(w)
    return torch.mm(matrix, read).view(4, w.size(0), -1), read, matrix


def squares_backward(
    four: Tensor,
    x: Tensor,
    w: Tensor,
    read: Tensor,
    matrix: Tensor,
    padding: list[int],
    wanted: list[bool],
) -> tuple[Tensor, Tensor]:
    """Returns the derivatives by x and w, those that are wanted; `four` is that by the outputs."""
    four = four.reshape(4 * w.size(0), -1)
    by_x = four
    by_w = w
    if wanted[0]:
        products = torch.mm(matrix.mT, four)
        by_x = sum_windows(products, w.size(2) + 1, w.size(3) + 1, padding, x)
    if wanted[1]:
        own = copies(torch.mm(four, read.mT), w)
        by_w = own[0, 0] + own[0, 1] + own[1, 0] + own[1, 1]  # `sum` takes twice as long
    return by_x, by_w


def greatest(four: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Returns the maxima of squares [4, K, n B], and what `greatest_backward` needs."""
    upper = torch.maximum(four[0], four[1])
    lower = torch.maximum(four[2], four[3])
    kept = [four[1] - four[0], four[3] - four[2], lower - upper]
    return torch.maximum(upper, lower), kept


def greatest_backward(d: Tensor, kept: list[Tensor]) -> Tensor:
    """Returns the derivative by the squares, [4, K, n B]; d is that by their maxima, [K, n B]."""
    right, lower_right, below = kept
    # Of equal outputs the first one has the derivative, as in PyTorch's pooling.
    four = torch.empty([4, d.size(0), d.size(1)], dtype=d.dtype, device=d.device)
    lower = torch.ops.aten.threshold_backward(d, below, 0)
    upper = d - lower
    torch.ops.aten.threshold_backward(upper, right, 0, grad_input=four[1])
    torch.ops.aten.threshold_backward(lower, lower_right, 0, grad_input=four[3])
    torch.sub(upper, four[1], out=four[0])
    torch.sub(lower, four[3], out=four[2])
    return four


def height_of_squares(x: Tensor, w: Tensor, padding: list[int]) -> int:
    """Returns how many squares are above each other."""
    return (x.size(2) + 2 * padding[0] - w.size(2) - 1) // 2 + 1


def pooled_convolution(
    x: Tensor, w: Tensor, bias: Tensor | None, padding: list[int]
) -> tuple[Tensor, list[Tensor]]:
    """Returns the pooled outputs for images [B, C, H, W] and what `..._backward` needs of them."""
    four, read, matrix = squares(x, w, padding)
    y, kept = greatest(four)
    if bias is not None:
        y.add_(bias.unsqueeze(1))
    rows = height_of_squares(x, w, padding)
    images = y.view(w.size(0), rows, -1, x.size(0)).permute(3, 0, 1, 2)
    return images, [read, matrix, kept[0], kept[1], kept[2]]


def pooled_convolution_backward(
    d: Tensor, x: Tensor, w: Tensor, kept: list[Tensor], padding: list[int], wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the derivatives by x, w and the bias, those that are wanted; d is that by the output.

    `pooled_convolution` returned `kept`.
    """
    d = d.permute(1, 2, 3, 0).reshape(w.size(0), -1)
    four = greatest_backward(d, kept[2:])
    by_x, by_w = squares_backward(four, x, w, kept[0], kept[1], padding, wanted)
    by_bias = d
    if wanted[2]:
        by_bias = d.sum(1)
    return by_x, by_w, by_bias
