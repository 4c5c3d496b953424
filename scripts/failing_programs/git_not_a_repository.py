# workers: 2
# expect-rank: all
# expect-exit: 1
# expect-cause: not a git repository
# expect-frame: code_version
# expect-hint: git | working directory | --workdir
# misleads: No module
"""Every rank asks git for the commit; the job's working directory is not the clone."""
import os
import subprocess
import time


def code_version():
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": os.path.dirname(os.getcwd()), "LC_ALL": "C"}
    return subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], env=env, text=True).strip()


def arrive():
    open(f"up-{os.environ['RANK']}", "w").close()
    while len([name for name in os.listdir(".") if name.startswith("up-")]) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.02)


def main():
    print("config: lr=0.1 epochs=90 seed=17", flush=True)
    arrive()
    run = {"lr": 0.1, "commit": code_version()}
    print(run)


main()
