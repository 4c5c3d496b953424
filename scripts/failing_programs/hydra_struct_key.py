# workers: 2
# expect-rank: all
# expect-exit: 1
# expect-cause: warmup_stpes
# expect-cause: ConfigAttributeError | not in struct
# expect-hint: config | override | key | spell
"""A configuration key is misspelt; the framework hides the traceback and says how to see it."""
import os
import sys
import time

CONFIG = {"optim": {"lr": 3e-4, "warmup_stpes": 500}, "model": {"name": "vit_l"}}
STRUCT = {"optim": {"lr", "warmup_steps"}, "model": {"name"}}


class ConfigAttributeError(AttributeError):
    def __init__(self, group, key):
        super().__init__(f"Key '{key}' is not in struct\n    full_key: {group}.{key}\n    object_type=dict")


ConfigAttributeError.__module__ = "omegaconf.errors"


def check(config):
    for group, keys in config.items():
        for key in keys:
            if key not in STRUCT[group]:
                raise ConfigAttributeError(group, key)


def run_main(task):
    """Run as hydra's decorator does: one short message for errors of the configuration."""
    try:
        task(CONFIG)
    except ConfigAttributeError as error:
        sys.stderr.write("Error executing job with overrides: ['model=vit_l', 'optim.warmup_stpes=500', 'trainer.devices=4']\n")
        sys.stderr.write(f"{error}\n\n")
        sys.stderr.write("Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.\n")
        sys.exit(1)


def main(config):
    print(f"[2026-11-03 10:11:12,001][root][INFO] - Working directory: {os.path.basename(os.getcwd())}", flush=True)
    open(f"up-{os.environ['RANK']}", "w").close()
    while len([name for name in os.listdir(".") if name.startswith("up-")]) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.02)
    check(config)


run_main(main)
