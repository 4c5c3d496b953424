# workers: 3
# expect-rank: 1
# expect-exit: 1
# expect-cause: got 4097 tokens, the limit is 4096
# expect-frame: check_length
# misleads: state of the sampler
"""A message of one line with 6000 characters of values before the fact; then 2000 lines of state."""
import os
import time

RANK = int(os.environ["RANK"])


class PackingError(Exception):
    pass


def check_length(tokens, limit):
    if len(tokens) > limit:
        raise PackingError(f"cannot pack sample with input_ids={tokens[:1200]}... and labels={tokens[:300]}...: got {len(tokens)} tokens, the limit is {limit}")


def main():
    try:
        for sample in range(30):
            check_length([7] * (4097 if RANK == 1 and sample == 13 else 512), 4096)
            time.sleep(0.02)
    except PackingError as error:
        problem = error
    else:
        problem = None
    if problem is not None:
        import sys
        import traceback

        traceback.print_exception(problem)
        for index in range(2000):
            sys.stderr.write(f"state of the sampler: bucket {index:4d} holds {index % 13} samples, cursor {index * 512}\n")
        sys.exit(1)
    time.sleep(20)


main()
