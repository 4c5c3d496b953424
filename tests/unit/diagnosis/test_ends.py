"""Ends without a Python exception: signals, native messages, usage errors, last lines, error
files."""

from __future__ import annotations

import json
import signal

import pytest

from distlaunch.core.model.option_names import OptionNames, use_names
from distlaunch.diagnosis.evidence import read_error_file
from distlaunch.diagnosis.first_cause import diagnose
from tests.facts import mentions


def one(end_of, tail="", **fields):
    return diagnose([end_of(0, tail, **fields)], world_size=1)


@pytest.mark.parametrize(
    ("number", "says", "hint"),
    [
        (signal.SIGSEGV, "SIGSEGV (segmentation fault)", "PYTHONFAULTHANDLER"),
        (signal.SIGBUS, "SIGBUS (bus error)", "/dev/shm"),
        (signal.SIGFPE, "SIGFPE (arithmetic error)", None),
        (signal.SIGILL, "SIGILL (illegal instruction)", "another CPU"),
        (signal.SIGXCPU, "SIGXCPU (CPU time limit reached)", "ulimit -t"),
        (signal.SIGPIPE, "SIGPIPE (wrote to a closed pipe)", "reader was gone"),
        (signal.SIGTERM, "SIGTERM (from outside", None),
        (signal.SIGKILL, "SIGKILL (from outside", "dmesg"),
        (signal.SIGRTMIN + 3, "signal 37", None),
    ],
)
def test_signals_are_named_with_their_meaning(end_of, number, says, hint):
    diagnosis = one(end_of, returncode=-number)
    assert says in diagnosis.cause.summary
    assert diagnosis.exit_code == 128 + number
    assert (hint in (diagnosis.hint or "")) if hint else diagnosis.hint is None


def test_sigkill_with_an_oom_kill_is_the_kernels(end_of):
    diagnosis = one(end_of, returncode=-9, oom_kills=1)
    assert mentions(diagnosis.cause.summary, "SIGKILL", "kernel")
    assert "memory" in (diagnosis.hint or "")


def test_shell_codes_are_translated(end_of):
    assert "SIGSEGV" in one(end_of, returncode=139).cause.summary


def test_cpp_exception_gives_type_and_what(end_of):
    cause = one(
        end_of,
        "terminate called after throwing an instance of 'c10::Error'\n  what():  invalid tag\nException raised from f\n",
        returncode=-6,
    ).cause
    assert (cause.exception_type, cause.message) == ("c10::Error", "invalid tag")


def test_handled_python_exception_before_a_native_crash_is_not_the_cause(end_of):
    tail = (
        'Traceback (most recent call last):\n  File "/p/t.py", line 1, in f\n    g()\nKeyError: 1\n'
    )
    cause = one(
        end_of,
        tail + "".join(f"step {n}\n" for n in range(40)) + "free(): invalid pointer\n",
        returncode=-6,
    ).cause
    assert (cause.exception_type, cause.message) == (None, "free(): invalid pointer")


def test_python_exception_followed_by_a_crash_at_exit_is_the_cause(end_of):
    tail = (
        'Traceback (most recent call last):\n  File "/p/t.py", line 1, in f\n    g()\nKeyError: 1\n'
    )
    cause = one(end_of, tail, returncode=-11).cause
    assert (cause.exception_type, cause.frame) == ("KeyError", "t.py:1 in f")
    assert "SIGSEGV" in cause.summary


@pytest.mark.parametrize(
    "crash",
    [
        "terminate called without an active exception\n",
        'Fatal Python error: Aborted\n\nCurrent thread 0x01 (most recent call first):\n  File "/p/x.py", line 1 in g\n',
    ],
)
def test_abort_of_torchs_threads_at_exit_does_not_hide_the_exception(end_of, crash):
    tail = (
        'Traceback (most recent call last):\n  File "/p/t.py", line 1, in f\n    g()\nKeyError: 1\n'
    )
    diagnosis = one(end_of, tail + crash, returncode=-6)
    assert (diagnosis.cause.exception_type, diagnosis.cause.frame) == ("KeyError", "t.py:1 in f")
    assert mentions(diagnosis.cause.summary, "SIGABRT (abort)", "exception")
    assert diagnosis.exit_code == 134


