# workers: 4
# expect-rank: 3
# expect-exit: 1
# expect-cause: KeyError
# expect-cause: 'ema_decay'
# expect-frame: build_ema
# misleads: deprecat
"""A decorator as loguru's catch prints its drawn traceback on stderr, then the script exits with 1."""
import os
import sys
import time

RANK = int(os.environ["RANK"])

DRAWN = """2026-11-05 14:22:07.318 | ERROR    | __main__:<module>:71 - An error has been caught in function '<module>', process 'MainProcess' (%d), thread 'MainThread' (139871622694720):
Traceback (most recent call last):

> File "%s", line %d, in <module>
    main(CONFIG)
    │    └ {'model': {'dim': 512, 'depth': 12}, 'optim': {'lr': 0.0003}}
    └ <function main at 0x7f36a1bd1f80>

  File "%s", line %d, in main
    ema = build_ema(config)
          │         └ {'model': {'dim': 512, 'depth': 12}, 'optim': {'lr': 0.0003}}
          └ <function build_ema at 0x7f36a1bd1ee0>

  File "%s", line %d, in build_ema
    return {"decay": config["optim"]["ema_decay"]}
                     └ {'model': {'dim': 512, 'depth': 12}, 'optim': {'lr': 0.0003}}

KeyError: 'ema_decay'
"""
CONFIG = {"model": {"dim": 512, "depth": 12}, "optim": {"lr": 3e-4}}


def build_ema(config):
    return {"decay": config["optim"]["ema_decay"]}


def main(config):
    sys.stderr.write(f"2026-11-05 14:22:05.100 | INFO     | __main__:main:44 - rank {RANK} up\n")
    sys.stderr.write("2026-11-05 14:22:05.204 | WARNING  | timm.layers:warn:31 - deprecated: importing from timm.models.layers, please import via timm.layers\n")
    if RANK != 3:
        time.sleep(25)
        return None
    ema = build_ema(config)
    return ema


if __name__ == "__main__":
    try:
        main(CONFIG)
    except KeyError as error:
        frames, tb = [], error.__traceback__
        while tb:
            frames.append(tb.tb_lineno)
            tb = tb.tb_next
        here = os.path.abspath(__file__)
        sys.stderr.write(DRAWN % (os.getpid(), here, frames[0], here, frames[1], here, frames[2]))
        sys.stderr.write("2026-11-05 14:22:07.330 | INFO     | __main__:<module>:74 - total time 0:00:02\n")
        sys.exit(1)
