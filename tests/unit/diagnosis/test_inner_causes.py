"""The cause that another program or library wrote before the exception of the script."""

from __future__ import annotations

import pytest

from distlaunch.diagnosis.first_cause import diagnose

CALLED = """\
Traceback (most recent call last):
  File "/home/u/project/train.py", line 3, in prepare
    subprocess.run(command, check=True)
  File "/usr/lib/python3.11/subprocess.py", line 571, in run
    raise CalledProcessError(retcode, process.args,
subprocess.CalledProcessError: Command '['prep']' returned non-zero exit status 1.
"""
GIT = """\
Cloning into 'data'...
fatal: Could not read from remote repository.

Please make sure you have the correct access rights
and the repository exists.
"""
AWS = """\
fatal error: Unable to locate credentials
"""
FFMPEG = """\
ffmpeg version 6.0 Copyright (c) 2000-2023 the FFmpeg developers
a.mp4: No such file or directory
"""
CLANG = """\
main.cpp:3:5: error: use of undeclared identifier 'y'
    y = 3;
    ^
1 error generated.
"""
CHILD = """\
Traceback (most recent call last):
  File "/home/u/project/prep.py", line 9, in <module>
    main()
  File "/home/u/project/prep.py", line 7, in main
    raise ValueError("bad vocab")
ValueError: bad vocab
"""
OPENBLAS = """\
OpenBLAS blas_thread_init: pthread_create failed for thread 2 of 64: Resource temporarily unavailable
OpenBLAS blas_thread_init: ensure that your address space and process count limits are big enough (ulimit -a)
OpenBLAS blas_thread_init: or set a smaller OPENBLAS_NUM_THREADS to fit into what you have available
OpenBLAS blas_thread_init: RLIMIT_NPROC 4096 current, 4096 max
"""
IMPORTING = """\
Traceback (most recent call last):
  File "/home/u/project/train.py", line 1, in <module>
    import numpy
  File "/v/lib/python3.11/site-packages/numpy/__init__.py", line 5, in <module>
    from . import multiarray
KeyboardInterrupt
"""
CRASHED = """\
Fatal Python error: Segmentation fault

Current thread 0x00007f22ad7deb80 (most recent call first):
  File "/home/u/project/train.py", line 7 in solve
  File "/home/u/project/train.py", line 9 in <module>
"""


def cause_of(end_of, log, **fields):
    return diagnose([end_of(1, log, **fields)], world_size=4).cause


@pytest.mark.parametrize(
    ("wrote", "original"),
    [
        (GIT, "fatal: Could not read from remote repository."),
        (AWS, "fatal error: Unable to locate credentials"),
        (FFMPEG, "a.mp4: No such file or directory"),
        (CLANG, "main.cpp:3:5: error: use of undeclared identifier 'y'"),
        (CHILD, "ValueError: bad vocab (prep.py:7 in main)"),
    ],
)
def test_line_in_which_a_command_names_its_error_is_the_original_cause(end_of, wrote, original):
    cause = cause_of(end_of, wrote + CALLED)
    assert (cause.exception_type, cause.original) == ("subprocess.CalledProcessError", original)


@pytest.mark.parametrize(
    ("wrote", "original"),
    [
        (GIT, "fatal: Could not read from remote repository."),
        (CHILD, "ValueError: bad vocab (prep.py:7 in main)"),
        (
            "usage: prep [-h]\nprep: error: no such file: a.txt\n",
            "prep: error: no such file: a.txt",
        ),
        ("nothing of note\n", "nothing of note"),
    ],
)
def test_captured_stderr_in_the_note_of_the_bootstrap_has_the_original_cause(
    end_of, wrote, original
):
    lines = [f"| {line}\n" for line in wrote.splitlines() if line]
    note = "".join(["The command wrote:\n", *lines])
    note = note.replace("Traceback (most recent call last)", "Traceback")
    assert cause_of(end_of, CALLED + note).original == original


