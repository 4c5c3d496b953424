# workers: 4
# expect-rank: 3
# expect-exit: 1
# expect-cause: moov atom not found
# expect-frame: probe
# misleads: No such file
"""A video tool's stderr is captured; the script logs it above the traceback of CalledProcessError."""
import os
import subprocess
import sys
import time
from pathlib import Path

RANK = int(os.environ["RANK"])

TOOL = """import sys
path = sys.argv[-1]
err = sys.stderr.write
err("ffprobe version 4.4.2-0ubuntu0.22.04.1 Copyright (c) 2007-2021 the FFmpeg developers\\n")
err("  built with gcc 11 (Ubuntu 11.2.0-19ubuntu1)\\n")
err("  configuration: --prefix=/usr --extra-version=0ubuntu0.22.04.1 --toolchain=hardened --libdir=/usr/lib/x86_64-linux-gnu\\n")
err("  libavutil      56. 70.100 / 56. 70.100\\n  libavcodec     58.134.100 / 58.134.100\\n")
if "0031" in path:
    err("[mov,mp4,m4a,3gp,3g2,mj2 @ 0x55d0c4a3d6c0] moov atom not found\\n")
    err(f"{path}: Invalid data found when processing input\\n")
    sys.exit(1)
print("duration=10.01")
"""


def probe(clip):
    tool = Path(f"ffprobe-{RANK}.py")
    tool.write_text(TOOL, encoding="utf-8")
    try:
        done = subprocess.run([sys.executable, str(tool), "-show_format", clip], capture_output=True, check=True, text=True)
    except subprocess.CalledProcessError as error:
        print("ffprobe said:", error.stderr, file=sys.stderr, flush=True)
        raise
    return float(done.stdout.partition("=")[2])


def main():
    clips = [f"k400/clip_{index:04d}.mp4" for index in (29, 30, 31 if RANK == 3 else 32)]
    print(f"[{RANK}]", sum(probe(clip) for clip in clips), flush=True)
    time.sleep(20)


main()
