"""Rows of the table of hints: training libraries, hubs, trackers and processes."""

from __future__ import annotations

from distlaunch.diagnosis import special_hints as special
from distlaunch.diagnosis.failure_kinds import FailureKind
from distlaunch.diagnosis.hint_row import HintRow

K = FailureKind

SPECIFIC_LIBRARY_ROWS: tuple[HintRow, ...] = (
    HintRow(
        kind=K.DOWNLOAD,
        hint=(
            "the server's certificate is not known on this node, often because of a proxy: "
            "set SSL_CERT_FILE and REQUESTS_CA_BUNDLE to its certificates ({Opt.ENV}), or "
            "fetch the files before the job"
        ),
        marks=(
            "certificate_verify_failed",
            "certificate verify failed",
        ),
    ),
    HintRow(
        kind=K.BINARY,
        hint=(
            "OpenCV needs a library of the screen: install opencv-python-headless in place "
            "of opencv-python for the workers' Python, or the system's package libgl1"
        ),
        marks=(
            "libgl.so.1: cannot open shared object file",
            "libgthread-2.0.so.0: cannot open shared object file",
        ),
    ),
    HintRow(
        kind=K.VARIABLE,
        hint=(
            "cuBLAS is deterministic with a fixed workspace only: set "
            "CUBLAS_WORKSPACE_CONFIG=:4096:8 for the workers ({Opt.ENV})"
        ),
        marks=("cublas_workspace_config=:4096:8",),
    ),
)
"""Rows that must precede more general ones."""

