"""Read a device mask (such as CUDA_VISIBLE_DEVICES) as the GPU runtime does. No I/O.

The first entry that is not a GPU ends the list, and so does a change between indices and UUIDs. If
a GPU is named twice, no GPU is visible (CUDA C++ Programming Guide, "Environment variables";
PyTorch counts in the same way).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from distlaunch.core.model.record import Record, replace
from distlaunch.core.model.text import printable
from distlaunch.core.model.topology import Gpu, GpuInventory

if TYPE_CHECKING:
    from distlaunch.planning.allocation import Allocation
    from distlaunch.planning.facts import Facts

CUDA = "CUDA_VISIBLE_DEVICES"
MASK: Literal["mask"] = "mask"
"""The source of an inventory of which only the mask is known."""
_OF_A_STEP = "SLURM_STEP_GPUS"
"""Variable with Slurm's list of a step's GPUs for a node's agent. Its numbers may differ from those
of a mask."""
_UNCERTAIN = ("device files", MASK)
HIDES_ALL = ("", "-1", "NoDevFiles")
"""Masks that mean "no GPU" on purpose. Slurm sets the last one for a step without GPUs."""


class Device(Record):
    """A GPU or a MIG slice that an entry of a mask can name."""

    id: str
    gpu: Gpu | None
    key: str
    """The same text for the same device, however the mask names it."""
    uuid: str | None = None
    mig: bool = False


class Catalog(Record):
    """The devices by index and by UUID. The index of a GPU with MIG slices names its slices."""

    numbered: dict[int, list[Device]]
    named: dict[str, list[Device]]
    """By UUID in lower case."""
    certain: bool
    """Whether a device that is not listed does not exist. False if only device files or the mask
    are known."""

    def devices(self) -> list[Device]:
        """Return all devices; with a MIG slice, by UUID, since CUDA accepts no mixture."""
        devices = [device for number in sorted(self.numbered) for device in self.numbered[number]]
        return (
            [replace(d, id=d.uuid or d.id) for d in devices]
            if any(d.mig for d in devices)
            else devices
        )

    def renumbered(self, devices: list[Device]) -> Catalog:
        """Return the catalog of these devices alone, numbered from 0."""
        keys = {device.key for device in devices}
        named = {
            name: found
            for name, found in self.named.items()
            if all(device.key in keys for device in found)
        }
        return Catalog(
            numbered={n: [d] for n, d in enumerate(devices)}, named=named, certain=self.certain
        )

    def find(self, entry: str) -> list[Device]:
        """Return the devices that an index, a UUID, or an unambiguous prefix of a UUID names.

        Empty if there is none; if the catalog is not ``certain``, a device of which only the entry
        is known.
        """
        if kind_of(entry) == "index":
            found = self.numbered.get(int(entry), []) if entry.isdecimal() else []
            return found or (
                [unknown_device(entry)] if entry.isdecimal() and not self.certain else []
            )
        uuid = entry.lower()
        if uuid in self.named:
            return self.named[uuid]
        if uuid.startswith("mig-gpu-") and "/" in uuid:
            # The form before driver 470, MIG-<GPU's UUID>/<instance>/<instance>: newer drivers
            # still take it.
            owner = self.named.get(uuid[4:].partition("/")[0], [])
            return (
                [replace(unknown_device(entry), gpu=owner[0].gpu)]
                if owner
                else self._unknown_unless_certain(entry)
            )
        names = [name for name in self.named if name.startswith(uuid)]
        return self.named[names[0]] if len(names) == 1 else self._unknown_unless_certain(entry)

    def _unknown_unless_certain(self, entry: str) -> list[Device]:
        return [] if self.certain else [unknown_device(entry)]


def catalog_of(inventory: GpuInventory, environ: Mapping[str, str]) -> Catalog:
    """Return the catalog of this node.

    Index N is GPU N only if CUDA numbers GPUs in PCI bus order. Only CUDA knows its default order.
    """
    ordered = (
        len(inventory.gpus) < 2 or environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID") == "PCI_BUS_ID"
    )
    numbered: dict[int, list[Device]] = {}
    named: dict[str, list[Device]] = {}
    for gpu in inventory.gpus:
        own = Device(id=str(gpu.index), gpu=gpu, key=f"gpu {gpu.index}", uuid=gpu.uuid)
        slices = [
            Device(id=mig.uuid, gpu=gpu, key=mig.uuid.lower(), uuid=mig.uuid, mig=True)
            for mig in gpu.mig
        ]
        meant = slices or [own]
        numbered[gpu.index] = (
            meant if ordered or slices else [Device(id=own.id, gpu=None, key=f"place {gpu.index}")]
        )
        named.update({each.uuid.lower(): [each] for each in slices if each.uuid})
        if gpu.uuid:
            named[gpu.uuid.lower()] = meant
    return Catalog(numbered=numbered, named=named, certain=inventory.source not in _UNCERTAIN)


def unknown_device(entry: str) -> Device:
    """Return a device of which only the entry of the mask is known."""
    if entry.isdecimal():
        return Device(id=entry, gpu=None, key=f"gpu {int(entry)}")
    return Device(id=entry, gpu=None, key=entry.lower(), uuid=entry, mig=entry.startswith("MIG-"))


def kind_of(entry: str) -> str:
    """Return how an entry names its device: ``MIG-``, ``GPU-``, or ``index`` for everything
    else."""
    return next((prefix for prefix in ("MIG-", "GPU-") if entry.startswith(prefix)), "index")


def is_amd(inventory: GpuInventory) -> bool:
    """Return whether a GPU of the inventory is AMD's."""
    return any(gpu.vendor == "amd" for gpu in inventory.gpus)


