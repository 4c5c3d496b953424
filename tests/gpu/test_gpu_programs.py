"""The programs of scripts/gpu-check without a GPU, and the checks of their observations."""

from __future__ import annotations

import json
import pickle

import pytest

CPU = ("--num-procs", "1")


def observations(gpu_check, program, *options, args=(), rank=0, codes=(0,)):
    return gpu_check.train(program, *CPU, *options, args=args).end(*codes).observations(rank)


def test_reduces_reports_the_group(on_cpu, lib):
    found = observations(on_cpu, "reduces.py")
    assert found["reduced"] == {"cpu": [0.0, 1.0, 2.0, 3.0]}
    assert found["backends"] == {"cpu": "gloo"}
    with pytest.raises(
        lib.check_environment.CheckError, match=r"device is 'cpu', not 'cuda:0'; backend is 'gloo'"
    ):
        lib.training.check_group(found)


def test_reduces_waits_for_a_file(on_cpu):
    go_on = f"{on_cpu.folder()}/go-on"
    job = on_cpu.train("reduces.py", *CPU, args=["--wait", go_on])
    job.until(job.has_observations, "word")
    assert job.command.process.poll() is None
    open(go_on, "w").close()
    job.end()


def test_losses_are_compared(on_cpu, lib):
    # 134: torch's gloo threads sometimes abort when the worker exits, after it has reported.
    alone = observations(on_cpu, "trains.py", codes=(0, 134))
    assert alone["wrapper"] == "DistributedDataParallel"
    assert lib.training.same_losses(alone) <= 1e-6
    with pytest.raises(lib.check_environment.CheckError, match="losses differ by"):
        lib.training.same_losses({**alone, "wrapped": [*alone["wrapped"][:-1], 1.0]})
    with pytest.raises(lib.check_environment.CheckError, match="no number"):
        lib.training.same_losses({**alone, "wrapped": [*alone["wrapped"][:-1], float("nan")]})


def test_precision_place_and_recomputing_are_seen(on_cpu, lib):
    judge = lib.training.judge_sharded
    fsdp = ("--backend", "fsdp")
    scaled = on_cpu.train(
        "shards.py", *CPU, *fsdp, "-o", "activation-checkpointing", args=["--scaler"]
    )
    half = observations(on_cpu, "shards.py", *fsdp, "-o", "precision=bf16")
    assert judge(half, "torch.bfloat16", kept_on="cpu").startswith(
        "computes in bfloat16, keeps float32 on cpu; loss"
    )
    for wrong in ({"computed_in": "torch.float32"}, {"kept_on": "cuda"}, {"times": 2}):
        with pytest.raises(lib.check_environment.CheckError):
            judge(half, **{"computed_in": "torch.bfloat16", "kept_on": "cpu", **wrong})
    twice = scaled.end().observations()
    assert "computed 2 times a step" in judge(twice, "torch.float32", kept_on="cpu", times=2)
    assert twice["scale"] == 65536.0


def test_a_resumed_training_is_held_against_an_uninterrupted_one(on_cpu, lib):
    words = (*CPU, "--max-restarts", "1", "--min-uptime", "0")
    broken = on_cpu.train("goes_on.py", *words, args=[on_cpu.folder(), "--fail-at", "8"])
    straight = observations(on_cpu, "goes_on.py", args=[on_cpu.folder()])
    resumed = broken.end().observations(attempt=1)
    assert lib.training.judge_resumed(straight, resumed).startswith("resumed at step 5")
    with pytest.raises(lib.check_environment.CheckError, match="differ from an uninterrupted"):
        lib.training.judge_resumed(straight, {**resumed, "digest": "another"})


