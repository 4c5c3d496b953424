# workers: 2
# expect-rank: all
# expect-exit: 1
# expect-cause: EOF when reading a line | trust_remote_code
# expect-hint: stdin | prompt | input | answer
# misleads: EOFError: Ran out of input
"""A library asks on stdin whether to run a repository's code; there is nobody to answer, on each rank."""
import os
import time

QUESTION = (
    "The repository for mosaicml/mpt-7b contains custom code which must be executed to correctly load the model. "
    "You can inspect the repository content at https://hf.co/mosaicml/mpt-7b.\n"
    "You can avoid this prompt in future by passing the argument `trust_remote_code=True`.\n\n"
    "Do you wish to run the custom code? [y/N] "
)


def resolve_trust_remote_code():
    return input(QUESTION).lower() in ("yes", "y", "1")


def from_pretrained(name):
    if not resolve_trust_remote_code():
        raise ValueError(f"Loading {name} requires you to execute the configuration file in that repo on your local machine.")


def main():
    open(f"up-{os.environ['RANK']}", "w").close()
    while len([name for name in os.listdir(".") if name.startswith("up-")]) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.02)
    from_pretrained("mosaicml/mpt-7b")


main()
