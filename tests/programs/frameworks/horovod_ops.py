"""What Horovod does under a launcher: each worker prints a line of JSON of what it found.

It initialises four times, in which workers must not meet the addresses of the time before.
"""

import json

import horovod.torch as hvd
import torch

reported = {}
for turn in range(3):
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    reported[f"sum {turn}"] = int(hvd.allreduce(torch.tensor([rank + turn]), op=hvd.Sum, name=f"sum.{turn}"))
    local_ranks = hvd.allgather(torch.tensor([hvd.local_rank()]), name="local.ranks").tolist()
    hvd.shutdown()

# Horovod's own scopes for sets get mixed up unless workers of one local rank are in one set, or in none.
first = hvd.ProcessSet([each for each in range(size) if local_ranks[each] == 0])
others = hvd.ProcessSet([each for each in range(size) if local_ranks[each] > 0])
hvd.init(process_sets=[first, others])
mine = others if local_ranks[rank] else first
reported["of my set"] = int(hvd.allreduce(torch.tensor([rank]), op=hvd.Sum, name="of.set", process_set=mine))
reported["mean"] = float(hvd.allreduce(torch.tensor([float(rank)]), name="mean", compression=hvd.Compression.fp16))
reported["gathered"] = hvd.allgather(torch.full((rank + 1,), rank), name="gathered").tolist()  # of other lengths
reported["from the last"] = hvd.broadcast(torch.tensor([rank * 10]), size - 1, name="from.last").tolist()
reported["object"] = hvd.broadcast_object({"rank": rank}, root_rank=0)
model = torch.nn.Linear(2, 2)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
weights = hvd.allgather(model.weight.detach().reshape(1, -1), name="weights")
reported["same weights"] = bool((weights == weights[0]).all())
reported["large"] = float(hvd.allreduce(torch.ones(1 << 20), op=hvd.Sum, name="large").mean())
reported["place"] = [rank, size, hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]
print(json.dumps(reported), flush=True)
hvd.barrier()
hvd.shutdown()
