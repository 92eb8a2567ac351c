r"""Values of formulas in LaTeX, such as `s = \gamma^{\lfloor n / k \rfloor}`: what docstrings and pages say, as numbers."""

import math
import re

import numpy as np

_TOKEN = re.compile(r"\\[a-zA-Z]+|\d+(?:\.\d+)?|[a-zA-Z]|[-+/^_(){},]")
_FUNCTIONS = {"cos": np.cos, "exp": np.exp, "ln": np.log, "min": np.minimum, "max": np.maximum}
_ENDS = {None, ")", "}", ",", "+", "-", "\\bmod", "\\rfloor", "\\rvert"}


def evaluate(latex, symbols):
    """The value with these symbols by name (`gamma`, `b_0`, `SNR`), numbers or arrays."""
    parser = _Parser(_TOKEN.findall(re.sub(r"\\text\{(\w+)\}", r"\\\1 ", latex)), symbols)
    value = parser.sum()
    assert parser.next is None, (latex, parser.next)
    return value


class _Parser:
    def __init__(self, tokens, symbols):
        self.tokens, self.symbols = [*tokens], symbols

    @property
    def next(self):
        return self.tokens[0] if self.tokens else None

    def take(self, wanted=None):
        assert wanted in (None, self.next), (wanted, self.tokens)
        return self.tokens.pop(0)

    def sum(self):
        value = -self.product() if self.next == "-" and self.take() else self.product()
        while self.next in ("+", "-", "\\bmod"):
            sign, other = self.take(), self.product()
            value = value % other if sign == "\\bmod" else value + other if sign == "+" else value - other
        return value

    def product(self):
        value = self.power()
        while self.next not in _ENDS:
            value = value / self.power() if self.next == "/" and self.take() else value * self.power()
        return value

    def power(self):
        value = self.atom()
        return value ** self.group() if self.next == "^" and self.take() else value

    def group(self):
        """What an exponent or an argument is: one thing, or several in braces."""
        return self.between("{", "}") if self.next == "{" else self.atom()

    def between(self, left, right):
        self.take(left)
        value = self.sum()
        self.take(right)
        return value

    def atom(self):
        if self.next == "(":
            return self.between("(", ")")
        token = self.take()
        name = token.removeprefix("\\")
        if token[0].isdigit():
            return float(token)
        if name == "lfloor":
            self.tokens.insert(0, token)
            return np.floor(self.between("\\lfloor", "\\rfloor"))
        if name == "lvert":
            self.tokens.insert(0, token)
            return np.abs(self.between("\\lvert", "\\rvert"))
        if name == "frac":
            return self.group() / self.group()
        if name == "sqrt":
            return np.sqrt(self.group())
        if name in _FUNCTIONS:
            return self.call(_FUNCTIONS[name])
        if self.next == "_" and self.take():
            name = f"{name}_{self.take().removeprefix(chr(92))}"
        return {"pi": math.pi, **self.symbols}[name]

    def call(self, function):
        exponent = self.group() if self.next == "^" and self.take() else 1
        if self.next != "(":
            return function(self.power()) ** exponent
        self.take("(")
        arguments = [self.sum()]
        while self.next == "," and self.take():
            arguments.append(self.sum())
        self.take(")")
        return function(*arguments) ** exponent
