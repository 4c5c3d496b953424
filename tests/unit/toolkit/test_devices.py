from __future__ import annotations

import pytest
import torch

from distlaunch.toolkit import context
from distlaunch.toolkit.context import choose_device
from distlaunch.toolkit.toolkit_error import ToolkitError


@pytest.fixture
def gpus(monkeypatch):
    def there(count: int) -> None:
        monkeypatch.setattr(context, "_find_accelerator", lambda: "cuda" if count else None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return there


def test_each_worker_gets_the_gpu_of_its_local_rank(gpus):
    gpus(2)
    found = [choose_device(None, rank, shared=False, environ={}) for rank in (0, 1)]
    assert found == [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert choose_device("cuda", 1, shared=False, environ={}) == torch.device("cuda", 1)
    assert choose_device("cpu", 1, shared=False, environ={}) == torch.device("cpu")


def test_workers_share_gpus_only_on_request(gpus):
    gpus(2)
    with pytest.raises(ToolkitError, match=r"rank 2 .* 2 of cuda"):
        choose_device(None, 2, shared=False, environ={})
    assert choose_device(None, 3, shared=True, environ={}) == torch.device("cuda", 1)


def test_a_worker_that_sees_its_own_gpu_alone_has_local_rank_0(gpus):
    gpus(1)
    with pytest.raises(ToolkitError, match=r"rank 3 .* one of cuda"):
        choose_device(None, 3, shared=False, environ={})
    assert choose_device(None, 3, shared=True, environ={}) == torch.device("cuda", 0)


def test_the_script_chooses_the_device_type_and_local_rank_its_number(gpus):
    gpus(2)
    assert choose_device(torch.device("cuda"), 1, shared=False, environ={}) == torch.device(
        "cuda", 1
    )
    assert choose_device(torch.device("cpu", 0), 1, shared=False, environ={}) == torch.device("cpu")
    with pytest.raises(ToolkitError, match="LOCAL_RANK"):
        choose_device("cuda:0", 1, shared=False, environ={})


def test_without_gpus_the_cpu_is_used_unless_the_launcher_assigned_gpus(gpus):
    gpus(0)
    job = {"DISTLAUNCH_JOB_ID": "j"}
    assert choose_device(
        None, 3, shared=False, environ=job | {"CUDA_VISIBLE_DEVICES": "-1"}
    ) == torch.device("cpu")
    assert choose_device(
        None, 3, shared=False, environ={"CUDA_VISIBLE_DEVICES": "0"}
    ) == torch.device("cpu")
    with pytest.raises(ToolkitError, match="CUDA_VISIBLE_DEVICES=0"):
        choose_device(None, 3, shared=False, environ=job | {"CUDA_VISIBLE_DEVICES": "0"})
    assert choose_device(
        "cpu", 3, shared=False, environ=job | {"CUDA_VISIBLE_DEVICES": "0"}
    ) == torch.device("cpu")
