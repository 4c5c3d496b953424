# expect-rank: all
# expect-exit: 1
# expect-cause: SyntaxError: 'return' outside function
# expect-frame: syntax_error.py:12
# expect-repeats: syntax error
"""The script cannot be compiled: every rank fails at once, and a restart would not help."""

epochs = 3
for epoch in range(epochs):
    print(epoch)

return epochs
