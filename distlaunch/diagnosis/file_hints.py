"""Rows of the table of hints: files, stores, configurations, commands and compilers."""

from __future__ import annotations

from distlaunch.diagnosis import special_hints as special
from distlaunch.diagnosis.failure_kinds import Failure, FailureKind
from distlaunch.diagnosis.hint_row import HintRow

K = FailureKind


def _starts_a_process(failure: Failure) -> bool:
    return failure.in_call("/subprocess.py", "_execute_child") or failure.in_call(
        "<frozen os>", "_execvpe", "execv"
    )


def _in_optimizer(failure: Failure) -> bool:
    return failure.in_call("/torch/optim/")


SPECIFIC_FILE_ROWS: tuple[HintRow, ...] = (
    HintRow(
        kind=K.EXTENSION,
        hint=(
            "no CUDA toolkit is found to build the extension: set CUDA_HOME to it "
            "({Opt.ENV}), or load its module with {Opt.SETUP}"
        ),
        marks=(
            "cuda_home environment variable is not set",
            "cuda_home does not exist, unable to compile",
        ),
    ),
    HintRow(
        kind=K.COMMAND,
        hint=(
            "git finds no repository: has the copy of the code on this node no folder .git, or do the "
            "workers start elsewhere ({Opt.WORKDIR})? Pass the commit in a variable ({Opt.ENV}), or "
            "let the script go on without it"
        ),
        marks=("fatal: not a git repository", "invalidgitrepositoryerror"),
        when=lambda failure: "dubious ownership" not in failure.lower,
    ),
    HintRow(
        kind=K.COMMAND,
        hint=special.missing_command,
    ),
    HintRow(
        kind=K.COMMAND,
        hint=(
            "it cannot be executed here: it needs `chmod +x`, a first line such as "
            "#!/bin/sh, and a build for this machine"
        ),
        marks=(
            "[errno 8] exec format error",
            "[errno 13] permission denied",
        ),
        when=_starts_a_process,
    ),
)
"""Rows that must precede more general ones."""

