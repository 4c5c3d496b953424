"""Rows of the table of hints: models, gradients, batches and collectives."""

from __future__ import annotations

from distlaunch.diagnosis.failure_kinds import FailureKind
from distlaunch.diagnosis.hint_row import HintRow

K = FailureKind

SPECIFIC_MODEL_ROWS: tuple[HintRow, ...] = (
    HintRow(
        kind=K.CHECKPOINT,
        hint=(
            "the parameters are divided among the ranks (size 0), so they cannot be loaded "
            "here: load the checkpoint before the model is divided, or within "
            "deepspeed.zero.GatheredParameters"
        ),
        marks=(
            "the shape in current model is torch.size([0])",
            "(which has shape torch.size([0]))",
        ),
    ),
    HintRow(
        kind=K.RANK,
        hint=(
            "the worker's {name} was not passed on to this process: distlaunch sets it for "
            "the workers, so look at the wrapper, the container or the process that the "
            "script starts"
        ),
        pattern=(
            r"KeyError: '(?P<name>RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_RANK"
            r"|GROUP_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)'"
        ),
        types=("KeyError",),
    ),
    HintRow(
        kind=K.RANK,
        hint=(
            "the script reads {name} of another launcher: let it read RANK, LOCAL_RANK and "
            "WORLD_SIZE, which distlaunch sets for each worker"
        ),
        pattern=(
            r"KeyError: '(?P<name>SLURM_(?:PROCID|LOCALID|NTASKS|NODEID)|OMPI_COMM_WORLD_\w+"
            r"|PMI_(?:RANK|SIZE)|MV2_COMM_WORLD_\w+)'"
        ),
        types=("KeyError",),
    ),
)
"""Rows that must precede more general ones."""