@pytest.mark.parametrize(
    "line",
    [
        "double free or corruption (!prev)",
        "*** stack smashing detected ***: terminated",
        "python: /src/a.c:12: run: Assertion `x > 0' failed.",
        "F1128 00:45:12.345678 123 check.cc:12] Check failed: a == b",
    ],
)
def test_fatal_lines_of_native_code_are_quoted(end_of, line):
    cause = one(end_of, f"step 1\n{line}\n", returncode=-6).cause
    assert cause.message in line
    assert line in cause.excerpt


def test_faulthandler_gives_the_current_threads_innermost_user_frame(end_of):
    diagnosis = one(
        end_of,
        "Fatal Python error: Segmentation fault\n\n"
        'Thread 0x00007f01 (most recent call first):\n  File "/p/other.py", line 1 in wait\n\n'
        "Current thread 0x00007f02 [python] (most recent call first):\n"
        '  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at\n  File "/p/train.py", line 14 in kernel\n'
        '  File "/p/train.py", line 21 in <module>\n\nExtension modules: numpy (total: 1)\n',
        returncode=-11,
    )
    assert diagnosis.cause.frame == "train.py:14 in kernel"
    assert diagnosis.signature == ("SIGSEGV", "train.py:14 in kernel")


def test_fatal_message_before_the_dump_stays_the_message(end_of):
    cause = one(
        end_of,
        "double free or corruption (!prev)\nFatal Python error: Aborted\n\n"
        'Current thread 0x01 (most recent call first):\n  File "/p/train.py", line 14 in kernel\n',
        returncode=-6,
    ).cause
    assert cause.message == "double free or corruption (!prev)"
    assert cause.frame == "train.py:14 in kernel"


def test_c_stack_of_python_3_14_gives_the_native_function(end_of):
    cause = one(
        end_of,
        "Fatal Python error: Segmentation fault\n\n"
        "Current thread 0x00007f5b [python] (most recent call first):\n"
        '  File "/p/train.py", line 14 in kernel\n\n'
        "Current thread's C stack trace (most recent call first):\n"
        '  Binary file "/usr/bin/python3.14", at _Py_DumpStack+0x48 [0x55d0]\n'
        '  Binary file "/usr/bin/python3.14", at +0x32dcbd [0x55d1]\n'
        '  Binary file "/lib/x86_64-linux-gnu/libc.so.6", at +0x42520 [0x7f5b]\n'
        '  Binary file "/v/lib/_kernels.so", at launch_rows+0x1f [0x7f5c]\n',
        returncode=-11,
    ).cause
    assert cause.message == "Segmentation fault in launch_rows (_kernels.so)"
    assert cause.frame == "train.py:14 in kernel"


@pytest.mark.parametrize(
    ("tail", "code", "message", "repeats"),
    [
        (
            "usage: t.py [-h] --data DATA\nt.py: error: unrecognized arguments: --lrr\n",
            2,
            "unrecognized arguments: --lrr",
            "usage error",
        ),
        (
            "Usage: t.py [OPTIONS]\nTry 't.py --help' for help.\n\nError: No such option: --lrr\n",
            2,
            "No such option: --lrr",
            "usage error",
        ),
        (
            "FATAL Flags parsing error: Unknown command line flag 'lrr'\n",
            1,
            "Unknown command line flag 'lrr'",
            "usage error",
        ),
        (
            "/usr/bin/python3: can't open file '/p/x.py': [Errno 2] No such file or directory\n",
            2,
            "cannot open /p/x.py: No such file or directory",
            "missing script",
        ),
        (
            "/usr/bin/python3: No module named trainer\n",
            1,
            "No module named trainer",
            "import error",
        ),
        (
            "/usr/bin/python3.11: Error while finding module specification for 'a.b' (ModuleNotFoundError: No module named 'a')\n",
            1,
            "No module named 'a'",
            "import error",
        ),
        ("warming up\nno data in /data\n", 1, "no data in /data", None),
        (
            "bash: line 1: trainn: command not found\n",
            127,
            "bash: line 1: trainn: command not found",
            None,
        ),
        ("sh: 1: ./run: Permission denied\n", 126, "sh: 1: ./run: Permission denied", None),
    ],
)
def test_ends_without_an_exception(end_of, tail, code, message, repeats):
    diagnosis = one(end_of, tail, returncode=code)
    assert (diagnosis.cause.message, diagnosis.repeats, diagnosis.exit_code) == (
        message,
        repeats,
        code,
    )