def test_captured_stderr_counts_below_an_exception_that_was_raised_from_it(end_of):
    log = (
        f"{CALLED}The command wrote:\n| fatal: no disk\n\nThe above exception was the direct cause of "
        'the following exception:\n\nTraceback (most recent call last):\n  File "/home/u/project/'
        'train.py", line 5, in prepare\n    raise RuntimeError("no data") from error\n'
        "RuntimeError: no data\n"
    )
    cause = cause_of(end_of, log)
    assert (cause.exception_type, cause.original) == ("RuntimeError", "fatal: no disk")


GRAPH_2_21 = """\
Traceback (most recent call last):
  File "/home/u/project/train.py", line 6, in <module>
    attention(tf.ones((3000000, 1)))
  File "/v/lib/python3.11/site-packages/tensorflow/python/eager/execute.py", line 53, in quick_execute
    tensors = pywrap_tfe.TFE_Py_Execute(ctx._handle, device_name, op_name,
  ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
tensorflow.python.framework.errors_impl.ResourceExhaustedError: Graph execution error:

Detected at node MatMul defined at (most recent call last):
  File "/home/u/project/train.py", line 6, in <module>

  File "/home/u/project/train.py", line 5, in attention

  File "/v/lib/python3.11/site-packages/tensorflow/python/dtensor/api.py", line 64, in call_with_layout

OOM when allocating tensor with shape[3000000,3000000] and type float on /job:localhost/replica:0/task:0/device:CPU:0 by allocator mklcpu
\t [[{{node MatMul}}]]
Hint: If you want to see a list of allocated tensors when OOM happens, add report_tensor_allocations_upon_oom to RunOptions for current allocation info.
 [Op:__inference_attention_8]
"""
GRAPH_2_10 = """\
Traceback (most recent call last):
  File "/home/u/project/train.py", line 30, in <module>
    model.fit(data)
  File "/v/lib/python3.9/site-packages/keras/utils/traceback_utils.py", line 70, in error_handler
    raise e.with_traceback(filtered_tb) from None
tensorflow.python.framework.errors_impl.ResourceExhaustedError: Graph execution error:

Detected at node 'model/dense/MatMul' defined at (most recent call last):
    File "/home/u/project/train.py", line 30, in <module>
      model.fit(data)
    File "/home/u/project/net.py", line 12, in call
      return self.dense(x)
    File "/v/lib/python3.9/site-packages/keras/layers/core/dense.py", line 221, in call
      outputs = tf.matmul(a=inputs, b=self.kernel)
Node: 'model/dense/MatMul'
2 root error(s) found.
  (0) RESOURCE_EXHAUSTED:  OOM when allocating tensor with shape[8192,65536] and type float on /job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc
\t [[{{node model/dense/MatMul}}]]
"""


@pytest.mark.parametrize(
    ("log", "shape", "node", "kind"),
    [
        (GRAPH_2_21, "shape[3000000,3000000]", "node MatMul, defined at train.py:5 in attention", "host-memory"),
        (GRAPH_2_10, "shape[8192,65536]", "node model/dense/MatMul, defined at net.py:12 in call", "gpu-memory"),
    ],
    ids=["2.21", "2.10"],
)  # fmt: skip
def test_error_of_a_graph_has_its_words_its_node_and_the_line_that_made_the_node(
    end_of, log, shape, node, kind
):
    diagnosis = diagnose([end_of(1, log)], world_size=4)
    cause = diagnosis.cause
    assert cause.exception_type.endswith("ResourceExhaustedError")
    assert "OOM when allocating tensor" in cause.message
    assert shape in cause.message
    assert node in cause.excerpt
    assert diagnosis.hint_kind == kind


def test_graph_error_that_is_cut_off_keeps_its_exception(end_of):
    log = GRAPH_2_21[: GRAPH_2_21.index("  File", GRAPH_2_21.index("Detected at"))]
    assert cause_of(end_of, log).exception_type.endswith("ResourceExhaustedError")


