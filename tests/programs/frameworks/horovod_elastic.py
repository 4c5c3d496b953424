"""A script that is written for elastic Horovod; under a launcher of a fixed number of workers it trains all the same."""

import horovod.torch as hvd
import torch

hvd.init()
model = torch.nn.Linear(1, 1)


@hvd.elastic.run
def train(state):
    for state.batch in range(state.batch, 5):
        hvd.allreduce(torch.ones(1), name="x")
        state.commit()


state = hvd.elastic.TorchState(model=model, batch=0)
train(state)
print(f"batch {state.batch} of {hvd.size()}", flush=True)
hvd.barrier()
hvd.shutdown()
