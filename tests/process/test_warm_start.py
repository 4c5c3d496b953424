"""The job goes on, whatever the preloaded modules do and whatever happens to the server."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.facts import mentions

PROGRAMS = Path(__file__).parents[1] / "programs"
SERVER = "dl-warm"
COLD = "workers start without preloading"
AGAIN = ("--min-uptime", "0")


# --- what cannot be forked is started cold, and that is said once


def cold_start(warm, job, modules: str, *, because: str, options: Sequence[str] = ()) -> str:
    result = warm(
        "ends.py", "3", "ok", modules=modules, options=["--max-restarts", "1", *AGAIN, *options]
    ).wait()
    assert result.returncode == 0, result.stderr
    assert result.stderr.count(COLD) == 1, result.stderr
    assert because in result.stderr
    assert (
        because in [event["problem"] for event in result.of_type("preload")][-1] or because == COLD
    )
    assert job.has_sign("attempt-1-rank-1")
    job.launcher.assert_no_survivors()
    return result.stderr


def test_a_preload_that_raises_is_named_with_the_last_line(warm, module, job):
    module("raises", "raise ValueError('first\\nlast line')")
    cold_start(warm, job, "raises", because="importing raises failed: ValueError: last line")


def test_a_module_missing_inside_is_named(warm, module, job):
    module("lacks", "import not_there_at_all")
    cold_start(
        warm,
        job,
        "lacks",
        because="importing lacks failed: ModuleNotFoundError: No module named 'not_there_at_all'",
    )


@pytest.mark.parametrize("text", ["import sys; sys.exit(0)", "raise KeyboardInterrupt"])
def test_a_preload_that_wants_to_end_does_not_end_the_job(warm, module, job, text):
    module("leaves_us", text)
    cold_start(warm, job, "leaves_us", because="importing leaves_us failed")


def test_a_preload_that_ends_the_process_is_named(warm, module, job):
    module("vanishes", "import os; os._exit(0)")
    cold_start(
        warm, job, "vanishes", because="the process that was importing vanishes ended with 0"
    )


def test_a_preload_that_leaves_a_thread_is_named(warm, module, job):
    module(
        "threaded",
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True, name='late').start()",
    )
    cold_start(warm, job, "threaded", because="importing threaded left a thread running (late)")


def test_a_preload_that_closes_all_descriptors_leads_to_a_cold_start(warm, module, job):
    module("closes", "import os; os.closerange(3, 1024)")
    cold_start(warm, job, "closes", because=COLD)


@pytest.mark.parametrize(
    ("text", "because"),
    [
        (
            "import sys, types\nsys.modules['torch'] = types.ModuleType('torch')",
            "could not be set up (AttributeError: ",
        ),
        (
            "import os\nfor number in range(20, 110):\n    try: os.write(number, b'forked x:y')\n    except OSError: pass",
            "'forked x:y'",
        ),
        (
            (
                "import os, sys\nif not os.environ.get('AGAIN'):\n    os.environ['AGAIN'] = '1'\n"
                "    os.execv(sys.executable, [sys.executable] + sys.argv)"
            ),
            "or become another program",
        ),
    ],
    ids=["a stub of torch", "it writes to our socket", "it executes itself anew"],
)
def test_process_changes_by_preload_modules_lead_to_a_cold_start_if_needed(
    warm, module, job, text, because
):
    module("does", text)
    cold_start(warm, job, "does", because=because)


@pytest.mark.parametrize(
    "text",
    [
        "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.detach(), line_buffering=True)",
        "import os\nos.environ = dict(os.environ)",
        "import os\nfiles = [open(os.devnull) for _ in range(150)]\nassert not {100, 101} & {file.fileno() for file in files}",
        "import sys\nsys.stdin.close()",
    ],
    ids=["detaches stdout", "replaces os.environ", "has many files", "closes stdin"],
)
def test_and_to_a_warm_one_with_the_workers_own_environment_and_streams_where_it_can(
    warm, module, job, text
):
    module("does", text)
    (job.work / "see.py").write_text(
        "import os, sys\nimport does\nprint(os.environ['RANK'], 'json' in sys.modules, flush=True)\n"
    )
    result = warm(job.work / "see.py", modules="json,does").wait()
    assert result.returncode == 0, result.stderr
    assert COLD not in result.stderr
    for rank in (0, 1):
        assert result.lines_of(rank) == [f"{rank} True"]


def test_a_limit_of_open_files_that_a_setup_command_lowers_leads_to_a_cold_start(warm, job):
    cold_start(
        warm, job, "json", because="could not be set up", options=["--setup", "ulimit -n 20"]
    )


THREADED = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True, name='late').start()"


@pytest.mark.parametrize(
    ("text", "because", "options"),
    [
        (THREADED, "importing spoils left a thread running (late)", ()),
        ("import decimal\nraise ValueError('no')", "importing spoils failed: ValueError: no", ()),
        ("import os; os._exit(3)", "the process that was importing spoils ended with 3", ()),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
            "the process that was importing spoils",
            (),
        ),
        (
            "import signal\nwhile True: signal.pause()",
            "importing spoils did not end within",
            ("--hang-timeout", "3"),
        ),
        ("import os; os.closerange(3, 1024)", "the process that was importing spoils", ()),
    ],
    ids=["a thread", "an exception", "an exit", "a crash", "a hang", "closed files"],
)
def test_a_module_that_spoils_the_preload_is_named_and_the_others_are_kept(
    warm, module, job, text, because, options
):
    module("spoils", text)
    module("late", "")
    (job.work / "see.py").write_text(
        "import sys\nprint(*(name in sys.modules for name in ('json', 'spoils', 'late')), flush=True)\n"
    )
    result = warm(job.work / "see.py", modules="json,spoils,late", options=options).wait()
    assert result.returncode == 0, result.stderr
    assert COLD not in result.stderr
    [notice_count] = [
        line
        for line in result.stderr.splitlines()
        if "spoils is left out, and workers import it" in line
    ]
    assert because in notice_count
    for rank in (0, 1):
        assert result.lines_of(rank) == ["True False True"]
    [event] = result.of_type("preload")
    assert (event["modules"], event["left_out"], event["problem"]) == (
        ["json", "late"],
        ["spoils"],
        None,
    )


def test_each_module_that_spoils_the_preload_is_left_out_and_where_none_is_left_workers_start_cold(
    warm, module, job
):
    module("threaded", THREADED)
    module("raises", "raise ValueError('no')")
    result = warm("process_state.py", modules="raises,json,threaded").wait()
    assert result.returncode == 0, result.stderr
    [event] = result.of_type("preload")
    assert (event["modules"], event["left_out"]) == (["json"], ["raises", "threaded"])
    notice_count = cold_start(
        warm, job, "threaded,raises", because="importing threaded left a thread running (late)"
    )
    assert mentions(notice_count, "raises", "left out")


def test_the_preload_process_lets_pyarrow_start_no_thread_and_workers_do_not_see_how(
    warm, module, job
):
    module("asks", "import os\nconf = os.environ['JE_ARROW_MALLOC_CONF']")
    (job.work / "see.py").write_text(
        "import os\nimport asks\nprint(asks.conf, os.environ.get('JE_ARROW_MALLOC_CONF'), flush=True)\n"
    )
    assert warm(job.work / "see.py", modules="asks").wait().lines_of(1) == [
        "background_thread:false None"
    ]
    given = warm(
        job.work / "see.py", modules="asks", options=["-x", "JE_ARROW_MALLOC_CONF=narenas:2"]
    ).wait()
    assert given.lines_of(1) == ["narenas:2,background_thread:false narenas:2"]
    wanted = warm(
        job.work / "see.py",
        modules="asks",
        options=["-x", "JE_ARROW_MALLOC_CONF=background_thread:true"],
    )
    assert wanted.wait().lines_of(1) == ["background_thread:true background_thread:true"]


def test_an_import_that_never_ends_is_given_up_under_a_hang_timeout(warm, module, job):
    module("stuck", "import signal\nwhile True: signal.pause()")
    cold_start(
        warm,
        job,
        "stuck",
        because="importing stuck did not end within",
        options=["--hang-timeout", "2"],
    )


def test_output_of_preload_modules_is_shown_once_and_filed(warm, module):
    module(
        "prints",
        "import os\nprint('on stdout')\nos.system('echo by a child >&2')\nprint('unfinished', end='')",
    )
    result = warm("process_state.py", modules="prints").wait()
    assert result.returncode == 0, result.stderr
    for text in ("on stdout", "by a child", "unfinished"):
        assert (result.stdout + result.stderr).count(text) == 1
    assert (
        result.run_dir / "attempt-0" / "preload.log"
    ).read_text() == "on stdout\nby a child\nunfinished"
    assert COLD not in result.stderr


def test_of_much_output_the_beginning_is_shown_and_all_is_filed(warm, module):
    module("prints", "for number in range(5000): print('line', number)")
    result = warm("process_state.py", modules="prints").wait()
    assert result.returncode == 0, result.stderr
    log = result.run_dir / "attempt-0" / "preload.log"
    assert len(log.read_text().splitlines()) == 5000
    assert "line 19\n" in result.stderr
    assert "line 20\n" not in result.stderr
    assert f"... 4,980 more lines in {log}" in result.stderr


@pytest.mark.parametrize(
    ("text", "shown"),
    [("import warnings\nwarnings.warn('an old way')", True), ("print('x')", False)],
)
def test_a_warning_among_it_is_shown_to_who_wants_to_see_little(warm, module, text, shown):
    module("prints", text)
    result = warm("process_state.py", modules="prints", options=["--quiet"]).wait()
    assert result.returncode == 0, result.stderr
    assert ("while preloading" in result.stderr) is shown


def test_where_nothing_is_printed_no_file_is_left(warm):
    result = warm("process_state.py").wait()
    assert not (result.run_dir / "attempt-0" / "preload.log").exists()
    assert [(event["modules"], event["problem"]) for event in result.of_type("preload")] == [
        (["json"], None)
    ]


def test_variables_that_are_read_at_load_time_may_be_set_for_all_workers(warm, job):
    (job.work / "see.py").write_text(
        "import os, sys\nprint('json' in sys.modules, os.environ['PYTHONHASHSEED'])\n"
    )
    result = warm(
        job.work / "see.py", options=["-x", "OMP_NUM_THREADS=1", "-x", "PYTHONHASHSEED=3"]
    ).wait()
    assert result.returncode == 0, result.stderr
    for rank in (0, 1):
        assert result.lines_of(rank) == ["True 3"]


# --- the server and its end


def test_a_server_killed_while_it_imports_leads_to_a_cold_start(job, warm, module):
    module("slow", "import time\nopen('importing', 'w').close()\nwhile True: time.sleep(1)")
    running = warm("process_state.py", modules="slow")
    job.await_signs(running, "importing")
    os.kill(job.server_of(running), signal.SIGKILL)
    result = running.wait()
    assert result.returncode == 0, result.stderr
    assert mentions(result.stderr, "importing slow", "signal 9")
    assert result.stderr.count(COLD) == 1


FAILS_ONCE = f"""
import os, sys
sys.path.insert(0, {str(PROGRAMS)!r})
import survivor
from signs import await_sign, sign
survivor.hold()
if os.environ["DISTLAUNCH_ATTEMPT"] == "0":
    sign("ready-" + os.environ["RANK"], str(os.getpid()))
    await_sign("go")
    sys.exit(3)
