# workers: 2
# expect-rank: all
# expect-exit: 1
# expect-cause: SCRATCH_DIR: unbound variable
# expect-hint: --env | environment
# misleads: numpy
"""The program of the workers is a wrapper: it runs a shell script with set -u; a variable is not passed on."""
import os
import subprocess
import sys
import time
from pathlib import Path

SCRIPT = """set -euo pipefail
export TOKENIZERS_PARALLELISM=false
echo "node $(hostname -s || true) rank $RANK: loading modules" >&2
echo "Lmod Warning: module 'numpy/1.26' is deprecated" >&2
mkdir -p "$SCRATCH_DIR/triton-cache-$RANK"
exec python train.py "$@"
"""


def main():
    env = {name: value for name, value in os.environ.items() if name != "SCRATCH_DIR"}
    rank = env["RANK"]
    script = Path(f"launch-{rank}.sh")
    script.write_text(SCRIPT, encoding="utf-8")
    while len(list(Path().glob("launch-*.sh"))) < int(env["WORLD_SIZE"]):
        time.sleep(0.02)
    code = subprocess.call(["bash", str(script), "--lr", "1e-4"], env=env)
    sys.exit(code)


main()
