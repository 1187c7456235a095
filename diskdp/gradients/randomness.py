"""The global random state that a model may draw from, so that every point sees the same dropout masks.

And how to do without masks, where a model is asked what it does with another number of examples.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from diskdp.gradients.trace import BACKWARD, without_override


@dataclass(frozen=True)
class RandomState:
    """A snapshot of torch's, numpy's and Python's global generators.

    >>> before = RandomState.capture()
    >>> first = torch.rand(3)
    >>> before.restore()
    >>> bool((torch.rand(3) == first).all())
    True
    """

    cpu: Tensor
    cuda: tuple[Tensor, ...]
    numpy: Any
    python: Any

    @classmethod
    def capture(cls) -> RandomState:
        cuda = tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else ()
        return cls(torch.get_rng_state(), cuda, np.random.get_state(), random.getstate())  # noqa: NPY002

    @classmethod
    def seeded(cls, seed: int) -> RandomState:
        """A state of its own for each seed; leaves the generators in it."""
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        random.seed(seed)
        return cls.capture()

    def moved(self) -> bool:
        """Whether anything was drawn since."""
        now = RandomState.capture()
        devices = len(now.cuda) == len(self.cuda) and all(torch.equal(a, b) for a, b in zip(now.cuda, self.cuda))
        numpy = all(np.array_equal(a, b) for a, b in zip(now.numpy, self.numpy))
        return not (torch.equal(now.cpu, self.cpu) and devices and numpy and now.python == self.python)

    def to_tree(self) -> dict[str, Any]:
        """As tensors and plain values, for a checkpoint."""
        name, words, *rest = self.numpy
        return {
            "cpu": self.cpu,
            "cuda": list(self.cuda),
            "numpy": [name, [int(word) for word in words], *rest],
            "python": self.python,
        }

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> RandomState:
        """
        >>> before = RandomState.capture()
        >>> RandomState.from_tree(before.to_tree()).moved()
        False
        """
        name, words, *rest = tree["numpy"]
        numpy = (name, np.array(words, dtype=np.uint32), *rest)
        return cls(tree["cpu"], tuple(tree["cuda"]), numpy, tree["python"])

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(list(self.cuda))
        np.random.set_state(self.numpy)  # noqa: NPY002
        random.setstate(self.python)


class WithoutDropout(TorchFunctionMode):
    """Dropout does nothing inside, although modules are in training mode; what else is drawn has one value.

    >>> with WithoutDropout():
    ...     F.dropout(torch.ones(3), 0.5)
    tensor([1., 1., 1.])
    """

    def __torch_function__(
        self, func: Any, types_: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUT:
            return args[0] if args else kwargs["input"]
        name = getattr(func, "__name__", "")
        if name in _STILLED:
            with torch.random.fork_rng():  # nothing counts as drawn
                drawn = func(*args, **kwargs)
            return drawn.fill_(_STILLED[name]) if not drawn.requires_grad else torch.full_like(drawn, _STILLED[name])
        if name in _RECURRENT and any(type(a) is float for a in args):  # dropout between layers
            args = tuple(0.0 if type(a) is float else a for a in args)
        if func is F.scaled_dot_product_attention:
            args, kwargs = (*args[:4], *(0.0 for _ in args[4:5]), *args[5:]), {**kwargs}
            if len(args) < 5:
                kwargs["dropout_p"] = 0.0
        if func is F.multi_head_attention_forward or func in BACKWARD:  # what drops inside, or is computed again there
            with self:
                return without_override(func)(*args, **kwargs)
        return func(*args, **kwargs)


_DROPOUT = frozenset(
    {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}
    | {torch.dropout, torch.dropout_, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout}
)
_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
_STILLED = {
    **dict.fromkeys(("bernoulli", "bernoulli_"), 1.0),
    **dict.fromkeys(("rand", "rand_like", "uniform_"), 0.5),
    **dict.fromkeys(("randn", "randn_like", "normal_"), 0.0),
}