sign("json-" + os.environ["RANK"], str("json" in sys.modules))
"""


@pytest.mark.parametrize("number", [None, signal.SIGKILL, signal.SIGTERM])
def test_a_server_killed_while_workers_run_harms_none_of_them_and_the_restart_is_cold(
    job, warm, number
):
    (job.work / "fails.py").write_text(FAILS_ONCE)
    running = warm(job.work / "fails.py", options=["--max-restarts", "1", *AGAIN])
    job.await_ready(running)
    if number is not None:
        os.kill(job.server_of(running), number)
        running.wait_stderr(COLD)
    job.put_sign("go")
    result = running.wait()
    assert result.returncode == 0, result.stderr
    assert result.stderr.count(COLD) == (number is not None)
    assert [job.sign(f"json-{rank}") for rank in (0, 1)] == [str(number is None)] * 2
    job.launcher.assert_no_survivors()


def test_workers_outlive_the_server(job, warm):
    running = warm("waits.py", "--save", "TERM")
    workers = job.await_ready(running)
    os.kill(job.server_of(running), signal.SIGKILL)
    running.wait_stderr(COLD)
    assert all(map(job.is_alive, workers))
    running.send_signal(signal.SIGTERM)
    job.await_signs(running, "got-TERM-0", "got-TERM-1")
    job.put_sign("go")
    assert running.wait().returncode == 143
    assert job.has_sign("saved-0")
    assert job.has_sign("saved-1")


def test_a_server_that_is_stopped_does_not_keep_the_job_from_ending(job, warm):
    running = warm("waits.py")
    job.await_ready(running)
    os.kill(job.server_of(running), signal.SIGSTOP)
    running.send_signal(signal.SIGTERM)
    assert running.wait().returncode == 143
    job.launcher.assert_no_survivors()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_modules_are_imported_ends_the_job_in_order(job, warm, module, number, code):
    module(
        "stuck_import",
        f"import sys\nsys.path.insert(0, {str(PROGRAMS)!r})\nimport survivor, signal\nsurvivor.hold()\nsignal.pause()",
    )
    running = warm("process_state.py", modules="stuck_import", procs=3)
    server = job.server_of(running)
    job.until(lambda: server in job.launcher.holding(), "the import")
    running.send_signal(number)
    result = running.wait(20)
    assert result.returncode == code, result.stderr
    assert not job.has_sign("process-0")
    assert mentions(result.stderr, signal.Signals(number).name, "starting")
    assert mentions(result.stderr, "stopped", "no worker")
    job.launcher.assert_no_survivors()


def test_the_server_has_a_session_of_its_own_where_no_typed_interrupt_reaches_it(job, warm):
    running = warm("waits.py", "--note", "INT")
    job.await_ready(running)
    server = job.server_of(running)
    assert os.getsid(server) == server
    running.send_signal(signal.SIGTERM)
    assert running.wait().returncode == 143


@pytest.mark.parametrize("whom", ["launcher", "spawner"])
@pytest.mark.parametrize("when", ["importing", "running"])
def test_nothing_is_left_when_launcher_or_spawner_is_killed(job, warm, module, whom, when):
    hold = f"import sys\nsys.path.insert(0, {str(PROGRAMS)!r})\nimport survivor\nsurvivor.hold()\n"
    module("held", hold + ("import signal\nsignal.pause()" if when == "importing" else ""))
    running = warm("waits.py", modules="held", options=["--failure-grace", "0.5"])
    server = job.server_of(running)
    job.until(lambda: server in job.launcher.holding(), "the import")
    if when == "running":
        job.await_ready(running)
    os.kill(running.pid if whom == "launcher" else job.spawner_of(running), signal.SIGKILL)
    running.wait()
    job.launcher.assert_no_survivors()


def test_processes_that_a_preload_module_has_started_end_with_the_job(job, warm, module):
    module(
        "starts",
        f"""
        import subprocess, sys
        sys.path.insert(0, {str(PROGRAMS)!r})
        import survivor
        subprocess.Popen(["sleep", "100"], pass_fds=[survivor.hold()])
        """,
    )
    result = warm("process_state.py", modules="starts").wait()
    assert result.returncode == 0, result.stderr
    job.launcher.assert_no_survivors()


# --- bad input


@pytest.mark.parametrize(
    ("modules", "message", "hint"),
    [
        ("qqtoch", "has no such module", "-m pip install 'qqtoch'"),
        ("json,jsn.decoder", "preload 'jsn.decoder': ", "did you mean json?"),
        ("js on", "'js on' is not the name of a module", None),
        ("json,", "'' is not the name of a module", None),
    ],
)
def test_a_module_that_is_not_there_is_refused_before_anything_starts(
    distlaunch, modules, message, hint
):
    result = distlaunch.train(
        "--num-procs", "1", "--preload", modules, PROGRAMS / "process_state.py"
    )
    assert result.returncode == 2
    assert message in result.stderr
    assert hint is None or hint in result.stderr
    assert result.run_dir is None


@pytest.mark.parametrize(
    ("option", "why"), [(["--no-python"], "--no-python"), (["--python", "python3"], "--python")]
)
def test_preload_is_refused_where_workers_are_not_our_python(distlaunch, option, why):
    result = distlaunch.train("--num-procs", "1", "--preload", "json", *option, "/bin/true")
    assert result.returncode == 2
    assert mentions(result.stderr, "--preload", why, "exclude")