def test_warm_and_cold_starts_are_distinguished(on_cpu, lib):
    words = (*CPU, "--max-restarts", "1", "--min-uptime", "0")
    warm = on_cpu.train("forks.py", *words, "--preload", "torch", args=["--fail"])
    cold = on_cpu.train("forks.py", *CPU)
    for attempt in (0, 1):
        lib.launching.judge_fork(
            warm.end().observations(attempt=attempt), attempt=attempt, warm=True
        )
    (preloaded,) = warm.events("preload")
    assert preloaded["problem"] is None
    assert preloaded["elapsed_s"] > 0
    with pytest.raises(lib.check_environment.CheckError, match="warm is False, not True"):
        lib.launching.judge_fork(cold.end().observations(), attempt=0, warm=True)


def test_workers_on_the_cpu_see_no_gpu(on_cpu):
    assert observations(on_cpu, "sees.py")["uuids"] == []


def test_accelerate_reports_precision_and_losses(on_cpu, lib):
    found = observations(
        on_cpu, "accelerated.py", "--backend", "accelerate", "-o", "mixed-precision=bf16"
    )
    assert found["precision"] == "bf16"
    assert "torch.bfloat16" in found["computed_in"]
    assert "precision bf16; loss" in lib.frameworks.judge_learnt(found)
    with pytest.raises(lib.check_environment.CheckError):
        lib.frameworks.judge_learnt({**found, "losses": [1.0, float("nan")]})


def test_torch_reads_a_dump_of_the_recorder(on_cpu, lib, tmp_path):
    dump = tmp_path / "nccl_trace_rank_0"
    assert not lib.failing._is_whole(str(dump))
    data = pickle.dumps(
        {"version": "2.10", "pg_config": {}, "entries": [{"profiling_name": "nccl:all_reduce"}]}
    )
    dump.write_bytes(data[:20])
    assert not lib.failing._is_whole(str(dump))
    dump.write_bytes(data)
    assert lib.failing._is_whole(str(dump))
    line = on_cpu.python(
        f"{lib.check_environment.WORKERS}/reads_trace.py", "nccl_trace_rank_", str(dump)
    ).splitlines()[-1]
    assert json.loads(line.removeprefix("observed ")) == {
        "version": "2.10",
        "rank": 0,
        "entries": ["nccl:all_reduce"],
    }


def test_a_report_that_names_another_cause_is_refused(lib):
    diagnosis = {
        "exception_type": "torch.OutOfMemoryError",
        "message": "CUDA out of memory. Tried to allocate 158.00 GiB.",
        "hint": "GPU memory is full: try a smaller batch",
        "frame": "breaks.py:11 in <module>",
    }
    judge = lib.failing.judge_report
    wanted = ("OutOfMemoryError", "out of memory")
    assert (
        judge(diagnosis, *wanted, hint="GPU memory is full")
        == "torch.OutOfMemoryError at breaks.py:11 in <module>"
    )
    for other in (
        {"exception_type": "RuntimeError"},
        {"message": "no"},
        {"hint": None},
        {"frame": None},
    ):
        with pytest.raises(lib.check_environment.CheckError):
            judge({**diagnosis, **other}, *wanted, hint="GPU memory is full")


def test_the_diagnosis_of_a_job_is_found_where_it_is_written(on_cpu, lib):
    diagnosis = lib.failing._diagnosis(on_cpu.train("breaks.py", *CPU, args=["memory"]).end(1))
    assert diagnosis["frame"].startswith("breaks.py:")
    with pytest.raises(
        lib.check_environment.CheckError, match="the cause is "
    ):  # there is no GPU whose memory could be full
        lib.failing.judge_report(
            diagnosis, "OutOfMemoryError", "out of memory", hint="GPU memory is full"
        )


def test_the_plan_has_its_node_where_the_check_looks_for_gpus(on_cpu):
    plan = on_cpu.distlaunch("plan", "--format", "json", *CPU, __file__).end()
    (node,) = json.loads(plan.stdout)["nodes"]
    assert node["slots"] == 1


def test_without_a_gpu_asking_for_two_is_refused_as_the_check_expects(on_cpu):
    job = on_cpu.train("sees.py", "--num-gpus", "2", env={"CUDA_VISIBLE_DEVICES": ""}).end(2)
    assert "asked for" in job.stderr
    assert "Traceback" not in job.stderr
