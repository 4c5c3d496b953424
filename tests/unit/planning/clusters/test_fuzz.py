"""Random environments lead to ConfigError or to a consistent allocation."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from distlaunch.core.errors import ConfigError
from distlaunch.planning.clusters.select import NAMES, files, select
from tests.examples import examples

EXAMPLES = examples(60)

FAMILIES = [
    [f"OMPI_COMM_WORLD_{x}" for x in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")] + ["OMPI_MCA_orte_num_nodes", "PMIX_RANK", "PMIX_HOSTNAME"],
    ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "MPIR_CVAR_CH3_INTERFACE_HOSTNAME"],
    [f"MV2_COMM_WORLD_{x}" for x in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")],
    [f"JSM_NAMESPACE_{x}" for x in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")],
    ["PALS_RANKID", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE", "PALS_NODEID", "PALS_APID", "PMI_SIZE"],
    ["SM_HOSTS", "SM_CURRENT_HOST", "SM_NUM_GPUS", "SM_IS_HETERO"],
    ["AZUREML_NODE_COUNT", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"],
    ["CLUSTER_SPEC", "CLOUD_ML_JOB_ID", "TF_CONFIG"],
    ["SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "SKYPILOT_NUM_GPUS_PER_NODE"],
    ["DSTACK_NODES_IPS", "DSTACK_MASTER_NODE_IP", "DSTACK_NODE_RANK", "DSTACK_NODES_NUM", "DSTACK_GPUS_PER_NODE"],
    ["DET_ALLOCATION_ID", "DET_SLOT_IDS"],
    ["AIHC_JOB_NAME", "WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC_PER_NODE"],
    ["FLUX_JOB_ID", "FLUX_JOB_SIZE", "FLUX_JOB_NNODES", "FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID"],
    [f"AWS_BATCH_JOB_{x}" for x in ("NODE_INDEX", "NUM_NODES", "MAIN_NODE_INDEX", "MAIN_NODE_PRIVATE_IPV4_ADDRESS", "ID")],
    ["SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES", "SLURM_TASKS_PER_NODE", "SLURMD_NODENAME", "SLURM_NTASKS",
     "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_NTASKS_PER_GPU", "SLURM_GPUS", "SLURM_GPUS_ON_NODE",
     "SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES", "SLURM_HET_SIZE", "SLURM_JOB_NODELIST_HET_GROUP_0", "SLURM_JOB_NODELIST_HET_GROUP_1"],
    ["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE",
     "SLURM_NODEID", "SLURM_LOCALID", "SLURM_PROCID", "SLURMD_NODENAME", "SLURM_STEP_GPUS", "CUDA_VISIBLE_DEVICES", "SLURM_PTY_PORT", "SLURM_NNODES"],
    ["PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT", "PET_RDZV_ENDPOINT", "PET_RDZV_ID",
     "RANK", "WORLD_SIZE"],
    ["KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX", "HOSTNAME", "--num-nodes", "--node-rank", "MASTER_ADDR"],
    ["LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX"],
    ["VC_TASK_INDEX", "VK_TASK_INDEX", "VC_MASTER_HOSTS", "VC_MASTER_NUM", "VC_WORKER_HOSTS", "VC_WORKER_NUM", "HOSTNAME", "RANK", "WORLD_SIZE"],
    ["K_MPI_JOB_ROLE", "OMPI_MCA_orte_default_hostfile"],
    ["PBS_JOBID", "PBS_NODEFILE", "PBS_GPUFILE", "NCPUS", "PBS_NUM_NODES"],
    ["LSB_JOBID", "LSB_DJOB_HOSTFILE", "LSB_MCPU_HOSTS", "LSB_HOSTS"],
    ["JOB_ID", "PE_HOSTFILE", "NHOSTS"],
]  # fmt: skip

SPEC = json.dumps(
    {
        "cluster": {"workerpool0": ["a:1"], "workerpool1": ["b:1"]},
        "task": {"type": "workerpool1", "index": 0},
    }
)
SMALL = st.integers(min_value=0, max_value=5).map(str)
PLAUSIBLE = st.sampled_from([
    "", " 1 ", "-1", "1.5", "0x2", "٣", "9" * 25, "auto", "n[1-2]", "n[1-2],m3", "n[2-1]", "n1", "n2", "1(x2)", "2,1", "2(x", "a b 2", "h1 2 h2 1",
    "a100:4", "gres/gpu:2", "cpu=1", "NoDevFiles", "0,1", "4294967290", "2:4", ":", "a:1", "[::1]:2", "[::1", "10.0.0.1\n10.0.0.2", '["a","b"]',
    "[1]", "{}", "null", SPEC, "launcher", "worker", "true", "job-1", "job-0", "-oProxyCommand=x", "a\x1b[2J", "\udcff", "/f", "/gone", "dlc-0",
])  # fmt: skip
VALUES = SMALL | PLAUSIBLE | st.text(max_size=12)
LINES = st.sampled_from(
    [
        "n1",
        "n1 slots=2",
        "n1:2",
        "n1-gpu0",
        "h1 2 q U",
        "# x",
        "",
        "\ufeffn2",
        "1.2.3.4 job-1.s.d job-1",
        "a b c",
        "-x",
        SPEC,
    ]
)
JSONISH = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 3) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "cluster",
                    "task",
                    "type",
                    "index",
                    "workerpool0",
                    "container_addrs",
                    "container_rank",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
).map(json.dumps)
CONTENT = st.lists(LINES, max_size=5).map("\n".join) | JSONISH | st.none() | st.text(max_size=30)


@st.composite
def environments(draw):
    names = draw(st.lists(st.sampled_from(FAMILIES), min_size=1, max_size=2))
    chosen = [name for family in names for name in family]
    kept = chosen if draw(st.booleans()) else draw(st.lists(st.sampled_from(chosen), unique=True))
    environ = {name: draw(VALUES) for name in kept}
    if "CLUSTER_SPEC" in environ and draw(st.booleans()):
        environ["CLUSTER_SPEC"] = draw(JSONISH)
    return environ


@settings(max_examples=EXAMPLES, deadline=None)
@given(environments(), CONTENT, st.sampled_from(["auto"] * 4 + list(NAMES)))
def test_any_environment_leads_to_a_plan_or_a_config_error(environ, content, wanted):
    try:
        texts = dict.fromkeys((*files(environ, wanted=wanted), "/f"), content)
        found, lost, notes = select(environ, texts, wanted=wanted)
    except ConfigError as raised:
        error = raised
    else:
        error = None
    if error is not None:
        assert error.message.isprintable()
        return
    assert all(line.isprintable() for line in (*lost, *notes))
    if found is None:
        return
    assert found.hosts
    assert all(
        host.name and not host.name.startswith("-") and host.name.isprintable()
        for host in found.hosts
    )
    assert all(host.slots is None or host.slots > 0 for host in found.hosts)
    assert found.node_rank is None or 0 <= found.node_rank < len(found.hosts)
    assert found.part != "node" or found.local_rank is None
    if found.part == "worker":
        assert 0 <= found.local_rank < found.hosts[found.node_rank].slots
    assert all(text.isprintable() for text in found.notes)
    assert all(
        text.isprintable()
        for origin in found.origins
        for text in (origin.shown, origin.source, *origin.instead_of)
    )
    assert found.job_id is None or (
        found.job_id.isascii() and "/" not in found.job_id and not found.job_id.startswith(".")
    )