FILE_ROWS: tuple[HintRow, ...] = (
    HintRow(
        kind=K.EXTENSION,
        hint=(
            "the CUDA toolkit and torch are of different versions: load the toolkit of "
            "torch.version.cuda with {Opt.SETUP}, or set CUDA_HOME to it ({Opt.ENV})"
        ),
        marks=(
            "mismatches the version that was used to compile",
            "does not match the version torch was compiled with",
        ),
    ),
    HintRow(
        kind=K.EXTENSION,
        hint=(
            "an extension is built with ninja, which is not found: pip install ninja for "
            "the workers' Python, in their PATH"
        ),
        marks=("ninja is required to load c++ extensions",),
    ),
    HintRow(
        kind=K.EXTENSION,
        hint=(
            "the extension could not be built: the compiler's first line with error: in "
            "the log says why; build it once before the job, with the compiler that torch "
            "was built with"
        ),
        marks=("error building extension '",),
    ),
    HintRow(
        kind=K.EXTENSION,
        hint=(
            "torch.compile needs a C++ compiler on the node: load one with {Opt.SETUP}, "
            "name it with {Opt.ENV} CXX=g++ or {Opt.ENV} CC=gcc, or run without "
            "torch.compile ({Opt.ENV} TORCH_COMPILE_DISABLE=1)"
        ),
        marks=(
            "no working c++ compiler found in",
            "failed to find c compiler",
        ),
    ),
    HintRow(
        kind=K.EXTENSION,
        hint=(
            "torch.compile needs Triton for this GPU: install the triton of this torch for "
            "the workers' Python, or run without torch.compile ({Opt.ENV} "
            "TORCH_COMPILE_DISABLE=1)"
        ),
        marks=("cannot find a working triton installation",),
    ),
    HintRow(
        kind=K.HOST_MEMORY,
        hint=(
            "the process that the script started was killed, mostly for lack of host "
            "memory: `dmesg -T` tells"
        ),
        marks=(
            "died with <signals.sigkill: 9>",
            "returned non-zero exit status 137",
        ),
    ),
    HintRow(
        kind=K.COMMAND,
        hint=(
            "a shell did not find the command: it must be in the PATH of the workers on "
            "each node ({Opt.SETUP}, {Opt.ENV} PATH)"
        ),
        marks=("returned non-zero exit status 127",),
    ),
    HintRow(
        kind=K.DAMAGED_FILE,
        hint=(
            "the file is empty or cut off, as by a save that did not end or a full disk: "
            "load an older one, and save under another name that is renamed when it is "
            "complete"
        ),
        marks=(
            "error while deserializing header",
            "mmap length is greater than file size",
            "(truncated file: eof",
            "unexpected end of data",
            "file read failed",
            "invalid header or archive is corrupted",
            "(file signature not found)",
            "file is not a zip file",
            "corrupted record at",
            "truncated record at",
        ),
        types=(
            "SafetensorError",
            "ValueError",
            "OSError",
            "ReadError",
            "RuntimeError",
            "BadZipFile",
            "DataLossError",
        ),
    ),
    HintRow(
        kind=K.DAMAGED_FILE,
        hint=(
            "an image of the data set is damaged or no image: find it with num_workers=0, "
            "and leave it out (ImageFile.LOAD_TRUNCATED_IMAGES = True reads cut ones)"
        ),
        marks=(
            "image file is truncated",
            "cannot identify image file",
        ),
    ),
    HintRow(
        kind=K.DAMAGED_FILE,
        hint=(
            "the file is no plain array: np.load(..., allow_pickle=True) reads Python "
            "objects, if you trust the file; else it is damaged or of another kind"
        ),
        marks=(
            "cannot be loaded when allow_pickle=false",
            "cannot load file containing pickled data when allow_pickle=false",
        ),
    ),
    HintRow(
        kind=K.DAMAGED_FILE,
        hint=(
            "the file is not what its reader expects: see its first bytes (`head -c 100`) "
            "and how it was written or fetched"
        ),
        marks=(
            "invalid load key, '",
            "not a gzipped file (b'",
            "file could not be opened successfully",
        ),
    ),
    HintRow(
        kind=K.MISSING_FILE,
        hint=(
            "the folder {path} is not there on this node: make it first (os.makedirs(..., "
            "exist_ok=True)); a relative path begins in {Opt.WORKDIR}"
        ),
        marks=("parent directory ",),
        pattern=r"Parent directory (?P<path>\S+) does not exist",
    ),
    HintRow(
        kind=K.PERMISSION,
        hint=special.read_only,
        marks=("[errno 30] read-only file system",),
    ),
    HintRow(
        kind=K.FILE_SYSTEM,
        hint=special.broken_file_system,
        marks=(
            "[errno 5] input/output error",
            "[errno 107] transport endpoint is not connected",
            "[errno 112] host is down",
            "[errno 121] remote i/o error",
            "[errno 108] cannot send after transport endpoint shutdown",
            "[errno 19] no such device",
        ),
    ),
    HintRow(
        kind=K.FILE_SYSTEM,
        hint=(
            "the credentials for this file system have expired on the node: renew the "
            "Kerberos ticket (kinit) and start anew"
        ),
        marks=(
            "[errno 126] required key not available",
            "[errno 127] key has expired",
        ),
    ),
    HintRow(
        kind=K.FILE_LOCK,
        hint=(
            "this file system gives out no locks: put the file on a local disk (for "
            "Hugging Face: HF_HOME), or mount it with locks"
        ),
        marks=("[errno 37] no locks available",),
    ),
    HintRow(
        kind=K.SAME_FILE,
        hint=(
            "another process still has the file open or the folder in use, as an NFS file "
            "named .nfs shows: let rank 0 alone remove it after all ranks have closed it"
        ),
        marks=(
            "[errno 16] device or resource busy",
            "[errno 26] text file busy",
        ),
        pattern=r"\[Errno (?:16|26)\] [\w ]+: '",
    ),
    HintRow(
        kind=K.STORE,
        hint=(
            "the object store got no credentials here: pass those of the launcher on "
            "({Opt.ENV} AWS_ACCESS_KEY_ID {Opt.ENV} AWS_SECRET_ACCESS_KEY, or {Opt.ENV} "
            "AWS_PROFILE with ~/.aws on each node)"
        ),
        marks=(
            "unable to locate credentials",
            "partial credentials found",
        ),
    ),
    HintRow(
        kind=K.STORE,
        hint=(
            "Google Cloud found no credentials here: set GOOGLE_APPLICATION_CREDENTIALS to "
            "a file that each node has ({Opt.ENV})"
        ),
        marks=(
            "your default credentials were not found",
            "could not automatically determine credentials",
            "anonymous caller does not have",
        ),
    ),
    HintRow(
        kind=K.STORE,
        hint="no region is set for AWS: {Opt.ENV} AWS_DEFAULT_REGION=REGION",
        marks=("noregionerror",),
    ),
    HintRow(
        kind=K.STORE,
        hint=(
            "the credentials for the object store have expired: renew them, and use some "
            "that live longer than the job"
        ),
        marks=(
            "(expiredtoken)",
            "(requestexpired)",
            "expiredtokenexception",
            "the provided token has expired",
            "tokenretrievalerror",
            "token has expired",
        ),
    ),
    HintRow(
        kind=K.STORE,
        hint=(
            "the object store refused the access: see whether the credentials of the "
            "workers may read or write this bucket and key"
        ),
        marks=(
            "(accessdenied)",
            "(403) when calling",
            "permissionerror: forbidden",
            "permissionerror: access denied",
            "(invalidaccesskeyid)",
            "(signaturedoesnotmatch)",
        ),
    ),
    HintRow(
        kind=K.STORE,
        hint=(
            "the object store has no such bucket or key: compare the name with `aws s3 "
            "ls`, and the region and the endpoint (AWS_ENDPOINT_URL)"
        ),
        marks=(
            "(nosuchbucket)",
            "(nosuchkey)",
            "(404) when calling",
            "the specified bucket does not exist",
            "the specified key does not exist",
        ),
    ),
    HintRow(
        kind=K.STORE,
        hint=(
            "the object store has too many requests at the same time: read fewer and "
            "larger objects, use fewer loader workers, or raise the number of retries "
            "(AWS_MAX_ATTEMPTS)"
        ),
        marks=(
            "(slowdown)",
            "please reduce your request rate",
            "(throttling)",
            "(requestlimitexceeded)",
        ),
    ),
    HintRow(
        kind=K.STORE,
        hint=(
            "this node does not reach the object store: see the endpoint's address, the "
            "proxy (https_proxy) and the firewall of the node"
        ),
        marks=(
            "could not connect to the endpoint url",
            "connect timeout on endpoint url",
            "read timeout on endpoint url",
        ),
    ),
    HintRow(
        kind=K.ENCODING,
        hint=(
            "the workers' locale is not UTF-8: set PYTHONUTF8=1 for them ({Opt.ENV}), or "
            'pass encoding="utf-8" to open()'
        ),
        marks=("'ascii' codec can't",),
    ),
    HintRow(
        kind=K.ENCODING,
        hint=(
            "the file is not UTF-8 text: give open() its encoding; a file that is "
            "compressed or binary needs another reader"
        ),
        marks=("'utf-8' codec can't decode",),
    ),
    HintRow(
        kind=K.CONFIG,
        hint=(
            "the file or the answer is not whole JSON: if ranks write it while others read "
            "it, write it on rank 0 under another name and rename it; else see the line "
            "and column that the message names"
        ),
        types=("JSONDecodeError",),
    ),
    HintRow(
        kind=K.CONFIG,
        hint=(
            "the YAML file is not valid at the line that the message names: a value with a "
            "colon needs quotes, and indentation takes spaces"
        ),
        marks=("yaml.",),
        types=(
            "ScannerError",
            "ParserError",
            "ComposerError",
        ),
    ),
    HintRow(
        kind=K.CONFIG,
        hint=(
            "a number of the configuration is a string: YAML reads 1e-4 as text, so write "
            "1.0e-4, or convert it with float()"
        ),
        marks=(
            "not supported between instances of 'float' and 'str'",
            "not supported between instances of 'str' and 'float'",
            "not supported between instances of 'int' and 'str'",
        ),
        types=("TypeError",),
        when=_in_optimizer,
    ),
    HintRow(
        kind=K.CONFIG,
        hint=special.missing_key,
        marks=(
            "configattributeerror",
            "configkeyerror",
            "could not override '",
            "is not in struct",
        ),
    ),
    HintRow(
        kind=K.CONFIG,
        hint=(
            "the configuration leaves {key} to the caller (???): give it on the command "
            "line as {key}=VALUE"
        ),
        marks=("missing mandatory value",),
        pattern=r"Missing mandatory value: (?P<key>[\w.]+)",
    ),
    HintRow(
        kind=K.CONFIG,
        hint=(
            "the folder or the file of the configuration is not there on this node: "
            "config_path is relative to the script's file, and --config-dir takes an "
            "absolute path"
        ),
        marks=("missingconfigexception",),
    ),
    HintRow(
        kind=K.HOST_MEMORY,
        hint=(
            "the cgroup of the Slurm step ran out of host memory: ask for more (--mem or "
            "--mem-per-cpu), or use fewer loader workers and smaller caches"
        ),
        marks=("slurmstepd: error: detected",),
        pattern=r"slurmstepd: error: Detected \d+ oom[-_]kill event",
        in_output=True,
    ),
    HintRow(
        kind=K.SIGNAL,
        hint=(
            "the scheduler's time limit ended the job: ask for more time, or save on its "
            "signal (sbatch --signal=USR1@120) and start again from the checkpoint"
        ),
        marks=("due to time limit",),
        pattern=(
            r"slurmstepd: error: \*\*\* (?:JOB"
            r"|STEP) \S+ ON \S+ CANCELLED AT \S+ DUE TO TIME LIMIT"
        ),
        in_output=True,
    ),
    HintRow(
        kind=K.DAMAGED_FILE,
        hint=(
            "the file is empty or cut off, as by a save or a download that did not end: "
            "fetch or write it again, under another name that is renamed when it is "
            "complete"
        ),
        marks=(
            "parquet magic bytes not found",
            "parquet file size is 0 bytes",
            "no columns to parse from file",
            "unable to load weights from pytorch checkpoint file",
            "consistency check failed: file should be of size",
        ),
    ),
    HintRow(
        kind=K.MISSING_FILE,
        hint=(
            "the folder has no data in the form that its reader expects: see the path on "
            "this node, its subfolders and the file names"
        ),
        marks=(
            "couldn't find any class folder in",
            "found no valid file for the classes",
            "found 0 files in subfolders of",
            "couldn't find any data file at",
            "no data files found",
            "no (supported) data files found",
        ),
    ),
    HintRow(
        kind=K.MISSING_FILE,
        hint=(
            "this path is a folder, and a file is expected, or the other way round: name "
            "the file itself"
        ),
        types=(
            "IsADirectoryError",
            "NotADirectoryError",
        ),
    ),
    HintRow(
        kind=K.SAME_FILE,
        hint=(
            "more processes read this LMDB than it has places for: open it with lock=False "
            "(readahead=False), or with max_readers of all ranks and loader workers"
        ),
        marks=("mdb_readers_full",),
    ),
    HintRow(
        kind=K.DISK,
        hint=(
            "the LMDB has reached the size that it was opened with: open it with a larger map_size"
        ),
        marks=("mdb_map_full",),
    ),
    HintRow(
        kind=K.COMMAND,
        hint=("the arguments of the command are too long: write them to a file, and pass its name"),
        marks=("[errno 7] argument list too long",),
    ),
    HintRow(
        kind=K.PERMISSION,
        hint=(
            "Git refuses a repository of another user: git config --global --add "
            "safe.directory PATH for the workers' user, or set GIT_CONFIG_COUNT variables "
            "({Opt.ENV})"
        ),
        marks=("detected dubious ownership in repository",),
        in_output=True,
    ),
    HintRow(
        kind=K.MISSING_FILE,
        hint=special.missing_file,
    ),
    HintRow(
        kind=K.PERMISSION,
        hint=special.no_permission,
    ),
)