MODEL_ROWS: tuple[HintRow, ...] = (
    HintRow(
        kind=K.TENSOR,
        hint=(
            "a tensor of the batch is not on the model's device: move both with "
            ".to(device), where device is the rank's own GPU (LOCAL_RANK)"
        ),
        marks=(
            "input type (",
            "expected all tensors to be on the same device",
        ),
        pattern=(
            r"Input type \((?:torch\.)?(?:cuda\.)?\w+\) and weight type \((?:torch\.)?cuda\."
            r"|Input type \((?:torch\.)?cuda\.\w+\) and weight type \(torch\.(?!cuda)"
            r"|same device, but (?:found at least two devices, "
            r"|got [^\n]{0,80})[^\n]*\bcpu\b"
        ),
    ),
    HintRow(
        kind=K.TENSOR,
        hint=(
            "two tensors have different types: convert one of them with .to(dtype), or run "
            "the model in torch.autocast"
        ),
        marks=(
            "same dtype",
            "expected scalar type",
            "should be the same",
            "expected target dtype to be",
            "scalar types: long",
        ),
        pattern=(
            r"to have the same dtype|must have the same dtype"
            r"|expected scalar type \w+ but found \w+|Input type \([\w.]+\) and (?:weight"
            r"|bias) type \([\w.]+\) should be the same|expected target dtype to be"
            r"|to have one of the following scalar types: Long"
        ),
    ),
    HintRow(
        kind=K.TENSOR,
        hint=(
            "this operation takes no {type} on CPUs: use float32 there, or start the "
            "workers on GPUs ({Opt.NUM_GPUS})"
        ),
        marks=("not implemented for '",),
        pattern=(
            r"\"\w*(?:cpu|CPU|kernel)\w*\" not implemented for '(?P<type>Half|BFloat16"
            r"|Float8_e4m3fn)'"
        ),
    ),
    HintRow(
        kind=K.TENSOR,
        hint=(
            "the shapes of two tensors do not fit: print them at this line, and look at "
            "this rank's batch; the last one of a data set may be smaller (drop_last=True)"
        ),
        marks=(
            "shapes cannot be multiplied",
            "must match the size of tensor",
            "is invalid for input of size",
            "sizes of tensors must match except",
            "channels, but got",
            "to match target batch_size",
            "incompatible shapes: [",
            "size-incompatible: in[0]",
            "is incompatible with the layer",
            "could not be broadcast together with shapes",
            "has a mismatch in its core dimension",
            "view size is not compatible",
        ),
    ),
    HintRow(
        kind=K.TENSOR,
        hint="NumPy has no bfloat16: call .float() before .numpy()",
        marks=("unsupported scalartype bfloat16",),
    ),
    HintRow(
        kind=K.TENSOR,
        hint=("a collective takes a tensor that lies in one piece: call .contiguous() on it first"),
        marks=("tensors must be contiguous",),
    ),
    HintRow(
        kind=K.GRADIENT,
        hint=(
            "the loss does not depend on any trained parameter: look for a frozen model, "
            "torch.no_grad() or a detached tensor; with gradient checkpointing of a frozen "
            "base use use_reentrant=False"
        ),
        marks=("does not require grad and does not have a grad_fn",),
    ),
    HintRow(
        kind=K.GRADIENT,
        hint=(
            "backward passes through the graph of an earlier step: detach what is kept "
            "from step to step (hidden states, summed losses), or call "
            "backward(retain_graph=True)"
        ),
        marks=("trying to backward through the graph a second time",),
    ),
    HintRow(
        kind=K.GRADIENT,
        hint=(
            "a tensor was changed in place before backward: write x = x + 1 instead of x "
            "+= 1; torch.autograd.set_detect_anomaly(True) names its line. With two "
            "forward passes in DDP set broadcast_buffers=False"
        ),
        marks=("has been modified by an inplace operation",),
    ),
    HintRow(
        kind=K.GRADIENT,
        hint="a parameter was changed in place: do that within torch.no_grad()",
        marks=(
            ("a leaf variable that requires grad is being used in an in-place operation"),
            ("a view of a leaf variable that requires grad is being used in an in-place operation"),
        ),
    ),
    HintRow(
        kind=K.GRADIENT,
        hint="backward() starts from one number: take .mean() or .sum() of the loss",
        marks=("grad can be implicitly created only for scalar outputs",),
    ),
    HintRow(
        kind=K.GRADIENT,
        hint=(
            "GradScaler needs float32 parameters: load the model in float32 and let "
            "autocast choose, or use bf16 without GradScaler"
        ),
        marks=("attempting to unscale fp16 gradients",),
    ),
    HintRow(
        kind=K.GRADIENT,
        hint=(
            "no gradient came through GradScaler: call scaler.scale(loss).backward() "
            "before scaler.step(optimizer), with the optimizer of the model's own "
            "parameters"
        ),
        marks=(
            "no inf checks were recorded for this optimizer",
            "attempted step but _scale is none",
            "attempted unscale_ but _scale is none",
        ),
    ),
    HintRow(
        kind=K.BATCH,
        hint=(
            "the rows of a batch have different sizes: pad or crop them, or give the "
            "DataLoader a collate_fn that does"
        ),
        marks=(
            "stack expects each tensor to be equal size",
            "trying to resize storage that is not resizable",
            "each element in list of batch should be of equal size",
        ),
    ),
    HintRow(
        kind=K.BATCH,
        hint=(
            "the data set returned {found}: leave such rows out of the data set, or let a "
            "collate_fn handle them"
        ),
        marks=("default_collate: batch must contain tensors",),
        pattern=r"found <class '(?P<found>[\w.]+)'>",
    ),
    HintRow(
        kind=K.BATCH,
        hint=(
            "this rank's data set is empty: see whether its path exists on this node and "
            "its filter leaves rows, and whether there are fewer files than ranks"
        ),
        marks=("num_samples should be a positive integer value, but got num_samples=0",),
    ),
    HintRow(
        kind=K.BATCH,
        hint=(
            "the DataLoader has a sampler already: leave out shuffle; a DistributedSampler "
            "shuffles by itself if sampler.set_epoch(epoch) is called in each epoch"
        ),
        marks=("sampler option is mutually exclusive with shuffle",),
    ),
    HintRow(
        kind=K.BATCH,
        hint=(
            "the rows have different lengths: pad and cut them (padding=True, "
            "truncation=True, or DataCollatorWithPadding)"
        ),
        marks=(
            "you should probably activate truncation and/or padding",
            "expected sequence of length ",
        ),
    ),
    HintRow(
        kind=K.BATCH,
        hint=(
            "the tokenizer has no token to pad with: set tokenizer.pad_token = tokenizer.eos_token"
        ),
        marks=(
            "asking to pad but the tokenizer does not have a padding token",
            "cannot handle batch sizes > 1 if no padding token is defined",
        ),
    ),
    HintRow(
        kind=K.BATCH,
        hint=("the rows have different lengths: pad them, or make an array with dtype=object"),
        marks=("the requested array has an inhomogeneous shape",),
    ),
    HintRow(
        kind=K.BATCH,
        hint=(
            "the function of map(batched=True) returned columns of another length: return "
            "one value for each row, or name the old columns in remove_columns"
        ),
        marks=("arrowinvalid: column ",),
        pattern=r"Column \d+ named \S+ expected length \d+ but got length \d+",
    ),
    HintRow(
        kind=K.BATCH,
        hint=(
            "each node would read all shards: give WebDataset "
            "nodesplitter=wds.split_by_node, and at least as many shards as ranks"
        ),
        marks=("you need to add an explicit nodesplitter",),
    ),
    HintRow(
        kind=K.BATCH,
        hint=(
            "there are fewer shards than loader workers in all ranks: make more shards, or "
            "use fewer loader workers (num_workers)"
        ),
        marks=("no samples found in dataset; perhaps you have fewer shards than workers",),
    ),
    HintRow(
        kind=K.LOADER,
        hint=(
            "a loader worker gave no batch for that long: num_workers=0 shows what the "
            "data set waits for; a slow file system needs a larger timeout"
        ),
        marks=("dataloader timed out after",),
    ),
    HintRow(
        kind=K.INDEX,
        hint=(
            "a label is outside of the classes: labels go from 0 to the number of classes less 1"
        ),
        marks=("received a label value of",),
        pattern=r"Received a label value of -?\d+ which is outside the valid range",
    ),
    HintRow(
        kind=K.INDEX,
        hint=(
            "an index is outside of the table that is looked up: compare the largest with "
            "the embedding's input_dim"
        ),
        marks=(" is not in [0, ",),
        pattern=r"indices\[[\d,]*\] = -?\d+ is not in \[0, \d+\)",
    ),
    HintRow(
        kind=K.NAN,
        hint=(
            "the model's output is not a number: look at this rank's last batch, use a "
            "lower learning rate, gradient clipping or bf16 instead of fp16"
        ),
        marks=(
            "probability tensor contains either `inf`, `nan`",
            "tensor had nan values",
            "tensor had inf values",
            "tensor had inf and nan values",
            "tensor had inf/nan",
            "nan or inf found in input tensor",
        ),
    ),
    HintRow(
        kind=K.DDP,
        hint=("the model is wrapped, and the wrapper has no {name}: use model.module.{name}"),
        marks=("object has no attribute",),
        pattern=(
            r"'(?:DistributedDataParallel"
            r"|DataParallel)' object has no attribute '(?P<name>\w+)'"
        ),
    ),
    HintRow(
        kind=K.DDP,
        hint=("DDP needs all sizes of the model: pass one batch through it before DDP wraps it"),
        marks=("modules with uninitialized parameters can't be used with",),
    ),
    HintRow(
        kind=K.DDP,
        hint=(
            "device_ids is for a model on one GPU: move the model to the rank's GPU "
            "(LOCAL_RANK) first, and leave device_ids out for a model on CPUs"
        ),
        marks=("device_ids and output_device arguments only work with single-device",),
    ),
    HintRow(
        kind=K.DDP,
        hint=(
            'some parameters got no gradient: strategy="ddp_find_unused_parameters_true", '
            "or use them all in the loss"
        ),
        marks=(
            (
                "it looks like your lightningmodule has parameters that were not used in "
                "producing the loss"
            ),
        ),
    ),
    HintRow(
        kind=K.SHARDED,
        hint=(
            "FSDP wraps parameters of one type together: convert the whole model (and its "
            "adapters) to one type with .to(dtype) before FSDP wraps it"
        ),
        marks=(
            "must flatten tensors with uniform dtype",
            "`flatparameter` requires uniform dtype",
        ),
    ),
    HintRow(
        kind=K.SHARDED,
        hint=(
            "FSDP wraps frozen and trained parameters together: set use_orig_params=True, "
            "or use fully_shard"
        ),
        marks=("must flatten tensors with uniform `requires_grad`",),
    ),
    HintRow(
        kind=K.SHARDED,
        hint=(
            "a parameter that is divided among the ranks was used outside of the wrapped "
            "module's forward: call the wrapped model itself, or gather it "
            "(FSDP.summon_full_params, deepspeed.zero.GatheredParameters)"
        ),
        marks=(
            "but its data is not allocated yet",
            "'weight' must be 2-d",
        ),
    ),
    HintRow(
        kind=K.CHECKPOINT,
        hint=(
            "the checkpoint is of a model of another shape: build the model as it was when "
            "it was saved"
        ),
        marks=(
            "set `ignore_mismatched_sizes` to `false`",
            "`ignore_mismatched_sizes=true`",
        ),
    ),
    HintRow(
        kind=K.CHECKPOINT,
        hint=(
            "the checkpoint is of another model: compare its keys with model.state_dict(); "
            "load_state_dict(strict=False) leaves the differing ones out"
        ),
        marks=("in loading state_dict for",),
        pattern=r"(?:Missing|Unexpected) key\(s\) in state_dict:",
    ),
    HintRow(
        kind=K.CHECKPOINT,
        hint=(
            "the optimizer's state is for other parameters: build the model and the "
            "optimizer's groups as they were when the checkpoint was saved, or do not load "
            "the optimizer"
        ),
        marks=(
            "loaded state dict contains a parameter group that doesn't match",
            "loaded state dict has a different number of parameter groups",
        ),
    ),
    HintRow(
        kind=K.CHECKPOINT,
        hint=(
            "there is no checkpoint in output_dir yet: call "
            "train(resume_from_checkpoint=True) only if get_last_checkpoint(output_dir) "
            "finds one"
        ),
        marks=("no valid checkpoint found in output directory",),
    ),
    HintRow(
        kind=K.CHECKPOINT,
        hint=(
            "the folder has no whole model: see whether the save has ended, and name the "
            "folder that has config.json and the weights (checkpoint-N of a Trainer)"
        ),
        marks=(
            "should have a `model_type` key in its config.json",
            "does not appear to have a file named",
            "error no file named",
            "can't find a valid checkpoint at",
            "can't find 'adapter_config.json' at",
        ),
    ),
    HintRow(
        kind=K.SHAPES,
        hint=(
            "the list must have one tensor for each rank of the group: make it with "
            "dist.get_world_size() entries"
        ),
        marks=(
            "invalid output tensor list at index",
            "tensor list must be same as",
        ),
        pattern=(r"invalid output tensor list at index \d+ \(expected length \d+, got \d+\)"),
    ),
    HintRow(
        kind=K.SHAPES,
        hint=(
            "the output must have world_size times the rows of the input, or the other way "
            "round for reduce_scatter: make it with dist.get_world_size()"
        ),
        marks=(
            "output tensor size must be equal to world_size times input tensor size",
            "input tensor must be the same size as output size times world size",
            "input tensor must be the same size as output size times world_size",
        ),
    ),
    HintRow(
        kind=K.SHAPES,
        hint=(
            "ranks gave Horovod tensors of different shapes or types under one name: all "
            "ranks must reduce the same tensors; pad them, or use hvd.allgather"
        ),
        marks=(
            "mismatched allreduce tensor shapes",
            "mismatched broadcast tensor shapes",
            "mismatched allgather tensor shapes",
            "mismatched data types: one rank",
            "mismatched operations: one rank",
        ),
        tells_why_ranks_did_not_meet=True,
    ),
    HintRow(
        kind=K.RANK,
        hint=(
            "the mesh has {ranks} ranks and the job fewer: make its shape from WORLD_SIZE, "
            "or start that many workers ({Opt.NUM_PROCS} or {Opt.NUM_GPUS})"
        ),
        marks=("mesh should not be bigger than default world size",),
        pattern=r"but found (?P<ranks>\d+) ranks",
    ),
    HintRow(
        kind=K.RANK,
        hint=(
            "the number of workers does not fit the degrees of parallelism: their product "
            "must divide it, so change the degrees or start other numbers "
            "({Opt.NUM_PROCS}, {Opt.NUM_GPUS}, {Opt.NUM_NODES})"
        ),
        marks=(
            "world size",
            "world_size",
            "invalid parallel dims",
        ),
        pattern=(
            r"world[ _]size \(?\d+\)? is not divisible by"
            r"|Invalid parallel dims: [^\n]*!= WORLD_SIZE"
            r"|world[ _]size:? ?\(?\d+\)? (?:must be|should be|is not) (?:divisible"
            r"|a multiple)"
        ),
    ),
    HintRow(
        kind=K.RANK,
        hint=(
            "the host of MASTER_ADDR is not known or reached on this node: see `getent "
            "hosts {host}` there; distlaunch sets MASTER_ADDR, so leave it out of the "
            "script"
        ),
        marks=("cannot be retrieved (gai error",),
        pattern=r"network addresses of \(?(?P<host>[^\s,()]+), \d+\)? cannot be retrieved",
        in_output=True,
        types=(
            "DistNetworkError",
            "RuntimeError",
            "DistStoreError",
            "ValueError",
        ),
        tells_why_ranks_did_not_meet=True,
    ),
    HintRow(
        kind=K.NCCL,
        hint=(
            "NCCL does not take this type: convert the tensor, for example with .to(torch.uint8)"
        ),
        marks=("is not supported for nccl process group",),
    ),
    HintRow(
        kind=K.SAME_GPU,
        hint=(
            "NCCL was called wrongly, mostly because two ranks have one GPU: call "
            "torch.cuda.set_device(LOCAL_RANK) before the group is made; NCCL_DEBUG=WARN "
            "({Opt.ENV}) prints what NCCL refused"
        ),
        marks=("nccl",),
        pattern=(
            r"ncclInvalidUsage|invalid usage \(run with NCCL_DEBUG"
            r"|NCCL error[^\n]*invalid usage"
        ),
    ),
    HintRow(
        kind=K.NCCL,
        hint=(
            "a call of CUDA inside NCCL failed: NCCL_DEBUG=INFO ({Opt.ENV}) names it; "
            "common are full GPU memory, a number of a GPU that the rank does not see, and "
            "a driver that is older than NCCL's CUDA"
        ),
        marks=(
            "unhandled cuda error",
            "ncclunhandledcudaerror",
        ),
    ),
    HintRow(
        kind=K.NCCL,
        hint=(
            "a check inside NCCL failed: NCCL_DEBUG=INFO ({Opt.ENV}) says which; compare "
            "driver, CUDA and NCCL on the nodes, and try NCCL_P2P_DISABLE=1 or "
            "NCCL_IB_DISABLE=1 to see which path fails"
        ),
        marks=(
            "ncclinternalerror: internal check failed",
            "internal error - please report this issue to the nccl developers",
        ),
    ),
    HintRow(
        kind=K.GPU_MEMORY,
        hint=(
            "cuBLAS could not start, mostly because GPU memory is full: use a smaller "
            "micro-batch. If it is not, an earlier kernel failed: CUDA_LAUNCH_BLOCKING=1 "
            "({Opt.ENV}) shows its line"
        ),
        marks=("cublas_status_not_initialized",),
    ),
    HintRow(
        kind=K.GPU_KERNEL,
        hint=(
            "a call of cuBLAS failed: CUDA_LAUNCH_BLOCKING=1 ({Opt.ENV}) shows whether an "
            "earlier kernel did, such as one with an index out of range; else "
            "LD_LIBRARY_PATH may bring in another cuBLAS than torch's"
        ),
        marks=(
            "cublas_status_execution_failed",
            "cublas_status_invalid_value",
            "cublas_status_internal_error",
            "cublas_status_not_supported",
        ),
    ),
    HintRow(
        kind=K.CONVOLUTION,
        hint=(
            "cuDNN failed, mostly because GPU memory is full: use a smaller batch. If it "
            "is not, LD_LIBRARY_PATH may bring in another cuDNN than torch's"
        ),
        marks=(
            "cudnn_status_not_initialized",
            "cudnn_status_execution_failed",
            "cudnn_status_internal_error",
            "cudnn_status_mapping_error",
        ),
    ),
    HintRow(
        kind=K.BINARY,
        hint=(
            "another cuDNN was loaded than the one of torch: take its folder out of "
            "LD_LIBRARY_PATH of the workers"
        ),
        marks=("cudnn version incompatibility",),
    ),
    HintRow(
        kind=K.GPU_NUMBER,
        hint=(
            "the Trainer asks for a GPU that this worker does not see: take devices from "
            "LOCAL_WORLD_SIZE, start no more workers than GPUs ({Opt.NUM_GPUS})"
        ),
        marks=("you requested gpu: [",),
        pattern=r"You requested gpu: \[[\d, ]+\]\s+But your machine only has:",
    ),
    HintRow(
        kind=K.NO_GPU,
        hint="this FSDP needs GPUs: on CPUs use torch.distributed.fsdp.fully_shard",
        marks=("fsdp needs a non-cpu accelerator device",),
    ),
    HintRow(
        kind=K.NO_GPU,
        hint=(
            "this torch build has no CUDA: install one with CUDA for the workers' Python, "
            "or call no torch.cuda functions on CPUs (torch.cuda.is_available())"
        ),
        marks=("module 'torch._c' has no attribute '_cuda",),
    ),
    HintRow(
        kind=K.NO_GPU,
        hint=(
            "this device does not have the precision that was asked for: bf16 needs a GPU "
            "of compute capability 8.0, fp16 a GPU; leave it out otherwise"
        ),
        marks=(
            "mixed precision requires",
            "your setup doesn't support bf16",
            "is not supported on your device",
        ),
        pattern=(
            r"fp16 mixed precision requires a (?:GPU|device)|Your setup doesn't support bf16"
            r"|bf16 mixed precision requires|Type (?:fp16"
            r"|bf16) is not supported on your device"
        ),
    ),
    HintRow(
        kind=K.GPU_FORK,
        hint=(
            "CUDA was used before the Trainer started its processes: let distlaunch start "
            "them, and call no torch.cuda function and no .cuda() before the Trainer"
        ),
        marks=("can't create new processes if cuda is already initialized",),
    ),
    HintRow(
        kind=K.GPU_BUILD,
        hint=(
            'FlashAttention does not run on this GPU: pass attn_implementation="sdpa", or '
            "use GPUs of compute capability 8.0 and above"
        ),
        marks=(
            "flashattention only supports ampere gpus or newer",
            "flashattention only support ampere gpus or newer",
        ),
    ),
    HintRow(
        kind=K.TENSOR,
        hint=(
            "FlashAttention takes half precision only: load the model with "
            "dtype=torch.bfloat16 (torch_dtype in older Transformers), or run it in "
            "torch.autocast"
        ),
        marks=(
            "flashattention only support fp16 and bf16 data type",
            "flashattention only supports fp16 and bf16 data type",
        ),
    ),
    HintRow(
        kind=K.TENSOR,
        hint=(
            "a number is too large for half precision: take torch.finfo(tensor.dtype).min "
            "in place of a constant such as -1e9, or use bf16"
        ),
        marks=(
            "cannot be converted to type at::half without overflow",
            "cannot be converted to type c10::half without overflow",
        ),
    ),
    HintRow(
        kind=K.TENSOR,
        hint=("NumPy takes a tensor of the CPU without a graph: tensor.detach().cpu().numpy()"),
        marks=(
            "can't call numpy() on tensor that requires grad",
            "device type tensor to numpy",
        ),
    ),
    HintRow(
        kind=K.GRADIENT,
        hint=(
            "the optimizer got no parameters: layers in a Python list are not seen (use "
            "nn.ModuleList), and a generator of parameters can be read once only"
        ),
        marks=("optimizer got an empty parameter list",),
    ),
    HintRow(
        kind=K.GRADIENT,
        hint=(
            "forward gave other tensors when gradient checkpointing ran it again: run both "
            "in the same autocast and mode, without random or rank-dependent branches"
        ),
        marks=(
            (
                "a different number of tensors was saved during the original forward and "
                "recomputation"
            ),
            "have different metadata than during the forward pass",
        ),
    ),
    HintRow(
        kind=K.SHARDED,
        hint=(
            "the module was made without data (meta device): call "
            "model.to_empty(device=...) and load the weights, or do not pass "
            "low_cpu_mem_usage or device_map"
        ),
        marks=("cannot copy out of meta tensor; no data",),
    ),
    HintRow(
        kind=K.GPU_NUMBER,
        hint=(
            "the model was loaded on another GPU than that of its rank: pass "
            'device_map=int(os.environ["LOCAL_RANK"]) to from_pretrained, and not "auto"'
        ),
        marks=(
            "precision on a different device than the one you're training on",
            "with `device_map='auto'` in any distributed mode",
        ),
    ),
    HintRow(
        kind=K.GPU_KERNEL,
        hint=(
            "this operation has no deterministic form: use another one, or "
            "torch.use_deterministic_algorithms(True, warn_only=True)"
        ),
        marks=("does not have a deterministic implementation, but you set",),
    ),
    HintRow(
        kind=K.GPU_DRIVER,
        hint=(
            "the driver is older than this CUDA, and the card has no compatible mode: "
            "install a driver for torch.version.cuda, or a torch for the driver's CUDA "
            "(`nvidia-smi`)"
        ),
        marks=(
            "forward compatibility was attempted on non supported hw",
            "cuda driver initialization failed",
        ),
    ),
    HintRow(
        kind=K.GPU_DRIVER,
        hint=(
            "the driver was updated on the node and not loaded anew: leave the node out "
            "({Opt.EXCLUDE}) until it has been started again"
        ),
        marks=("driver/library version mismatch", "nvml/rm version mismatch"),
    ),
    HintRow(
        kind=K.NO_GPU,
        hint=(
            "this worker sees no GPU: start one worker per GPU with {Opt.NUM_GPUS} "
            "({Opt.NUM_PROCS} hides the GPUs), use a torch build with CUDA, and give a "
            "container access to the GPUs"
        ),
        marks=(
            "no cuda-capable device is detected",
            "cuda",
            "gpu",
        ),
        pattern=(
            r"no CUDA-capable device is detected|\b(?:CUDA|GPUs?) (?:is"
            r"|are) (?:not available|required|unavailable|needed|not found)\b"
            r"|\bno (?:CUDA )?(?:GPU|CUDA device)s? (?:was |were |is |are )?(?:found"
            r"|available|detected|visible)\b"
        ),
    ),
    HintRow(
        kind=K.NAN,
        hint=(
            "the data has values that are no numbers: find and fill or drop them before "
            "the model sees them"
        ),
        marks=(
            "contains nan.",
            "contains infinity or a value too large",
            "contains nan, infinity or a value too large",
        ),
        pattern=r"Input(?: \w+)? contains (?:NaN|infinity)",
    ),
    HintRow(
        kind=K.INDEX,
        hint=(
            "an index is outside of the array: compare it with the size that the message "
            "names; a list of indices may be for another data set"
        ),
        marks=("is out of bounds for",),
        pattern=r"index -?\d+ is out of bounds for (?:dimension|axis) \d+ with size \d+",
    ),
    HintRow(
        kind=K.NO_GROUP,
        hint=("torch.distributed has no backend of that name: use nccl on GPUs and gloo on CPUs"),
        marks=(
            "unknown backend type ",
            "invalid backend: ",
        ),
        pattern=r"Unknown backend type \w+|Invalid backend: '",
    ),
    HintRow(
        kind=K.CHECKPOINT,
        hint=(
            "some weights are one tensor under two names: save with "
            "safetensors.torch.save_model, or save_pretrained with safe_serialization=False"
        ),
        marks=("some tensors share memory, this will lead to duplicate memory on disk",),
    ),
    HintRow(
        kind=K.INTERFACE,
        hint=(
            "the script listens on an address that this node does not have: bind to "
            "0.0.0.0, or take an address of `ip -br address`"
        ),
        marks=("[errno 99] cannot assign requested address",),
    ),
    HintRow(
        kind=K.GPU_MEMORY,
        hint=(
            "GPU memory is full: TensorFlow takes all of it in each process, so give each "
            "rank a GPU of its own, use a smaller batch, or set "
            "TF_FORCE_GPU_ALLOW_GROWTH=true ({Opt.ENV})"
        ),
        marks=("dst tensor is not initialized",),
    ),
    HintRow(
        kind=K.CONVOLUTION,
        hint=(
            "cuDNN could not start, mostly because GPU memory is full: give each rank a "
            "GPU of its own, or set TF_FORCE_GPU_ALLOW_GROWTH=true ({Opt.ENV}); else its "
            "version is not that of TensorFlow"
        ),
        marks=(
            "failed to get convolution algorithm",
            "dnn library is not found",
        ),
    ),
)
