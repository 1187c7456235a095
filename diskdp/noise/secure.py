"""Gaussian noise whose key is bound to the sums it is added to: no two sums ever share it.

`GaussianNoise` relies on its caller to release one sum a step: two sums with the same noise show their difference.
Here the key depends on the sums themselves (binding.py), so that nothing has to be relied on. A repeated step (after a
crash, in a copy of the run) that comes to the same sums releases the same numbers, and one that comes to other sums
(another library or thread count, another learning rate) releases them under independent noise: a second release, to be
charged as one, but no more than that.

What else is in the key:
- The standard deviation, in all its bits. The same sum under the same z at two deviations s and t would be given
  away: (t (x + s z) - s (x + t z)) / (t - s) = x.
- The way this machine computes normals (`arithmetic`). Elsewhere the same z could differ in its last place, and two
  releases of one sum would show where it rounds.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from diskdp.noise.binding import bound_key
from diskdp.noise.gaussian import Normals, arithmetic, refuse_unfit, result_dtype
from diskdp.noise.keys import Secret


class SecureNoise:
    """Adds N(0, std² I) to named tensors, from a secret and the tensors themselves.

    >>> noise, zeros = SecureNoise(Secret.from_seed(0)), torch.zeros(300, 100)
    >>> first, again = (noise.add({"w": zeros}, std=2.0, step=0)["w"] for _ in range(2))
    >>> other = noise.add({"w": zeros + 2**-40}, std=2.0, step=0)["w"]
    >>> torch.equal(first, again), bool((first - other).abs().max() > 1)
    (True, True)
    """

    def __init__(self, secret: Secret) -> None:
        self._secret = secret
        self._normals = Normals()

    def add(self, sums: Mapping[str, Tensor], std: float, step: int) -> dict[str, Tensor]:
        """New tensors `sum + std * z`, z ~ N(0, I): float64 for float64 sums, float32 for all others."""
        noised = {name: total.detach().to(result_dtype(total), copy=True) for name, total in sums.items()}
        self.add_to(noised, std, step)
        return noised

    def add_to(self, sums: Mapping[str, Tensor], std: float, step: int) -> None:
        """Add `std * z` to float32 and float64 tensors in their own memory, a block at a time.

        All of a release's tensors have to be given at once: the noise of each depends on the bits of all. The CPU
        hashes them and makes the noise, in up to `torch.get_num_threads()` threads, for sums on other devices too.
        """
        refuse_unfit(sums, std)
        if std == 0:
            return
        key = bound_key(self._secret, "secure noise", step, (float(std).hex(), arithmetic()), sums)
        here = {name: t.detach() for name, t in sums.items() if t.device.type == "cpu" and t.is_contiguous()}
        self._normals.write(here, key, std, adding=True)
        for name, total in sums.items():
            if name not in here:
                drawn = torch.empty(total.shape, dtype=total.dtype)
                self._normals.write({name: drawn}, key, std, adding=False)
                total.detach().add_(drawn.to(total.device))
