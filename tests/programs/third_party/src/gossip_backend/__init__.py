"""A backend as another package would bring it: a framework in which every worker talks to its neighbour."""

from distlaunch.backends.base import Backend, BackendOption, Requirement

NOTHING = None


class Gossip(Backend):
    name = "gossip"
    about = "workers that talk to their neighbours"
    requires = (Requirement(module="gossip_backend", package="gossip-backend", at_least="1.1"),)

    @classmethod
    def options(cls):
        return (
            BackendOption(name="rounds", about="how often", kind="count"),
            BackendOption(name="topology", about="who talks to whom", kind="choice", choices=("ring", "star")),
            BackendOption(name="loud", about="say what is said", kind="flag"),
        )

    def job_variables(self, topology):
        return {f"GOSSIP_{name.upper()}": str(value) for name, value in self.chosen.items()}

    def worker_variables(self, topology, node_rank, local_rank, rank):
        return {"GOSSIP_NEIGHBOUR": str((rank + 1) % (topology.world_size or 1))}