def apply_mask(catalog: Catalog, variable: str, mask: str, notes: list[str]) -> list[Device]:
    """Return the devices that are visible with the mask. Add to ``notes`` why they are fewer than
    the mask names."""
    if mask in HIDES_ALL:
        return []
    if not catalog.numbered and catalog.certain:
        notes.append(f"{variable}={mask} names GPUs, but none can be used on this machine")
        return []
    visible: list[Device] = []
    entries = [entry.strip() for entry in mask.split(",")]
    for entry in entries:
        found = catalog.find(entry) if kind_of(entry) == kind_of(entries[0]) else []
        if not found:
            rest = (
                f"only what stands before it counts ({len(visible)})"
                if visible
                else "no GPU is visible"
            )
            notes.append(
                f"{variable}={mask}: the entry {entry!r} is not a GPU and ends the list, {rest}"
            )
            break
        # An entry stays as it was written, unless it stands for several slices.
        visible += [replace(found[0], id=entry)] if len(found) == 1 else found
    if len({device.key for device in visible}) < len(visible):
        notes.append(f"{variable}={mask} names a GPU twice, so the runtime shows none")
        return []
    return visible


def accept_mask(
    facts: Facts, allocation: Allocation, *, here: int | None, who: str
) -> tuple[Facts, str | None]:
    """Accept the mask of a node on which no GPU was found, if the source of the nodes confirms it.

    Some devices use CUDA's mask but have a driver that distlaunch does not know, and a plan may be
    made on a machine without GPUs. ``who`` is the source of the nodes, ``here`` the index of this
    machine. Return the facts, and a note if the mask was accepted.
    """
    mask = facts.environ.get(CUDA, "").strip()
    entries = tuple(entry.strip() for entry in mask.split(","))
    if here is None or facts.gpus.gpus or facts.gpus.problem or not all(map(_is_device, entries)):
        return facts, None
    host = allocation.hosts[here]
    counted = (allocation.by_user or host.unit == "gpus") and host.slots == len(entries)
    step = facts.environ.get(_OF_A_STEP, "") if allocation.source == "slurm" else ""
    told = bool(step) and len(step.split(",")) == len(entries)
    if host.devices != entries and not (counted or told):
        return facts, None
    note = f"no GPU was found here, but {who} confirms {CUDA}={mask}: the workers use it"
    return replace(facts, gpus=GpuInventory(source=MASK)), printable(note)


def _is_device(entry: str) -> bool:
    return entry.isdecimal() or entry.startswith(("GPU-", "MIG-"))
