"""Checks of what a model is asked to accept. Assumes that shapes leave out the batch."""

from __future__ import annotations

from collections.abc import Sequence

from diskdp.errors import ConfigError


def image_shape(model: str, input_shape: Sequence[int], least: int = 1) -> tuple[int, int, int]:
    """The shape as (channels, height, width), or an error that names the model.

    >>> image_shape("cnn5", [3, 32, 32])
    (3, 32, 32)
    """
    if len(input_shape) != 3:
        raise ConfigError(f"{model}: needs images [channels, height, width], the inputs are {list(input_shape)}")
    channels, height, width = input_shape
    if min(height, width) < least:
        raise ConfigError(f"{model}: needs images of at least {least}×{least}, the inputs are {height}×{width}")
    return channels, height, width