@pytest.mark.parametrize(
    ("log", "code"), [(IMPORTING, -2), (IMPORTING, 1), (CRASHED, -11), ("", -11)]
)
def test_threads_that_openblas_could_not_start_are_the_original_cause(end_of, log, code):
    diagnosis = diagnose([end_of(1, OPENBLAS * 30 + log, returncode=code)], world_size=4)
    assert diagnosis.cause.original == OPENBLAS.splitlines()[0]
    assert diagnosis.hint_kind == "threads-and-processes"


def test_exception_of_the_script_is_not_laid_to_the_threads_of_openblas(end_of):
    diagnosis = diagnose([end_of(1, OPENBLAS + CHILD)], world_size=4)
    assert (diagnosis.cause.exception_type, diagnosis.cause.original) == ("ValueError", None)
    assert diagnosis.hint_kind is None


def test_hint_for_the_type_of_the_original_exception_is_given_below_another(end_of):
    log = (
        'Traceback (most recent call last):\n  File "/home/u/project/train.py", line 3, in load\n'
        "    state = json.load(file)\n"
        "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)\n\n"
        "The above exception was the direct cause of the following exception:\n\n"
        'Traceback (most recent call last):\n  File "/home/u/project/train.py", line 5, in load\n'
        '    raise RuntimeError("no state") from error\nRuntimeError: no state\n'
    )
    diagnosis = diagnose([end_of(1, log)], world_size=4)
    assert diagnosis.cause.exception_type == "RuntimeError"
    assert diagnosis.hint_kind == "configuration-files"


RESOURCE = """\
Traceback (most recent call last):
  File "/home/u/project/words.py", line 8, in find
    tokenize(text)
LookupError:
**********************************************************************
  Resource punkt not found.
  Please use the NLTK Downloader to obtain the resource:

  >>> import nltk
**********************************************************************
"""
"""NLTK 3.8."""
RAISED_FROM_IT = """\

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/home/u/project/train.py", line 9, in <module>
    main()
RuntimeError: no tokenizer
"""
VALIDATED = """\
Traceback (most recent call last):
  File "/home/u/project/config.py", line 4, in load
    return Config(**values)
pydantic_core._pydantic_core.ValidationError: 1 validation error for Config
lr
  Input should be a valid number, unable to parse string as a number
    For further information visit https://errors.pydantic.dev/2.5/v/float_parsing
"""


def test_message_that_begins_with_decoration_has_its_first_words(end_of):
    cause = cause_of(end_of, RESOURCE)
    assert cause.exception_type == "LookupError"
    assert (cause.message or "").startswith("Resource punkt not found. Please use")
    assert not any("***" in line or "Resource" in line for line in cause.excerpt)


@pytest.mark.parametrize(
    ("inner", "words"),
    [
        (RESOURCE, "LookupError: Resource punkt not found. Please use the NLTK"),
        (VALIDATED, "Config lr Input should be a valid number, unable to parse string as a number"),
    ],
)
def test_further_lines_of_an_inner_message_are_in_the_report(end_of, inner, words):
    assert words in (cause_of(end_of, inner + RAISED_FROM_IT).original or "")
    assert words in (cause_of(end_of, inner + CALLED).original or "")
    noted = inner.replace("Traceback (most recent call last)", "Traceback").splitlines()
    note = "".join(["The command wrote:\n", *(f"| {line}\n" for line in noted if line)])
    assert words in (cause_of(end_of, CALLED + note).original or "")


def test_output_below_an_exception_without_a_message_is_no_part_of_it(end_of):
    log = RESOURCE.partition("LookupError")[0] + "LookupError\nepoch 3\nepoch 4\n"
    assert "epoch 4" not in (cause_of(end_of, log).message or "")


@pytest.mark.parametrize(
    "note",
    [
        "",
        "The command wrote:\n",
        "The command wrote:\n| 3 files\n",
        "The command wrote to stdout:\n| 3 files are missing\n",
    ],
)
def test_error_that_the_script_did_not_capture_is_found_before_the_traceback(end_of, note):
    assert cause_of(end_of, GIT + CALLED + note).original == (
        "fatal: Could not read from remote repository."
    )


MEDIA = """\
Input #0 could not be probed
[mov,mp4,m4a @ 0x5581] moov atom not found
a.mp4: Invalid data found when processing input
"""


