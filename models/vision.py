"""Networks of torchvision and timm, with a head of their own, for images of any size."""

from typing import Any, Literal

from torch import nn

from .classifier import Classifier, norm_maker, replace_layer
from .norm import replace_batch_norm

Norm = Literal["group", "batch"]


class TorchVision(Classifier):
    """A classification network of torchvision, untrained.

    The last linear layer is the head; all other layers, in torchvision's order, are the body.

    Args:
        name: The name of the network, such as "resnet50" or "mobilenet_v3_small"
            (`torchvision.models.list_models()`).
        in_channels: The number of channels of an image; other than 3 they replace the first
            convolution.
        norm: "batch" keeps BatchNorm, "group" replaces it by GroupNorm (`replace_batch_norm`).
        small_images: Whether the first convolution becomes one of 3x3 at full resolution, without
            the first max pooling, for images of 32x32 or so.
        arguments: Further arguments of torchvision's function, such as `dropout`.

    Shape: input [B, in_channels, H, W], as torchvision's network takes it; output [B, num_classes].

    Example:
        >>> network = TorchVision("resnet18", num_classes=4, norm="group", small_images=True)
        >>> network(torch.zeros(2, 3, 32, 32)).shape, network.head
        (torch.Size([2, 4]), Linear(in_features=512, out_features=4, bias=True))
    """

    def __init__(
        self,
        name: str,
        num_classes: int = 10,
        in_channels: int = 3,
        norm: Norm = "batch",
        norm_groups: int = 2,
        small_images: bool = False,
        arguments: dict[str, Any] | None = None,
    ) -> None:
        from torchvision.models import get_model, list_models

        if name not in list_models():
            raise ValueError(f"TorchVision.name: {name!r}; torchvision.models has no such network")
        network = get_model(name, weights=None, num_classes=num_classes, **(arguments or {}))
        if in_channels != 3 or small_images:
            _replace_stem(network, in_channels, small_images)
        super().__init__(*_split(network, name, norm, norm_groups))


class Timm(Classifier):
    """A classification network of timm, untrained (`pip install timm`).

    The arguments are the same as for `TorchVision`, with `name` from `timm.list_models()`, any
    `in_channels`, and in `arguments` what `timm.create_model` takes, such as `img_size`.

    Example:
        >>> network = Timm("resnet10t", num_classes=4, norm="group")
        >>> network(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 4])
    """

    def __init__(
        self,
        name: str,
        num_classes: int = 10,
        in_channels: int = 3,
        norm: Norm = "batch",
        norm_groups: int = 2,
        small_images: bool = False,
        arguments: dict[str, Any] | None = None,
    ) -> None:
        try:
            import timm
        except ImportError as error:
            raise ValueError(f"Timm.name: {name!r}; timm is missing, pip install timm") from error
        if not timm.is_model(name):
            raise ValueError(f"Timm.name: {name!r}; timm has no such network")
        options = {"num_classes": num_classes, "in_chans": in_channels, **(arguments or {})}
        network = timm.create_model(name, pretrained=False, **options)
        if small_images:
            _replace_stem(network, in_channels, small_images)
        super().__init__(*_split(network, name, norm, norm_groups))


class AlexNet(TorchVision):
    """AlexNet as in torchvision, by default for small images.

    Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014: five
    convolutions, then linear layers with 4,096 units, 4,096 units and the scores, with dropout. For
    small images the first convolution is 3x3 at full resolution, and the first pooling is left out.
    It has no BatchNorm. Without `small_images` images need at least 63x63.

    Example:
        >>> AlexNet(hidden=64)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_channels: int = 3,
        small_images: bool = True,
        hidden: int = 4096,
        dropout: float = 0.5,
    ) -> None:
        options = {"dropout": dropout}
        super().__init__("alexnet", num_classes, in_channels, "batch", 2, small_images, options)
        if hidden != 4096:
            layers: Any = self.body.classifier
            layers[1] = nn.Linear(256 * 6 * 6, hidden)
            layers[4] = nn.Linear(hidden, hidden)
            self.head = nn.Linear(hidden, num_classes)


class GoogLeNet(TorchVision):
    """GoogLeNet as in torchvision, without auxiliary scores, by default for small images.

    Szegedy et al., "Going Deeper with Convolutions", CVPR 2015, with BatchNorm after every
    convolution and 3x3 in the place of 5x5 convolutions, as in torchvision.

    Example:
        >>> GoogLeNet()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_channels: int = 3,
        norm: Norm = "group",
        norm_groups: int = 2,
        small_images: bool = True,
        dropout: float = 0.2,
    ) -> None:
        options = {"aux_logits": False, "init_weights": False, "dropout": dropout}
        super().__init__(
            "googlenet", num_classes, in_channels, norm, norm_groups, small_images, options
        )


class DenseNet121(TorchVision):
    """DenseNet-121 as in torchvision, by default for small images.

    Huang, Liu, van der Maaten, Weinberger, "Densely Connected Convolutional Networks", CVPR 2017.

    Example:
        >>> DenseNet121()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_channels: int = 3,
        norm: Norm = "group",
        norm_groups: int = 2,
        small_images: bool = True,
    ) -> None:
        super().__init__("densenet121", num_classes, in_channels, norm, norm_groups, small_images)


def _split(
    network: nn.Module, name: str, norm: str, norm_groups: int
) -> tuple[nn.Module, nn.Linear]:
    """Returns the network without its last linear layer, and that layer."""
    norm_maker(name, norm, norm_groups)  # checks `norm`
    if norm == "group":
        replace_batch_norm(network, norm_groups)
    layers = [(n, m) for n, m in network.named_modules() if any(True for _ in m.parameters(False))]
    path, head = layers[-1]
    if not isinstance(head, nn.Linear):
        raise ValueError(
            f"{name}: its last layer {path} is a {type(head).__name__}, not a linear layer; give "
            "the class itself, by its import path"
        )
    replace_layer(network, path, nn.Identity())
    return network, head


def _replace_stem(network: nn.Module, in_channels: int, small_images: bool) -> None:
    """Gives the first convolution other channels, and for small images another size and stride."""
    path, old = next((n, m) for n, m in network.named_modules() if isinstance(m, nn.Conv2d))
    kernel: Any = old.kernel_size
    stride: Any = old.stride
    padding: Any = old.padding
    if small_images:
        kernel = (3, 3)
        stride = (1, 1)
        padding = (1, 1)
        pools = (n for n, m in network.named_modules() if isinstance(m, nn.MaxPool2d))
        if old.stride == stride:
            raise ValueError(
                f"{type(network).__name__}.small_images: true; its first convolution has stride 1 "
                f"already, so that it takes small images as it is"
            )
        if (pool := next(pools, None)) is not None:
            replace_layer(network, pool, nn.Identity())
    stem = nn.Conv2d(
        in_channels, old.out_channels, kernel, stride, padding, bias=old.bias is not None
    )
    replace_layer(network, path, stem)
