"""Use the device in a worker that may have been forked with torch loaded; with --fail, fail in the
first attempt."""

import os
import sys

from observations import report

warm = "torch" in sys.modules
import torch  # noqa: E402 - whether it was there is the question

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
report(
    warm=warm, attempt=attempt, device=device.type, sum=torch.ones(1000, device=device).sum().item()
)
if "--fail" in sys.argv and attempt == 0:
    raise RuntimeError("asked to fail")
