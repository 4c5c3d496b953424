"""Find the first cause of a failure from the workers' exits and last output, as text and as data.

Import this package only after a worker has failed: a job without failures loads nothing of it.
"""
