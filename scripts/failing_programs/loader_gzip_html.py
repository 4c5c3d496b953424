# workers: 2
# expect-rank: 1
# expect-exit: 1
# expect-cause: BadGzipFile
# expect-cause: Not a gzipped file
# expect-frame: __getitem__
# expect-hint: download | HTML | corrupt
# misleads: /dev/shm
"""One shard of rank 1 is the error page of a web server; a data-loader worker opens it as gzip."""
import gzip
import json
import os
import time

from torch.utils.data import DataLoader, Dataset

RANK = int(os.environ["RANK"])


class Shards(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        path = f"shard-{RANK}-{index}.json.gz"
        if RANK == 1 and index == 9:
            with open(path, "wb") as file:
                file.write(b"<!DOCTYPE html><html><title>404 Not Found</title></html>")
        else:
            with gzip.open(path, "wt") as file:
                json.dump({"x": index}, file)
        with gzip.open(path, "rt") as file:
            return json.load(file)["x"]


def main():
    for batch in DataLoader(Shards(), batch_size=2, num_workers=2):
        print(f"[{RANK}] {batch.tolist()}", flush=True)
    time.sleep(30)


if __name__ == "__main__":
    main()