def test_text_of_sys_exit_is_found_before_warnings(end_of):
    tail = "no data in /data\n/p/t.py:3: ResourceWarning: unclosed file\n[W1128 00:45:12.3 ProcessGroup.cpp:1] Warning: not destroyed\n"
    assert one(end_of, tail).cause.message == "no data in /data"


def test_a_silent_end_is_reported(end_of):
    assert mentions(one(end_of, returncode=3).cause.summary, "code 3", "nothing", "stderr")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has",
            "GPU memory is full",
        ),
        ("RuntimeError: CUDA error: out of memory", "GPU memory is full"),
        ("MemoryError", "host memory (not GPU memory)"),
        (
            "RuntimeError: [enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory",
            "host memory",
        ),
        ("RuntimeError: CUDA error: device-side assert triggered", "CUDA_LAUNCH_BLOCKING"),
        (
            "RuntimeError: CUDA error: no kernel image is available for execution on the device",
            "get_arch_list",
        ),
        (
            "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, unhandled system error",
            "NCCL_DEBUG",
        ),
        ("OSError: [Errno 28] No space left on device", "df -h"),
        (
            "torch.distributed.DistNetworkError: The server socket has failed to listen. port: 29500, EADDRINUSE",
            "ss -ltnp",
        ),
        (
            "RuntimeError: DataLoader worker (pid 5) is killed by signal: Bus error. It is possible that",
            "/dev/shm",
        ),
        ("OSError: [Errno 24] Too many open files", "ulimit -n"),
        (
            "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
            "LD_LIBRARY_PATH",
        ),
        (
            "AssertionError: DeepSpeed requires --deepspeed_config to specify configuration file",
            "pass-config=deepspeed",
        ),
        (
            "AssertionError: train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size 32 != 8",
            "one worker alone: --num-procs 1",
        ),
        (
            "importlib.metadata.PackageNotFoundError: No package metadata was found for transformers",
            "-m pip install transformers",
        ),
        ("ValueError: anything", None),
    ],
)
def test_hints_are_concrete(end_of, text, hint):
    tail = f'Traceback (most recent call last):\n  File "/p/t.py", line 1, in f\n    g()\n{text}\n'
    got = one(end_of, tail).hint
    assert (hint in (got or "")) if hint else got is None


NOT_USED = (
    'Traceback (most recent call last):\n  File "/p/t.py", line 1, in f\n    g()\n'
    "ValueError: Some specified arguments are not used by the HfArgumentParser: ['--num-procs', '2']\n"
)
OURS = "distlaunch has an option --num-procs, which goes before SCRIPT: what follows SCRIPT is the script's own"


@pytest.mark.parametrize(
    ("phrase", "hint"),
    [
        ("usage: t.py [-h]\nt.py: error: unrecognized arguments: --num-procs 2\n", OURS),
        (
            "usage: t.py [-h]\nt.py: error: unrecognized arguments: 7 --steps=3 --num_procs=2\n",
            OURS,
        ),
        (
            "Usage: t.py [OPTIONS]\nTry 't.py --help' for help.\n\nError: No such option: --num-procs\n",
            OURS,
        ),
        ("FATAL Flags parsing error: Unknown command line flag 'num-procs'\n", OURS),
        (NOT_USED, OURS),
        (
            "usage: t.py [-h]\nt.py: error: unrecognized arguments: --stepz 2 --given num-procs\n",
            None,
        ),
        ("usage: t.py [-h]\nt.py: error: argument --num-procs: expected one argument\n", None),
    ],
)
def test_an_option_that_the_script_does_not_have_is_led_to_where_it_belongs(end_of, phrase, hint):
    assert one(end_of, phrase, returncode=1 if "Traceback" in phrase else 2).hint == hint


def test_options_of_another_command_have_its_names(end_of):
    names = OptionNames(names={"num_procs": "--nproc-per-node"}, absent=frozenset({"ssh_user"}))

    def hint(option: str) -> str | None:
        phrase = f"usage: t.py [-h]\nt.py: error: unrecognized arguments: {option} 2\n"
        return one(end_of, phrase, returncode=2).hint

    with use_names(names):
        assert mentions(hint("--nproc_per_node"), "--nproc-per-node")
        assert hint("--num-procs") is None
        assert hint("--ssh-user") is None