@pytest.mark.parametrize("captured", [True, False])
def test_specific_line_before_a_general_one_is_part_of_the_original_cause(end_of, captured):
    note = "".join(["The command wrote:\n", *(f"| {line}\n" for line in MEDIA.splitlines())])
    cause = cause_of(end_of, CALLED + note if captured else MEDIA + CALLED)
    assert "moov atom not found; a.mp4: Invalid data" in (cause.original or "")


def test_excerpt_has_the_last_lines_of_a_command(end_of):
    lines = [f"| step {n}\n" for n in range(8)]
    note = "".join(["The command wrote:\n", *lines, "| fatal: no space\n"])
    assert cause_of(end_of, CALLED + note).excerpt[-1] == "| fatal: no space"


OOM = """\
Traceback (most recent call last):
  File "/home/u/project/train.py", line 15, in step
    model(batch)
tensorflow.python.framework.errors_impl.ResourceExhaustedError: {{function_node a}} OOM when allocating tensor with shape[64,512] and type float on /job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc [Op:MatMul]
"""
SHUT_DOWN = """\
Traceback (most recent call last):
  File "/home/u/project/train.py", line 18, in finish
    hvd.allreduce(loss)
horovod.common.exceptions.HorovodInternalError: Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt to allreduce after one of the ranks finished execution.
"""
DURING = "\nDuring handling of the above exception, another exception occurred:\n\n"


@pytest.mark.parametrize("log", [OOM + DURING + SHUT_DOWN, SHUT_DOWN + DURING + OOM])
def test_lack_of_gpu_memory_in_a_chain_with_horovods_errors_is_the_cause(end_of, log):
    ends = [end_of(0, SHUT_DOWN, ended_s=4.9), end_of(1, log)]
    ends += [end_of(2, returncode=-15, told_to_stop=True, ended_s=6.0)]
    found = diagnose(ends, world_size=3)
    assert (found.cause.ranks, found.hint_kind) == ((1,), "gpu-memory")


def test_hint_for_memory_of_ray_does_not_name_the_gpu(end_of):
    text = "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory."
    found = diagnose([end_of(0, CHILD.replace("ValueError: bad vocab", text))], world_size=1)
    assert found.hint_kind == "host-memory"
    assert "GPU" not in (found.hint or "")


def test_hint_is_looked_up_in_the_middle_of_a_chain_too(end_of):
    refused = CHILD.replace(
        "ValueError: bad vocab",
        "httpx.HTTPStatusError: Client error '403 Forbidden' for url 'https://h'",
    )
    first = CHILD.replace("ValueError: bad vocab", "LookupError: not cached")
    log = first + DURING + refused + DURING + CHILD.replace("bad vocab", "no shard")
    found = diagnose([end_of(0, log)], world_size=2)
    assert (found.cause.original or "").startswith("LookupError: not cached")
    assert found.hint_kind == "downloads"


@pytest.mark.parametrize(
    "report",
    [
        "RuntimeError: DataLoader worker (pid 7) is killed by signal: Aborted.",
        "torch.multiprocessing.spawn.ProcessExitedException: process 0 terminated with signal SIGABRT",
        "joblib.loky.TerminatedWorkerError: A worker process managed by the executor was unexpectedly terminated.",
    ],
)
def test_last_words_of_a_child_are_the_original_cause_whatever_reports_its_end(end_of, report):
    log = "free(): invalid pointer\n" + CHILD.replace("ValueError: bad vocab", report)
    assert (cause_of(end_of, log).original or "").startswith("free(): invalid pointer")
    killed = log.replace("Aborted", "Killed").replace("SIGABRT", "SIGKILL")
    assert ("free()" in (cause_of(end_of, killed).original or "")) is ("loky" in report)


def test_what_a_command_wrote_to_a_captured_stdout_is_the_original_cause_if_the_log_has_none(
    end_of,
):
    note = "The command wrote to stdout:\n| 3 files\n| 2 are missing\n"
    assert cause_of(end_of, "step 3\n" + CALLED + note).original == "2 are missing"
