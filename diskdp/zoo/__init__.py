"""Models for private training, and losses. None has batch norm; each takes a tensor and returns logits."""

from diskdp.zoo.cnn5 import CNN5, cnn5
from diskdp.zoo.gpt import GPT, gpt
from diskdp.zoo.linear import Linear, linear
from diskdp.zoo.losses import accuracy, classification_loss, sequence_loss
from diskdp.zoo.mlp import MLP, mlp
from diskdp.zoo.registry import MODELS, build
from diskdp.zoo.vit import ViT, vit
from diskdp.zoo.wrn import WRN, wrn

__all__ = [
    "CNN5",
    "GPT",
    "MLP",
    "MODELS",
    "WRN",
    "Linear",
    "ViT",
    "accuracy",
    "build",
    "classification_loss",
    "cnn5",
    "gpt",
    "linear",
    "mlp",
    "sequence_loss",
    "vit",
    "wrn",
]
