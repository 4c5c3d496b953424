# expect-rank: all
# expect-exit: 2
# expect-cause: the following arguments are required: --data
# expect-repeats: usage error
"""The script's own argparse refuses the command line."""

import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--data", required=True)
parser.parse_args([])
