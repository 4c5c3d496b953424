"""Names that vulture cannot see in use: called by a framework, part of the protocol, or for users
of the package."""

import sys
from multiprocessing.process import BaseProcess
from typing import Any

from distlaunch.backends.accelerate import Accelerate
from distlaunch.backends.deepspeed import DeepSpeed
from distlaunch.backends.fsdp import Fsdp
from distlaunch.backends.tensorflow import TensorFlow
from distlaunch.cli import app
from distlaunch.core.probe import nvidia

_ = (
    # called by the interpreter
    nvidia.__getattr__,
)

# found by name in the registry's table
_ = (Accelerate, DeepSpeed, Fsdp, TensorFlow)

# fields of the control server's answers
_snapshot: Any = None
for _ in ():
    _snapshot.agent_cpu_s  # noqa: B018
    _snapshot.last_sign_age_s  # noqa: B018
    _snapshot.progress_age_s  # noqa: B018
    _snapshot.output_bytes  # noqa: B018

# called by torch.distributed.checkpoint, on the files, readers and planners that we give it
_torch: Any = None
for _ in ():
    _torch.create_stream  # noqa: B018
    _torch.concat_path  # noqa: B018
    _torch.init_path  # noqa: B018
    _torch.validate_checkpoint_id  # noqa: B018
    _torch.rm_file  # noqa: B018
    _torch.writable  # noqa: B018
    _torch.seekable  # noqa: B018
    _torch.readinto  # noqa: B018
    _torch.find_class  # noqa: B018
    _torch.reset  # noqa: B018
    _torch.read_metadata  # noqa: B018
    _torch.set_up_storage_reader  # noqa: B018
    _torch.prepare_local_plan  # noqa: B018
    _torch.prepare_global_plan  # noqa: B018
    _torch.read_data  # noqa: B018
    _torch.create_local_plan  # noqa: B018
    _torch.load_bytes  # noqa: B018
    _torch.memory_format  # noqa: B018
    _torch.pin_memory  # noqa: B018

# called and read by typer and click, by name
app.command.parse_args  # noqa: B018 - vulture takes a mention as a use
app.command.invoke  # noqa: B018
app.command.get_help  # noqa: B018
app.command.run_backends  # noqa: B018
app.command.run_help  # noqa: B018
app.command.run_version  # noqa: B018

# set in a forked worker, read by the standard library
BaseProcess.authkey  # noqa: B018

# called by the interpreter
sys.unraisablehook  # noqa: B018

# read and called by paramiko on what we give it
_paramiko: Any = None
for _ in ():
    _paramiko.in_buffer  # noqa: B018
    _paramiko.in_stderr_buffer  # noqa: B018
    _paramiko.auth_timeout  # noqa: B018
    _paramiko.start_handshake  # noqa: B018
    _paramiko.readline  # noqa: B018
    _paramiko.check_rekey  # noqa: B018
    _paramiko.read_all  # noqa: B018
    _paramiko.send_message  # noqa: B018

# fields of agents' answers that distlaunch top reads from JSON or prints as JSON
_usage: Any = None
for _ in ():
    _usage.received_bytes  # noqa: B018
    _usage.sent_bytes  # noqa: B018
    _usage.clock_s  # noqa: B018
    _usage.agent_cpu_percent  # noqa: B018