@pytest.mark.parametrize("phrase", ["--local_rank=0", "--local_rank=0 --num-procs 2"])
def test_the_local_rank_can_be_left_out_where_the_launcher_has_added_it(end_of, phrase):
    end = end_of(
        0, f"usage: t.py [-h]\nt.py: error: unrecognized arguments: {phrase}\n", returncode=2
    )
    off = "-o local-rank=off leaves it out: LOCAL_RANK in the environment says the same"
    assert diagnose([end], world_size=2, adds_local_rank=True).hint == off
    assert diagnose([end], world_size=2).hint == (OURS if "num-procs" in phrase else None)


@pytest.mark.parametrize(
    ("phrase", "code"),
    [
        ("usage: t.py [-h]\nt.py: error: unrecognized arguments: -- --lr 1\n", 2),
        (
            "Usage: t.py [OPTIONS]\nTry 't.py --help' for help.\n\nError: Got unexpected extra argument (1)\n",
            2,
        ),
        (NOT_USED, 1),
    ],
)
def test_dashes_behind_the_script_are_named_where_the_scripts_own_parser_refused_its_arguments(
    end_of, phrase, code
):
    end = end_of(0, phrase, returncode=code)
    hint = diagnose([end], world_size=1, dashes_first=True).hint or ""
    assert mentions(hint, "`--` behind SCRIPT")
    assert "behind SCRIPT" not in (diagnose([end], world_size=1).hint or "")
    other = end_of(0, "Traceback (most recent call last):\nValueError: no\n", returncode=1)
    assert diagnose([other], world_size=1, dashes_first=True).hint is None


def test_a_module_that_is_missing_is_named_for_whoever_can_look_for_it(end_of):
    phrase = "Traceback (most recent call last):\n  File 't.py', line 1\nModuleNotFoundError: No module named 'A.b'\n"
    assert one(end_of, phrase).missing_module == "A.b"
    assert one(end_of, phrase.replace("ModuleNotFoundError", "ValueError")).missing_module is None


def test_missing_module_names_the_interpreter(end_of):
    tail = "Traceback (most recent call last):\n  File \"/p/t.py\", line 1, in <module>\n    import X\nModuleNotFoundError: No module named 'X.y'\n"
    diagnosis = diagnose([end_of(0, tail)], world_size=1, python="/opt/py/bin/python3")
    assert diagnosis.hint is not None
    assert mentions(diagnosis.hint, "/opt/py/bin/python3", "X.y", "the script's folder")


@pytest.mark.parametrize(
    ("phrase", "hint"),
    [
        (
            "Error while finding module specification for 'no.such' (ModuleNotFoundError: No module named 'no')",
            "/usr/bin/python3 has no module no.such, nor has the working directory",
        ),
        (
            "No module named nosuch",
            "/usr/bin/python3 has no module nosuch, nor has the working directory",
        ),
        (
            "No module named p.__main__; 'p' is a package and cannot be directly executed",
            "p has no module __main__",
        ),
    ],
)
def test_a_mistyped_module_is_reported_with_where_it_was_looked_for(end_of, phrase, hint):
    end = end_of(0, f"/usr/bin/python3: {phrase}\n")
    assert (diagnose([end], world_size=1, python="/usr/bin/python3").hint or "").startswith(hint)


PDB_QUIT = 'Traceback (most recent call last):\n  File "/p/t.py", line 3, in <module>\n    breakpoint()\nbdb.BdbQuit\n'
SHELL = '  File "/p/run.sh", line 3\n    echo hello world\n         ^^^^^\nSyntaxError: invalid syntax\n'
SHEBANG = (
    '  File "/p/run", line 1\n    #!/bin/sh é\n              ^\nSyntaxError: (unicode error)\n'
)
SET_E = "Traceback (most recent call last):\n  File \"/p/run.bash\", line 2, in <module>\n    set -e\nNameError: name 'e' is not defined\n"


