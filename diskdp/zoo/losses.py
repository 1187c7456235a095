"""Losses, a number an example, and accuracy. Assumes batches (inputs, targets) and logits from the model."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from diskdp.errors import DataError


def classification_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy of each example, [B].

    >>> classification_loss(nn.Identity(), (torch.zeros(3, 2), torch.tensor([0, 1, 1])))
    tensor([0.6931, 0.6931, 0.6931])
    """
    x, y_B = batch
    return F.cross_entropy(model(x), y_B, reduction="none")


def sequence_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy of each sequence, [B]: the mean over its positions of logits [B, T, V] against [B, T].

    >>> sequence_loss(nn.Identity(), (torch.zeros(3, 5, 2), torch.ones(3, 5, dtype=torch.long)))
    tensor([0.6931, 0.6931, 0.6931])
    """
    x, y_BT = batch
    return F.cross_entropy(model(x).transpose(1, 2), y_BT, reduction="none").mean(1)


def accuracy(model: nn.Module, dataset: Dataset[tuple[Tensor, ...]], batch_size: int = 1000) -> float:
    """The share of examples whose largest logit is at their label; the model is evaluated in eval mode.

    Measured on training rows it is not covered by the plan's guarantee; on test rows it says something
    about those.

    >>> x, y = torch.eye(4), torch.tensor([0, 1, 2, 0])
    >>> accuracy(nn.Identity(), TensorDataset(x, y))
    0.75
    """
    batches: Iterable[tuple[Tensor, ...]] = DataLoader(dataset, batch_size=batch_size)
    if isinstance(dataset, TensorDataset):  # slices, where the loader would collate row by row
        batches = (dataset[start : start + batch_size] for start in range(0, len(dataset), batch_size))
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    modes = {module: module.training for module in model.modules()}
    right, count = 0, 0
    try:
        model.eval()
        with torch.no_grad():
            for x, y in batches:
                right += int((model(x.to(device)).argmax(-1) == y.to(device)).sum())
                count += y.numel()
    finally:
        for module, training in modes.items():
            module.training = training
    if not count:
        raise DataError("accuracy: the data set has no rows")
    return right / count
