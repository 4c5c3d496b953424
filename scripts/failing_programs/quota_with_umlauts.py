# workers: 3
# expect-rank: 2
# expect-exit: 1
# expect-cause: Disk quota exceeded
# expect-cause: Einbettungen_größe_768.npy
# expect-frame: speichere
# expect-hint: quota
# misleads: DeprecationWarning
"""Der Rang 2 überschreitet das Kontingent beim Schreiben der Einbettungen; ein Ausstieg über raise from None."""
import errno
import os
import time
import warnings

RANK = int(os.environ["RANK"])


class Datei:
    """A file on a file system with quotas: 8 MiB are left."""

    def __init__(self, name):
        self.name, self.rest = name, 8 << 20

    def write(self, data):
        self.rest -= len(data)
        if self.rest < 0 and RANK == 2:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), self.name)


def speichere(datei, blöcke):
    for block in range(blöcke):
        datei.write(b"\0" * (1 << 20))
        print(f"Rang {RANK}: Block {block} von {blöcke} geschrieben · {'▇' * block}", flush=True)
        time.sleep(0.05)


def main():
    warnings.warn("np.trapz is deprecated — nutze np.trapezoid", DeprecationWarning, stacklevel=1)
    speichere(Datei("/home/müller/Läufe/Einbettungen_größe_768.npy"), 12)
    time.sleep(20)


main()
