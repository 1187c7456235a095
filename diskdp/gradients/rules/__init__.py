"""One rule a family of operations: how the gradient of a parameter is read off an operation's input and output."""

from diskdp.gradients.rules.user import default_rules

__all__ = ["default_rules"]
