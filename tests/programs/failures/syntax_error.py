# expect-rank: all
# expect-exit: 1
# expect-cause: SyntaxError
# expect-frame: syntax_error.py:11
# expect-repeats: syntax error
# ruff: noqa
"""The script cannot be compiled: every rank fails at once, and a restart would not help."""


def train(epochs):
    if epochs > 3
        return epochs