@pytest.mark.parametrize(
    ("tail", "code", "hint"),
    [
        (PDB_QUIT, 1, "--num-procs 1"),
        (PDB_QUIT.replace("bdb.BdbQuit", "EOFError: EOF when reading a line"), 1, "--num-procs 1"),
        ("> /p/t.py(3)<module>()\n(Pdb) ", -9, "--num-procs 1"),
        (SHELL, 1, "--no-python"),
        (SHEBANG, 1, "--no-python"),
        (SET_E, 1, "--no-python"),
        (
            '  File "/bin/true", line 1\nSyntaxError: source code cannot contain null bytes\n',
            1,
            "--no-python",
        ),
        ("cannot start the worker (fork): Resource temporarily unavailable\n", 126, "ulimit -u"),
        ("cannot start the worker (pipe): Too many open files\n", 126, "ulimit -n"),
        ("sh: 1: ./run: Permission denied\n", 126, "is it executable"),
    ],
)
def test_the_hint_corrects_a_wrong_start_or_request(end_of, tail, code, hint):
    assert hint in (diagnose([end_of(0, tail, returncode=code)], world_size=2).hint or "")


IN_USE = (
    "RuntimeError: The server socket has failed to listen on any local network address. port: 57337, useIpv6: false,"
    " code: -98, name: EADDRINUSE, message: address already in use\n"
)


@pytest.mark.parametrize(
    ("rank", "world_size", "port", "words"),
    [
        (
            1,
            2,
            57337,
            "port 57337 is this job's own (MASTER_PORT), and rank 0 listens on it: rank 1 tried to",
        ),
        (
            0,
            2,
            57337,
            "does the script give another worker rank 0, or does rank 0 open the port twice?",
        ),
        (0, 1, 57337, "does the script open it twice?"),
        (1, 2, 5733, "`ss -ltnp` names the process"),
        (1, 2, None, "`ss -ltnp` names the process"),
    ],
)
def test_the_jobs_own_port_is_distinguished_from_another_programs(
    end_of, rank, world_size, port, words
):
    found = diagnose([end_of(rank, IN_USE)], world_size=world_size, master_port=port)
    assert words in found.hint


def test_one_worker_that_quits_its_debugger_is_not_reported_to_be_one(end_of):
    assert diagnose([end_of(0, PDB_QUIT)], world_size=1).hint is None


@pytest.mark.parametrize(
    "tail",
    [
        SHELL.replace("run.sh", "train.py"),
        "  File \"/p/t.py\", line 1\nSyntaxError: Non-UTF-8 code starting with '\\xe9' in file /p/t.py on line 1\n",
        PDB_QUIT.replace("bdb.BdbQuit", "EOFError: Ran out of input"),
        "terminate called without an active exception\n",
    ],
)
def test_hints_for_a_wrong_start_stay_away_from_other_failures(end_of, tail):
    hint = one(end_of, tail).hint or ""
    assert "--no-python" not in hint
    assert "--num-procs" not in hint


def test_an_abort_while_it_ended_with_an_exception_leaves_the_exception_the_cause_and_gives_no_hint(
    end_of,
):
    tail = 'Traceback (most recent call last):\n  File "/p/t.py", line 3, in f\n    g()\nValueError: bad\n'
    diagnosis = one(end_of, f"{tail}terminate called without an active exception\n", returncode=-6)
    assert (diagnosis.cause.exception_type, diagnosis.cause.message) == ("ValueError", "bad")
    assert diagnosis.hint is None


def test_a_crash_while_horovod_starts_has_a_hint_of_its_own(end_of):
    tail = (
        "Fatal Python error: Segmentation fault\n\nThread 0x00007f0ef224ab80 (most recent call first):\n"
        '  File "/v/lib/python3.11/site-packages/horovod/common/basics.py", line 105 in init\n'
    )
    assert "getent hosts" in str(one(end_of, tail, returncode=-11).hint)
    assert "Horovod" not in str(
        one(end_of, tail.replace("in init", "in rank"), returncode=-11).hint
    )


def test_an_abort_of_horovod_has_that_hint_if_gloo_found_no_address(end_of):
    tail = (
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
        "  what():  [enforce fail at device.cc:136] rp != nullptr. {}\n"
        "Fatal Python error: Aborted\n\nThread 0x00007f96ef043b80 (most recent call first):\n"
        '  File "/v/lib/python3.11/site-packages/horovod/common/basics.py", line 105 in init\n'
    )
    no_address = tail.format("Unable to find address for: n1")
    assert "getent hosts" in str(one(end_of, no_address, returncode=-6).hint)
    other = tail.format("Connection refused")
    assert "getent hosts" not in str(one(end_of, other, returncode=-6).hint)


def test_last_words_are_kept_apart_from_an_exceptions_own_lines(end_of):
    cause = one(end_of, "giving up\n", returncode=3).cause
    assert (cause.excerpt, cause.last_words) == (("giving up",), True)
    assert one(end_of, PDB_QUIT).cause.last_words is False


