from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

PROGRAM = Path(__file__).parents[2] / "programs" / "toolkit" / "mistakes.py"
TORCH = torch.__version__

SAID = [
    "wrap() needs a process group (hint: call distlaunch.toolkit.init() before it)",
    "RANK is set, but not WORLD_SIZE and MASTER_ADDR and MASTER_PORT (hint: a launcher sets all of them; without it, unset RANK)",
    "RANK is 3, but WORLD_SIZE 2 (hint: ranks count from 0)",
    "RANK is 'one' (hint: a whole number is expected)",
    "mpirun has started 4 workers (OMPI_COMM_WORLD_SIZE), and none has a RANK (hint: use distlaunch train instead of mpirun, or set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT)",
    "srun has started 4 workers (SLURM_STEP_NUM_TASKS), and none has a RANK (hint: use distlaunch train instead of srun, or set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT)",
    "RANK is empty (hint: a launcher sets it to a number; without one, unset RANK)",
    "RANK is set, but not LOCAL_RANK (hint: a launcher sets it and LOCAL_WORLD_SIZE, which count the workers of this node)",
    "LOCAL_RANK is 5, LOCAL_WORLD_SIZE 2 and WORLD_SIZE 2 (hint: local ranks count the workers of a node, from 0)",
    "LOCAL_RANK is 0, LOCAL_WORLD_SIZE 3 and WORLD_SIZE 2 (hint: local ranks count the workers of a node, from 0)",
    "MASTER_PORT is 99999 (hint: ports end at 65535)",
    f"init(device='cuda'): torch {TORCH} sees no accelerator here (hint: leave device out to use what there is)",
    "init(device='gpu'): torch knows no such device (hint: 'cpu', 'cuda', or leave it out)",
    "init(seed=...) is '1180591620717411303424' (hint: it takes a whole number of 64 bits, or None)",
    "init(seed=...) is 'x' (hint: it takes a whole number of 64 bits, or None)",
    "init() takes no 'seeed' (hint: did you mean seed?)",
    "init(backend=...) is 'bogus' (hint: torch knows fake, gloo, mpi, nccl, ucc, xccl)",
    "init(backend='nccl'): this worker has no GPU (hint: leave backend out)",
    "init(collective_timeout=...) is '-1' (hint: it takes seconds, above 0)",
    "init(collective_timeout=...) is 'inf' (hint: it takes seconds, above 0)",
    f"CUDA_VISIBLE_DEVICES=0,1, but torch {TORCH} sees no accelerator (hint: check that torch is built for it and that the driver is new enough; init(device='cpu') trains without)",
    "DISTLAUNCH_BACKEND_OPTIONS is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
    "DISTLAUNCH_BACKEND_OPTIONS is not JSON: maximum recursion depth exceeded while decoding a JSON array from a unicode string",
    'DISTLAUNCH_BACKEND_OPTIONS is not a JSON object: \'[1]\' (hint: {"sharding": "full"})',
    "DISTLAUNCH_BACKEND_OPTIONS: colective-timeout: no such option (hint: did you mean collective-timeout?)",
    "DISTLAUNCH_BACKEND_OPTIONS: collective-timeout is '0' (hint: it takes seconds, above 0)",
    "--backend horovod: No module named 'horovod' (hint: HOROVOD_WITH_PYTORCH=1 pip install --no-build-isolation horovod)",
    "init(seed=4): init() was called before with seed=3 (hint: close the first context before: close(), or a with block)",
    "init(seed=0): init() was called before with seed=3 (hint: close the first context before: close(), or a with block)",
    "init(seed=None): init() was called before with seed=3 (hint: close the first context before: close(), or a with block)",
    "init(backend='gloo'): init() was called before with backend=None (hint: close the first context before: close(), or a with block)",
    "init() was called in a forked process, whose parent has the process group (hint: call it only in the processes that the launcher starts)",
    "wrap() takes no 'wrap_class' (hint: did you mean wrap_classes?)",
    "wrap() takes no 'collective_timeout' (hint: there are find_unused_parameters, bucket_mb, static_graph, sharding, precision, cpu_offload, wrap_min_params, wrap_classes, activation_checkpointing, compression)",
    "wrap(sharding=...) is 'ful' (hint: it takes full, grad, hybrid)",
    "wrap(bucket_mb=...) is 'True' (hint: it takes a whole number above 0)",
    "DISTLAUNCH_BACKEND_OPTIONS: cpu-offload is 'yes' (hint: it takes true or false)",
    "ReLU has no parameters (hint: pass the whole model, and only one that is trained)",
    "Linear has no parameters that require a gradient (hint: pass the whole model, and only one that is trained)",
    "Linear is on the meta device, so it has no values to start with (hint: make the model on the CPU; wrap() moves it)",
    "precision fp16 needs a GPU: on CPUs its gradients vanish (hint: -o precision=bf16)",
    "wrap-classes: Sequential has no Block (hint: it has Linear)",
    "wrap-classes: Linear has no Liner (hint: it has no parts, and is sharded as a whole)",
    "activation-checkpointing: Sequential has no parts that are known to be suitable (hint: name the classes of its parts: -o wrap-classes=Block)",
    "the SGD trains no parameter of Linear (hint: make the optimizer from model.parameters(), before or after wrap())",
    "LBFGS keeps all parameters in one vector, and cannot train those that FSDP2 shards (hint: another optimizer, or --backend pytorch-ddp)",
    "torch's Rprop cannot step parameters that FSDP2 shards (hint: another optimizer, or --backend pytorch-ddp)",
    "torch's fused SGD cannot step parameters that FSDP2 shards (hint: leave out fused=True)",
    "0 has sparse gradients, which FSDP2 cannot sum up (hint: drop sparse=True, or train with --backend pytorch-ddp)",
    "scale is a single number, which FSDP2 cannot shard (hint: make it a vector of length 1, or train with --backend pytorch-ddp)",
    "this SGD trains parameters of Linear that FSDP2 has replaced by shards (hint: model, optimizer = wrap(model, optimizer), or make it after wrap())",
    "FSDPLinear is already wrapped",
    "wrap() does not wrap models for --backend deepspeed (hint: deepspeed.initialize(model=model, optimizer=optimizer), or --backend pytorch-ddp or fsdp)",
    "wrap() needs a process group (hint: call distlaunch.toolkit.init() before it)",
    "init(seed=1): init() was called before with seed=0 (hint: close the first context before: close(), or a with block)",
    "init() was called after the process group had been formed (hint: remove init_process_group(): init() forms the group)",
]


def test_each_mistake_gives_a_one_line_error(clean_env):
    done = subprocess.run(
        [sys.executable, PROGRAM], capture_output=True, text=True, env=clean_env, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == SAID


def test_heartbeat_alone_does_not_import_torch(clean_env):
    program = (
        "import sys\n"
        "from distlaunch.toolkit import heartbeat\n"
        "heartbeat(step=1)\n"
        "print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=clean_env, timeout=60
    )
    assert done.stdout == "[]\n", done.stderr


def test_an_unknown_name_is_an_attribute_error(clean_env):
    program = "import distlaunch.toolkit as t\nprint(all(hasattr(t, name) for name in t.__all__), hasattr(t, 'rank'))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=clean_env, timeout=60
    )
    assert done.stdout == "True False\n", done.stderr
