"""Rules for operations of your own; `docs/rules.md` shows how.

>>> from diskdp import rules
>>> sorted(rules.__all__)
['OperationUse', 'Visible', 'outer', 'remove', 'rule', 'visible']
"""

from diskdp.gradients.rules.user import OperationUse, Visible, outer, remove, rule, visible

__all__ = ["OperationUse", "Visible", "outer", "remove", "rule", "visible"]
