"""The folder and the processes of a local Ray, without Ray."""

from __future__ import annotations

import os
import subprocess
import sys

from distlaunch.transport.ray import local_cluster

LONG_AGO = 1_000_000_000


def test_folders_whose_owners_are_gone_are_removed_and_no_others(tmp_path):
    folder, held = local_cluster.make_folder(str(tmp_path))
    gone, ended = local_cluster.make_folder(str(tmp_path))
    os.close(ended)
    young, young_end = local_cluster.make_folder(str(tmp_path))
    os.close(young_end)
    foreign = tmp_path / "dl-ray-foreign"
    foreign.mkdir()
    for each in (folder, gone, foreign):
        os.utime(each, (LONG_AGO, LONG_AGO))
    last, last_held = local_cluster.make_folder(str(tmp_path))
    assert {str(path) for path in tmp_path.iterdir()} == {folder, young, str(foreign), last}
    os.close(held)
    os.close(last_held)


def test_the_rest_of_the_group_is_killed_before_the_folder_is_removed(tmp_path):
    folder, held = local_cluster.make_folder(str(tmp_path))
    os.close(held)
    makes_it_anew = "import os, sys, time\nwhile True: os.makedirs(sys.argv[1], exist_ok=True); time.sleep(0.01)"
    with subprocess.Popen(
        [sys.executable, "-c", makes_it_anew, folder], start_new_session=True
    ) as child:
        local_cluster.end_cluster(folder, child.pid)
    assert child.returncode == -9
    assert not list(tmp_path.iterdir())
