"""The questions that both sides answer: inputs of the kinds that the peers' own test suites use.

An input is a fact about a peer's interface (a host file, a filter, an option). No code of a peer is
here.
"""

from __future__ import annotations

from typing import NamedTuple


class Case(NamedTuple):
    """One question."""

    area: str
    """What is asked: a function of ``theirs.py`` and one of ``ours.py`` have this name."""
    input: tuple[str, ...]
    """The arguments of that function."""

    @property
    def name(self) -> str:
        """Return the case as one line."""
        return f"{self.area}: {' | '.join(map(one_line, self.input))}"


def one_line(text: str) -> str:
    """Return an input as it can stand in one line."""
    return text.replace("\n", "; ").replace("\t", "\\t") or "(nothing)"


def _cases(area: str, *inputs: str | tuple[str, ...]) -> list[Case]:
    return [Case(area, (each,) if isinstance(each, str) else each) for each in inputs]


POOL = "worker-0:4,worker-1:4"

CASES: tuple[Case, ...] = (
    *_cases(
        "deepspeed_hostfile",
        "worker-1 slots=2\nworker-2 slots=2",
        "\n  worker-1 slots=2  \n\n# a comment\n#worker-1 slots=3\n123.23.12.10 slots=2\n",
        "worker-1 slots=2 # the first\n",
        "worker-1\tslots=8\n",
        "worker-1   slots=8\n",
        "n1 slots=1\nn2 slots=3\nn3 slots=2\n",
        "gpu-01.cluster.example slots=4\n",
        "worker_1 slots=4\n",
        "worker-1 slots=2\nworker-2 slots=1\nworker-1 slots=1\n",
        "this is bad slots=1\n",
        "missingslots\n",
        "",
        "\n# nothing\n",
        "worker-1 slots=2\nthis is bad slots=1\nworker-2 slots=4\nmissingslots\n",
        "worker-1 slots=two\n",
        "worker-1 slots=-1\n",
        "worker-1 slots=0\n",
        "worker-1 slots = 2\n",
        "worker-1 slots=2 max_slots=4\n",
        "worker-1:2\n",
        "user@worker-1 slots=2\n",
    ),
    *_cases(
        "deepspeed_filter",
        ("worker-0:4", "", ""),
        ("worker-0:4", "", "worker-0:1"),
        ("worker-0:4", "", "worker-0:1,2"),
        ("worker-0:4", "worker-0:1", ""),
        ("worker-0:4", "worker-0:1,1", ""),
        ("worker-0:4", "worker-0:1@worker-0:0,1", ""),
        ("worker-0:4", "worker-0", ""),
        ("worker-0:4", "", "worker-0"),
        ("worker-0:4", "", "worker-0:0,1,2,3"),
        ("worker-0:4", "worker-0:4", ""),
        ("worker-0:4", "worker-0:0,4", ""),
        ("worker-0:4", "", "worker-0:99"),
        ("worker-0:4", "jeff", ""),
        ("worker-0:4", "worker-0:", ""),
        ("worker-0:4", "worker-0:a", ""),
        (POOL, "", ""),
        (POOL, "worker-1:0,3", ""),
        (POOL, "", "worker-1"),
        (POOL, "", "worker-0:0,1@worker-1:3"),
        (POOL, "worker-0@worker-1:0,2", ""),
        (POOL, "worker-1:0,2", ""),
        (POOL, "worker-1@worker-0", ""),
        (POOL, "", "worker-0:1"),
        (POOL, "", "jeff"),
        (POOL, "worker-1:4", ""),
        (POOL, "", "worker-1:4"),
        (POOL, "", "worker-1@worker-0:1@5"),
        (POOL, "worker-0", "worker-1"),
        (POOL, "worker-0@worker-0:1", ""),
        (POOL, "worker-0:0-2", ""),
        (POOL, " worker-0:0 ", ""),
    ),
    *_cases(
        "deepspeed_refuses",
        "--num_nodes 1 -i localhost",
        "--num_nodes 1 --num_gpus 1 -i localhost",
        "--num_gpus 1 -i localhost",
        "--num_nodes 1 -e localhost",
        "--num_nodes 1 --num_gpus 1 -e localhost",
        "--num_gpus 1 -e localhost",
        "-i localhost:0 -e localhost:1",
        "--num_gpus two",
        "--hostfile /nowhere/hostfile --num_nodes 2",
    ),
    *_cases(
        "horovod_hosts",
        "worker-0:2,worker-1:2",
        "10.11.11.11:4,10.11.11.12:4",
        "worker-0:2",
        "localhost:2",
        "a:1,b:2,c:3",
        " a:1, b:2 ",
        "node_1:2,node.b:3",
        "worker-0",
        "worker-0:two",
        "worker-0:2,",
        "worker-0:2:3",
        "a:1,a:1",
        "a:0,b:2",
        "a:1;b:1",
        "a:-1",
        "",
    ),
    *_cases(
        "horovod_hostfile",
        "172.31.32.7 slots=8\n172.31.33.9 slots=8\n",
        "h1 slots=2\n",
        "h1 slots=2\nh2 slots=4\nh3 slots=1\n",
        "h1 slots=2\n\nh2 slots=2\n",
        "# hosts\nh1 slots=2\n",
        "h1\n",
        "h1 2\n",
    ),
    *_cases(
        "horovod_assignments",
        ("worker-0:2,worker-1:2", "4"),
        ("worker-0:2,worker-1:2", "3"),
        ("worker-0:2,worker-1:2", "2"),
        ("worker-0:2,worker-1:2", "1"),
        ("worker-0:2,worker-1:2", "5"),
        ("a:1,b:2", "3"),
        ("a:2,b:1", "3"),
        ("a:2,b:1,c:2", "5"),
        ("a:1,b:3,c:2", "6"),
        ("a:1,b:1,c:1", "3"),
        ("a:4", "4"),
        ("a:4", "2"),
        ("a:3,b:1,c:2", "4"),
    ),
    *_cases(
        "horovod_settings",
        "--fusion-threshold-mb 10 --cycle-time-ms 20 --cache-capacity 512",
        "--hierarchical-allreduce --hierarchical-allgather",
        "--no-hierarchical-allreduce --no-hierarchical-allgather",
        "--torus-allreduce",
        "--autotune --autotune-log-file /tmp/autotune.txt --autotune-warmup-samples 1",
        "--autotune --autotune-steps-per-sample 5 --autotune-bayes-opt-max-samples 10",
        "--autotune --autotune-gaussian-process-noise 0.2",
        "--autotune --cache-capacity 1024 --no-hierarchical-allgather",
        "--no-autotune",
        "--timeline-filename /tmp/timeline.json --timeline-mark-cycles",
        "--timeline-filename /tmp/timeline.json --no-timeline-mark-cycles",
        "--no-stall-check",
        "--stall-check",
        "--stall-check-warning-time-seconds 10 --stall-check-shutdown-time-seconds 20",
        "--mpi-threads-disable --num-nccl-streams 2 --thread-affinity 1 --gloo-timeout-seconds 60",
        "--no-mpi-threads-disable",
        "--log-level INFO --log-hide-timestamp",
        "--log-level DEBUG --log-with-timestamp",
        "--log-without-timestamp",
        "--cycle-time-ms 0.5",
        "--cache-capacity 0",
        "--fusion-threshold-mb 0",
        "--fusion-threshold-mb -1",
        "--cycle-time-ms -1",
        "--cache-capacity -1",
        "--log-level LOUD",
        "--config-file {config}",
        "--fusion-threshold-mb 256 --config-file {config} --cycle-time-ms 20",
        "--config-file {config} --no-autotune",
        "--config-file {unknown}",
        "--config-file {empty}",
        "--config-file /nowhere/config.yaml",
    ),
    *_cases(
        "torchrun_nnodes",
        "1",
        "1:1",
        "2:1",
        "1:2:3",
        "x",
        "",
        "1:",
        "0",
        "-1",
        " 1 ",
        "1:x",
    ),
    *_cases(
        "torchrun_rdzv_conf",
        "",
        "a=1",
        "a=1,b=2",
        " a = 1 , b = 2 ",
        "timeout=60",
        "a",
        "a=",
        "=1",
        "a=1,",
        ",a=1",
        "a=1,,b=2",
        "a=b=c",
        "a=1,b",
        "a=1,a=2",
        "read_timeout=5,close_timeout=30",
        "a = ",
    ),
    *_cases(
        "torchrun_rdzv_endpoint",
        "localhost:0",
        "127.0.0.1:0",
        "localhost",
        "[::1]:0",
        "[::1]",
        "127.0.0.1:x",
        "127.0.0.1:65536",
        "127.0.0.1:-1",
        "127.0.0.1:",
        "local host:0",
        "~:0",
        "127.0.0.1:0:1",
        "",
        "local/host:0",
    ),
    *_cases(
        "torchrun_std",
        "0",
        "1",
        "2",
        "3",
        "4",
        "0:1",
        "0:1,1:2",
        "0:0,1:1,2:2,3:3",
        "0:4",
        "a",
        "0:",
        ":1",
        "0:1,",
        "0-1:3",
        "-1",
        "1,2",
        "all",
        "10:3",
    ),
    *_cases(
        "slurm_nodelist",
        "n1",
        "n[1-3]",
        "n[01-03]",
        "n[1,3,5-6]",
        "gpu-a[08-10],cpu1",
        "rack[0-1]node[0-1]",
        "n[1-2][3-4]",
        "a1,a1,a2",
        "n[5-5]",
        "n[3-1]",
        "n[]",
        "n[a-c]",
        "n[1,]",
        "n[1]]",
        "n[009-11]",
        "x[1-2]y[1-2]z[1-2]",
        "n[1-9:2]",
        "[1-3]",
        "n[008-011]",
        "n[1-2],m[1-2]",
    ),
    *_cases(
        "accelerate_settings",
        "--cpu --num_processes 1",
        "--cpu --num_processes 1 --mixed_precision bf16",
        "--cpu --num-processes 1 --mixed-precision no",
        "--cpu --num_processes 1 --dynamo_backend eager",
        "--cpu --num_processes 1 --dynamo_backend eager --dynamo_mode reduce-overhead",
        "--cpu --num_processes 1 --gradient_accumulation_steps 4",
        "--cpu --num_processes 1 --debug",
        "--cpu --num_processes 1 --num_cpu_threads_per_process 3",
        "--multi_gpu --num_processes 2 --mixed_precision bf16",
        "--multi-gpu --num-processes 2 --enable_cpu_affinity",
        "--use_fsdp --num_processes 2",
        "--use_fsdp --num_processes 2 --fsdp_version 2 --fsdp_reshard_after_forward true",
        "--use_fsdp --num_processes 2 --fsdp_auto_wrap_policy SIZE_BASED_WRAP "
        "--fsdp_min_num_params 100",
        "--use_deepspeed --num_processes 2 --zero_stage 2",
        "--use_deepspeed --num_processes 2 --zero_stage 3 --offload_param_device cpu",
        "--mixed_precision fp15 --num_processes 1 --cpu",
        "--dynamo_backend nothing --num_processes 1 --cpu",
        "--num_processes two --cpu",
        "--multi_gpu --tpu",
        "--multi_gpu --use_fsdp --use_deepspeed --num_processes 2",
    ),
)

HOROVOD_CONFIG = """\
use_gloo: true
params:
  fusion_threshold_mb: 32
  cycle_time_ms: 10
  cache_capacity: 2048
  hierarchical_allreduce: true
autotune:
  enabled: true
  log_file: at.txt
  warmup_samples: 5
timeline:
  filename: tl.json
  mark_cycles: true
stall_check:
  enabled: true
  warning_time_seconds: 120
library_options:
  mpi_threads_disable: true
  num_nccl_streams: 2
logging:
  level: INFO
"""
UNKNOWN_KEYS = "params:\n  fusion_threshold_mb: 32\n  sparkle: 3\nglitter:\n  enabled: true\n"
FILES = {"config": HOROVOD_CONFIG, "unknown": UNKNOWN_KEYS, "empty": ""}
"""Configuration files that a case may name in braces."""
