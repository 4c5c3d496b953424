"""From how workers ended and what they last said to the first cause, in words and as data.

``first_cause`` decides, ``report`` words it. Import this room only after a worker has failed:
nothing of it is loaded on the way to the first worker.
"""
