# workers: 3
# expect-rank: 0
# expect-exit: 1
# expect-cause: LookupError
# expect-cause: punkt_tab
"""Rank 0 prepares the data by another script; the others poll for its result."""
import os
import subprocess
import sys
import time
from pathlib import Path

RANK = int(os.environ["RANK"])

PREPARE = '''
import sys

RESOURCE = """
**********************************************************************
  Resource \x1b[93mpunkt_tab\x1b[0m not found.
  Please use the NLTK Downloader to obtain the resource:

  >>> import nltk
  >>> nltk.download('punkt_tab')

  For more information see: https://www.nltk.org/data.html

  Attempted to load tokenizers/punkt_tab/english/

  Searched in:
    - '/root/nltk_data'
    - '/usr/share/nltk_data'
**********************************************************************
"""

def find(resource):
    raise LookupError(RESOURCE)

print("preparing wikitext: 1801350 lines")
find("tokenizers/punkt_tab/english/")
'''


def prepare(path):
    script = Path("prepare.py")
    script.write_text(PREPARE, encoding="utf-8")
    subprocess.run([sys.executable, str(script), "--out", str(path)], check=True)


def main():
    path = Path("tokens.bin")
    if RANK == 0:
        prepare(path)
    while not path.exists():
        time.sleep(0.2)


main()