LIBRARY_ROWS: tuple[HintRow, ...] = (
    HintRow(
        kind=K.QUESTION,
        hint=(
            "Weights & Biases has no key, and nobody can type it in a worker: set "
            "WANDB_API_KEY or WANDB_MODE=offline for the workers ({Opt.ENV})"
        ),
        marks=("no api key configured. use `wandb login`",),
    ),
    HintRow(
        kind=K.TRACKER,
        hint=(
            "this node does not reach Weights & Biases: set WANDB_MODE=offline for the "
            "workers ({Opt.ENV}), and run `wandb sync` later where it is reached"
        ),
        marks=(
            "wandb.errors",
            "run initialization has timed out after",
        ),
        pattern=(
            r"CommError: (?:Timed out while retrying|Run initialization has timed out"
            r"|Error communicating|[^\n]*timeout)|Run initialization has timed out after"
        ),
    ),
    HintRow(
        kind=K.TRACKER,
        hint=(
            "this rank has not called wandb.init(): log on the rank that has (mostly rank 0) only"
        ),
        marks=("you must call wandb.init() before wandb.log()",),
    ),
    HintRow(
        kind=K.MISSING_FILE,
        hint=(
            "this node has no folder {path}, so the path was taken for a name on the "
            "Hugging Face Hub: see whether all nodes have it; a relative path begins in "
            "{Opt.WORKDIR}"
        ),
        marks=("repo id must",),
        pattern=(
            r"Repo id must (?:be in the form"
            r"|use alphanumeric)[^\n]*?'(?P<path>[./~][^'\n]*)'"
        ),
    ),
    HintRow(
        kind=K.DOWNLOAD,
        hint=(
            "the files are not in the cache of this node, and it may not fetch them: fetch "
            "them before the job, to a folder that all nodes share, and point HF_HOME "
            "there ({Opt.ENV})"
        ),
        marks=(
            "cannot find an appropriate cached snapshot folder",
            "offlinemodeisenabled",
            "cannot find the requested files in the disk cache",
            "on the hub (",
            "cannot find the requested files in the local cache",
            "outgoing traffic has been disabled",
        ),
        pattern=(
            r"cannot find an appropriate cached snapshot|OfflineModeIsEnabled"
            r"|cannot find the requested files in the disk cache"
            r"|cannot find the requested files in the local cache"
            r"|Couldn't reach '[^'\n]+' on the Hub \(|outgoing traffic has been disabled"
        ),
    ),
    HintRow(
        kind=K.DOWNLOAD,
        hint=(
            "the hub has no such name, or it is private: compare the name, and give the "
            "workers a token that may read it ({Opt.ENV} HF_TOKEN)"
        ),
        marks=(
            "repository not found for url",
            "doesn't exist on the hub or cannot be accessed",
            "is not a valid model identifier listed on",
        ),
    ),
    HintRow(
        kind=K.DOWNLOAD,
        hint=(
            "all ranks ask the server at the same time: fetch the files before the job, or "
            "on one rank of each node while the others wait"
        ),
        marks=(
            "429 client error",
            "too many requests",
        ),
        pattern=r"429 Client Error|HTTP Error 429|\b429\b[^\n]*Too Many Requests",
    ),
    HintRow(
        kind=K.DOWNLOAD,
        hint=(
            "this node does not reach the server: fetch the files before the job, to a "
            "folder that all nodes share, or set the proxy for the workers ({Opt.ENV} "
            "https_proxy)"
        ),
        marks=(
            "<urlopen error [errno -2]",
            "<urlopen error [errno -3]",
            "<urlopen error [errno 101]",
            "<urlopen error [errno 110]",
            "<urlopen error [errno 111]",
            "<urlopen error timed out",
            "temporary failure in name resolution",
            "nameresolutionerror",
            "proxyerror",
            "cannot connect to host",
            "read timed out. (read timeout=",
        ),
        pattern=(
            r"urlopen error|name resolution|NameResolutionError|ProxyError"
            r"|Cannot connect to host \S+:\d+ ssl|Read timed out\. \(read timeout="
        ),
    ),
    HintRow(
        kind=K.OLD_NAME,
        hint=(
            "the installed Transformers is older than the model: install a newer one for "
            "the workers' Python (pip install -U transformers)"
        ),
        marks=("but transformers does not recognize this architecture",),
    ),
    HintRow(
        kind=K.OLD_NAME,
        hint=(
            "the installed Datasets runs no scripts any more: use a data set in files "
            '(Parquet, JSON), or install an older one (pip install "datasets<4")'
        ),
        marks=("dataset scripts are no longer supported",),
    ),
    HintRow(
        kind=K.OLD_NAME,
        hint=(
            "the installed {library} has no {name}: change the script, or install the "
            "version of {library} that it was written for; a file {library}.py beside the "
            "script hides it, too"
        ),
        marks=("has no attribute",),
        pattern=(
            r"AttributeError: module '(?P<library>torch|torchvision|torchaudio|tensorflow"
            r"|keras|transformers|accelerate|datasets|deepspeed|pandas|scipy|sklearn|PIL|jax"
            r"|flax|optax|lightning|pytorch_lightning|torchmetrics|ray|wandb|gym|cv2|yaml"
            r"|packaging|pkg_resources|collections"
            r"|asyncio)(?:\.[\w.]+)?' has no attribute '(?P<name>\w+)'"
        ),
    ),
    HintRow(
        kind=K.MODULE,
        hint=(
            "a file of the script's folder has the name {name}, or two files import each "
            "other: give the file another name, or import within the function"
        ),
        marks=("partially initialized module",),
        pattern=r"partially initialized module '(?P<name>[\w.]+)'",
    ),
    HintRow(
        kind=K.MODULE,
        hint=(
            "flash-attn is not installed for the workers' Python: install it for this "
            'torch, or pass attn_implementation="sdpa"'
        ),
        marks=("has been toggled on, but it cannot be used due to the following error",),
    ),
    HintRow(
        kind=K.MODULE,
        hint=special.needs_library,
        marks=(
            "requires",
            "please install",
        ),
        types=("ImportError",),
    ),
    HintRow(
        kind=K.OLD_NAME,
        hint=(
            "the installed {name} does not fit the library that uses it: install the "
            'version that it asks for (pip install "{wanted}")'
        ),
        marks=("is required for a normal functioning of this module",),
        pattern=(
            r"(?P<wanted>(?P<name>[\w-]+)[\w.,<>=!]*) is required for a normal "
            r"functioning of this module"
        ),
    ),
    HintRow(
        kind=K.TRAINER,
        hint=(
            "the batch has no labels, so the model computes no loss: give each row "
            "`labels`, for example with DataCollatorForLanguageModeling"
        ),
        marks=("the model did not return a loss from the inputs",),
    ),
    HintRow(
        kind=K.TRAINER,
        hint=(
            "the Trainer drops all columns that the model does not take: tokenize the data "
            "set first, or pass remove_unused_columns=False"
        ),
        marks=("no columns in the dataset match the model's forward method",),
    ),
    HintRow(
        kind=K.TRAINER,
        hint=(
            "load_best_model_at_end needs the same strategy for saving and evaluation: set "
            "save_strategy and eval_strategy alike"
        ),
        marks=("load_best_model_at_end requires the save and eval",),
    ),
    HintRow(
        kind=K.TRAINER,
        hint=(
            "Accelerate's state is made once in a process: make the one Accelerator with "
            "all its arguments first, before TrainingArguments or another Accelerator"
        ),
        marks=("acceleratorstate has already been initialized and cannot be changed",),
    ),
    HintRow(
        kind=K.TRAINER,
        hint=(
            "Accelerate's logger needs its state: make the Accelerator (or PartialState) "
            "first, before the first log line"
        ),
        marks=("you must initialize the accelerate state by calling",),
    ),
    HintRow(
        kind=K.TRAINER,
        hint=special.missing_metric,
        marks=(
            "conditioned on metric",
            "`modelcheckpoint(monitor=",
        ),
    ),
    HintRow(
        kind=K.TRAINER,
        hint=(
            "Lightning has no strategy of that name: its names are ddp, fsdp, deepspeed, "
            "ddp_find_unused_parameters_true and others; see the documentation of Trainer"
        ),
        marks=("you selected an invalid strategy name",),
    ),
    HintRow(
        kind=K.TRAINER,
        hint=(
            "the names of the layers differ in this model: take target_modules from "
            'model.named_modules(), or use "all-linear"'
        ),
        marks=("not found in the base model. please check the target modules",),
    ),
    HintRow(
        kind=K.RANK,
        hint=(
            "Lightning reads the number of tasks of a node: set --ntasks-per-node instead "
            "of --ntasks in the batch script, or let distlaunch start the workers"
        ),
        marks=("in your slurm bash script, but this variable is not supported",),
    ),
    HintRow(
        kind=K.DEEPSPEED,
        hint=(
            "are the sizes for so many workers? train_batch_size is micro batch size times "
            'accumulation steps times workers: set two of them to "auto" or change the '
            "number of workers"
        ),
        marks=(
            "train batch size must be divisible by micro-batch",
            "is not divisible by micro batch size",
        ),
    ),
    HintRow(
        kind=K.DEEPSPEED,
        hint=(
            "ZeRO divides the optimizer's states, so it needs one: pass optimizer or "
            'model_parameters with an "optimizer" in the configuration to '
            "deepspeed.initialize"
        ),
        marks=("requires an optimizer",),
        pattern=r"zero stage \d requires an optimizer",
    ),
    HintRow(
        kind=K.DEEPSPEED,
        hint=(
            "the checkpoint is for another number of ranks: start as many workers as when "
            "it was saved, or convert it with ds_to_universal.py and "
            "load_universal_checkpoint"
        ),
        marks=("the checkpoint being loaded used a dp",),
    ),
    HintRow(
        kind=K.RAY,
        hint=(
            "there is no Ray cluster that this process can find: start one with `ray start "
            "--head`, set RAY_ADDRESS ({Opt.ENV}), or call ray.init() without an address"
        ),
        marks=("could not find any running ray instance",),
    ),
    HintRow(
        kind=K.RAY,
        hint=(
            "the cluster runs another version of Ray or Python than this process: use the "
            "same environment on all nodes ({Opt.PYTHON}, {Opt.SETUP})"
        ),
        marks=("version mismatch: the cluster was started with",),
    ),
    HintRow(
        kind=K.RAY,
        hint=(
            "Ray's object store is full: delete references that are not needed (`ray "
            "memory` lists them), or start Ray with more object_store_memory; a container "
            "needs as much /dev/shm"
        ),
        marks=("the local object store is full of objects",),
    ),
    HintRow(
        kind=K.BINARY,
        hint=(
            "Horovod was built without this framework or this controller: build it again "
            "for the workers' Python with HOROVOD_WITH_PYTORCH=1 (or _TENSORFLOW, _GLOO, "
            "_MPI)"
        ),
        marks=("has not been built",),
        pattern=(r"Extension horovod\.\S+ has not been built|Horovod[^\n]*has not been built with"),
    ),
    HintRow(
        kind=K.RANK,
        hint=(
            "TF_CONFIG names fewer workers than there are: distlaunch sets it for each "
            "worker, so do not set it in the script"
        ),
        marks=("exceeds the maximum id of",),
        pattern=r"`task_id` \d+ exceeds the maximum id",
    ),
    HintRow(
        kind=K.TRAINER,
        hint=(
            "the optimizer and the model must be made in one strategy: make and compile "
            "both within `with strategy.scope():`"
        ),
        marks=('need to be inside "with strategy.scope()"',),
    ),
    HintRow(
        kind=K.STORE,
        hint=(
            "this TensorFlow reads no {scheme}:// paths: install tensorflow-io for the "
            "workers' Python, or copy the files to a folder that all nodes share"
        ),
        marks=("file system scheme '",),
        pattern=r"File system scheme '(?P<scheme>\w+)' not implemented",
    ),
    HintRow(
        kind=K.POOL,
        hint=(
            "a process of map() was killed, mostly for lack of memory: `dmesg -T` tells; "
            "use a smaller num_proc or writer_batch_size, and without num_proc an error is "
            "shown"
        ),
        marks=("one of the subprocesses has abruptly died during map operation",),
    ),
    HintRow(
        kind=K.SPAWN,
        hint=(
            "an object with a lock, an open file or a connection cannot go to another "
            "process: open it where it is used, such as in the data set's __getitem__ or "
            "in worker_init_fn"
        ),
        marks=(
            "cannot pickle",
            "can't pickle",
            "cannot be pickled",
            "cannot serialize",
        ),
        pattern=(
            r"cannot pickle '(?:_thread\.(?:lock|_local|RLock)|_io\.\w+|module|generator"
            r"|sqlite3\.\w+|weakref\.\w+|socket|SSLContext|\w*[Ee]nvironment|_?\w*(?:Context"
            r"|Socket|Connection))' object|can't pickle (?:_thread\.\w+|module|generator"
            r"|Environment) objects|h5py objects cannot be pickled"
            r"|cannot serialize '_io\.\w+' object"
        ),
    ),
    HintRow(
        kind=K.SPAWN,
        hint=(
            "the start method is set once: call set_start_method in the main part only (if "
            '__name__ == "__main__":), or use torch.multiprocessing.get_context("spawn")'
        ),
        marks=("context has already been set",),
    ),
    HintRow(
        kind=K.SPAWN,
        hint=("a tensor with a graph cannot go to another process: send tensor.detach()"),
        marks=("cowardly refusing to serialize non-leaf tensor",),
    ),
    HintRow(
        kind=K.BINARY,
        hint=(
            "torchvision was built for another torch: install the two versions that belong together"
        ),
        marks=(
            "operator torchvision::nms does not exist",
            "couldn't load custom c++ ops",
        ),
    ),
    HintRow(
        kind=K.BINARY,
        hint=(
            "no MPI library is found: load the module of MPI with {Opt.SETUP}, or do without mpi4py"
        ),
        marks=("cannot load mpi library",),
    ),
    HintRow(
        kind=K.OLD_NAME,
        hint=(
            "a generated file is older than the installed protobuf: install an older one "
            '(pip install "protobuf<3.21"), or set '
            "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python ({Opt.ENV})"
        ),
        marks=(
            "descriptors cannot not be created directly",
            "descriptors cannot be created directly",
        ),
    ),
    HintRow(
        kind=K.DEEPSPEED,
        hint=(
            "ZeRO-3 divides the model while it is loaded: pass neither device_map nor "
            "low_cpu_mem_usage to from_pretrained"
        ),
        marks=("deepspeed zero-3 is not compatible with",),
    ),
    HintRow(
        kind=K.DEEPSPEED,
        hint=(
            "DeepSpeed needs the size of a batch: pass a loader to accelerator.prepare(), "
            "or set train_micro_batch_size_per_gpu in the configuration"
        ),
        marks=(("when using deepspeed, `accelerate.prepare()` requires you to pass at least one"),),
    ),
    HintRow(
        kind=K.RAY,
        hint=(
            "the process of the actor or task ended without an exception: `dmesg -T` names "
            "an out-of-memory kill, and its log is under /tmp/ray/session_latest/logs on "
            "that node"
        ),
        marks=(
            "the actor died unexpectedly before finishing this task",
            "the worker died unexpectedly while executing this task",
        ),
    ),
    HintRow(
        kind=K.RAY,
        hint=(
            "Ray could not make the environment of the task: see the names and versions in "
            "runtime_env, and whether the nodes reach the package index"
        ),
        marks=("runtimeenvsetuperror",),
    ),
    HintRow(
        kind=K.DOWNLOAD,
        hint=(
            "the server refused the request (401 or 403): has the token or the signed URL expired, "
            "and does the token allow this? Give the workers a new one ({Opt.ENV}), or make the URL "
            "shortly before it is used"
        ),
        marks=("401", "403"),
        pattern=(
            r"client error '40[13]|ClientResponseError: 40[13], message="
            r"|\bHTTP(?:/[\d.]+)?(?: status)?(?: code)?:? 40[13]\b"
            r"|\bstatus(?:[ _]code)?(?:=|: ?| )40[13]\b|<Response \[40[13]\]>"
            r"|\b40[13]\b[^\n]*(?:X-Amz-|X-Goog-|[?&](?:Signature|sig|Expires)=)"
        ),
    ),
    HintRow(
        kind=K.DOWNLOAD,
        hint=(
            "the server wants a login: give the workers the token ({Opt.ENV} HF_TOKEN for "
            "Hugging Face), and accept the terms of the model or data set there"
        ),
        marks=(
            "401 client error",
            "403 client error",
            "http error 401",
            "http error 403",
            "permission denied (publickey",
        ),
    ),
    HintRow(
        kind=K.BINARY,
        hint=(
            "this torch was built for NumPy 1, and NumPy 2 is installed: install a newer "
            'torch, or an older NumPy (pip install "numpy<2")'
        ),
        marks=("runtimeerror: numpy is not available",),
    ),
)