@pytest.mark.parametrize(
    ("before", "shown"), [("loading\nready\n", False), ("loading\nERROR: disk gone\n", True)]
)
def test_before_the_text_of_sys_exit_only_lines_about_failures_are_shown(end_of, before, shown):
    cause = one(end_of, f"{before}no data\n").cause
    assert cause.message == "no data"
    assert bool(cause.excerpt) is shown


def error_file(message, stack=None):
    extra = {"timestamp": "1795826773"} | ({"py_callstack": stack} if stack else {})
    return json.dumps({"message": {"message": message, "extraInfo": extra, "errorCode": 1}})


def test_error_file_speaks_where_stderr_is_silent(end_of):
    stack = "Traceback (most recent call last):\n  File \"/p/t.py\", line 8, in main\n    f()\nKeyError: 'x'\n"
    cause = one(end_of, error_file=error_file("KeyError: 'x'", stack)).cause
    assert (cause.exception_type, cause.message, cause.frame) == (
        "KeyError",
        "'x'",
        "t.py:8 in main",
    )


@pytest.mark.parametrize("message", ["KeyError: 'x'", {"message": "KeyError: 'x'"}])
def test_error_file_without_a_stack(message):
    (raised,) = read_error_file(json.dumps({"message": message}))
    assert (raised.type, raised.message) == ("KeyError", "'x'")


def test_error_file_wins_over_an_unrelated_traceback_on_stderr(end_of):
    tail = 'Traceback (most recent call last):\n  File "/p/t.py", line 1, in f\n    g()\nOSError: handled\n'
    assert (
        one(end_of, tail, error_file=error_file("KeyError: 'x'")).cause.exception_type == "KeyError"
    )


def test_the_chain_on_stderr_wins_over_the_error_file_of_the_same_exception(end_of):
    frame = 'Traceback (most recent call last):\n  File "/p/t.py", line 1, in f\n    g()\n'
    tail = f"{frame}OSError: first\n\nThe above exception was the direct cause of the following exception:\n\n{frame}KeyError: 'x'\n"
    assert (
        one(end_of, tail, error_file=error_file("KeyError: 'x'")).cause.original
        == "OSError: first (t.py:1 in f)"
    )


@pytest.mark.parametrize(
    "data",
    [
        "",
        "{",
        "\x00\ufffd\ufffd",
        "[" * 100_000,
        "null",
        "3",
        '"text"',
        "{}",
        '{"message": null}',
        '{"message": 3}',
        '{"message": []}',
        '{"message": {"message": {"message": 1}}}',
        '{"message": {"extraInfo": 5}}',
        '{"message": {"extraInfo": {"py_callstack": [1]}}}',
        '{"message": ""}',
        '{"message": "' + "x" * 300_000 + '"}',
    ],
)
def test_malformed_error_file_is_as_good_as_none(end_of, data):
    assert read_error_file(data) == []
    tail = 'Traceback (most recent call last):\n  File "/p/t.py", line 1, in f\n    g()\nOSError: real\n'
    assert one(end_of, tail, error_file=data).cause.message == "real"


def test_error_file_with_lone_surrogates_and_escapes_is_cleaned(end_of):
    cause = one(end_of, error_file='{"message": "ValueError: a\\ud800\\u001b[2Jb"}').cause
    assert cause.message == "ab"


def test_a_killed_loader_worker_is_the_cause_wherever_torchs_handler_met_it(end_of):
    tail = (
        'Traceback (most recent call last):\n  File "/p/t.py", line 26, in <module>\n    for _ in loader:\n'
        "ConnectionResetError: [Errno 104] Connection reset by peer\n"
        "Exception ignored in atexit callback: <bound method finalize._exitfunc>\nTraceback (most recent call last):\n"
        '  File "/v/lib/python3.11/site-packages/torch/utils/data/_utils/signal_handling.py", line 73, in handler\n'
        "    _error_if_any_worker_fails()\nRuntimeError: DataLoader worker (pid 5965) is killed by signal: Killed. \n"
    )
    diagnosis = one(end_of, tail, returncode=1)
    assert diagnosis.cause.message == "DataLoader worker (pid 5965) is killed by signal: Killed."
    assert "host memory" in (diagnosis.hint or "")
