# workers: 4
# expect-rank: 3
# expect-exit: 1
# expect-cause: ClientResponseError
# expect-cause: 403
# expect-frame: fetch_shard
# expect-hint: token | permission | credential | access | 403
"""asyncio streams shards; one answer of the object store is 403, the group wraps it twice."""
import asyncio
import os

RANK = int(os.environ["RANK"])


class ClientResponseError(Exception):
    def __init__(self, status, message, url):
        self.status = status
        super().__init__(f"{status}, message={message!r}, url={url!r}")


ClientResponseError.__module__ = "aiohttp.client_exceptions"


async def fetch_shard(index):
    await asyncio.sleep(0.05 * index)
    if RANK == 3 and index == 2:
        raise ClientResponseError(403, "Forbidden", "https://storage.example.org/laion/shard-02.tar?X-Amz-Expires=3600")
    await asyncio.sleep(3)
    return index


async def fetch_epoch(shards):
    async with asyncio.TaskGroup() as group:
        return [group.create_task(fetch_shard(shard)) for shard in shards]


async def main():
    async with asyncio.TaskGroup() as group:
        group.create_task(fetch_epoch(range(4)), name="epoch-0")
        group.create_task(asyncio.sleep(15), name="metrics")


asyncio.run(main())
