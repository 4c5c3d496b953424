"""Choose the GPUs of this node's workers, and the device mask for them. No I/O.

A mask that is already set (by a scheduler, a container or the user) is narrowed, never widened.
"""

from __future__ import annotations

from collections.abc import Mapping

from distlaunch.core.errors import ConfigError
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.record import Record, replace
from distlaunch.core.model.text import format_ranks
from distlaunch.core.model.topology import Gpu, GpuInventory
from distlaunch.planning.gpu_masks import (
    Catalog,
    Device,
    apply_mask,
    catalog_of,
    is_amd,
    kind_of,
    unknown_device,
)
from distlaunch.planning.train_options import use_cpus

CUDA, HIP, ROCR, ZE = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)


class NotTheseGpusError(ConfigError):
    """The request names GPUs that this machine lacks and another may have."""


class DeviceSelection(Record):
    """The devices of this node's workers, in the order of local ranks."""

    mask_variable: str
    ids: tuple[str, ...] = ()
    """Entries of ``mask_variable``."""
    gpus: tuple[Gpu | None, ...] = ()
    """The physical GPU of each id, if known."""
    mig: bool = False
    """Whether the devices are MIG slices. CUDA uses one slice per process, so each worker gets its
    own."""
    source: str
    """The deciding source, for ``--explain``: ``--gpus 4 within CUDA_VISIBLE_DEVICES=4,5``."""
    notes: tuple[str, ...] = ()
    """Notes on a mask that CUDA reads only in part, or a driver that does not answer."""


def select_devices(
    inventory: GpuInventory,
    environ: Mapping[str, str],
    *,
    requested: str | None = None,
    several: bool = False,
) -> DeviceSelection:
    """Return the devices that workers may use: all visible ones, or those in --gpus
    (``requested``).

    ``several``: the job has several nodes, for hints. Raises ConfigError if ``requested`` names a
    GPU twice, one that does not exist, or one outside the mask.
    """
    variable, mask = _mask_in_effect(inventory, environ)
    notes = [inventory.problem] if inventory.problem else []
    whole = catalog_of(inventory, environ)
    visible, limit = whole.devices(), None
    if (
        mask is None
        and visible
        and environ.get("NVIDIA_VISIBLE_DEVICES") == "none"
        and not is_amd(inventory)
    ):
        # "void" does not hide GPUs: container runtimes set it when they inject GPUs by other
        # means (CDI).
        visible, limit = [], "NVIDIA_VISIBLE_DEVICES=none"
    if mask is not None:
        within = whole
        rocr = environ.get(ROCR)
        if rocr is not None and variable != ROCR and is_amd(inventory):
            # ROCr filters first, and HIP numbers what is left.
            within = whole.renumbered(apply_mask(whole, ROCR, rocr.strip(), notes))
        if variable == ZE:
            entries = dict.fromkeys(
                filter(None, (entry.strip() for entry in mask.split(",")))
            )  # each once
            visible = [unknown_device(entry) for entry in entries]
        else:
            visible = apply_mask(within, variable, mask, notes)
        limit = f"{variable}={mask}"
    source = limit or (
        f"all GPUs of this machine, found by {inventory.source}" if visible else "no GPU found"
    )
    if requested is not None:
        visible = _pick_requested(
            requested, visible, whole, inventory, limit, use_cpus(several=several)
        )
        source = f"{Opt.GPUS(requested)} within {limit}" if limit else Opt.GPUS(requested)
    return DeviceSelection(
        mask_variable=variable,
        ids=tuple(device.id for device in visible),
        gpus=tuple(device.gpu for device in visible),
        mig=any(device.mig for device in visible),
        source=source,
        notes=tuple(notes),
    )


def first_devices(
    selection: DeviceSelection, count: int, *, several: bool = False
) -> DeviceSelection:
    """Return the selection with its first ``count`` devices. Raises ConfigError if it has fewer.

    ``several``: the job has several nodes, for the hint.
    """
    have = len(selection.ids)
    if count > have:
        because = f"; {selection.notes[0]}" if selection.notes else ""
        some = f"only {have}" if have else "no GPU"
        raise NotTheseGpusError(
            f"{count} GPU{'s' * (count > 1)} asked for, but {some} can be used here "
            f"({selection.source}){because}",
            hint=use_cpus(several=several),
        )
    ids, gpus = selection.ids[:count], selection.gpus[:count]
    return replace(
        selection,
        ids=ids,
        gpus=gpus,
        mig=selection.mig and any(_is_slice(i, g) for i, g in zip(ids, gpus, strict=True)),
    )


def split_devices(
    selection: DeviceSelection, workers: int, *, isolate: bool
) -> tuple[tuple[str, ...], ...]:
    """Return each worker's mask: all devices, or with ``isolate`` (implied by MIG) one device each,
    shared in turn if they are too few."""
    if not (isolate or selection.mig) or not selection.ids:
        return (selection.ids,) * workers
    return tuple((selection.ids[worker % len(selection.ids)],) for worker in range(workers))


def describe_gpus(inventory: GpuInventory, *, uuids: bool = False) -> str:
    """Return one line with the GPUs by index, or with ``uuids`` by UUID. MIG slices always have
    UUIDs."""
    plain = [gpu for gpu in inventory.gpus if not gpu.mig]
    parts: list[str] = []
    if uuids:
        parts += [f"GPU {gpu.index} is {gpu.uuid or 'of unknown UUID'}" for gpu in plain]
    else:
        for name in dict.fromkeys(gpu.name for gpu in plain):
            which = [gpu.index for gpu in plain if gpu.name == name]
            parts.append(
                f"GPU{'s' * (len(which) > 1)} {format_ranks(which)}{f' ({name})' if name else ''}"
            )
    for gpu in inventory.gpus:
        if gpu.mig:
            slices = ", ".join(
                f"{mig.uuid} ({mig.profile})" if mig.profile else mig.uuid for mig in gpu.mig
            )
            parts.append(f"GPU {gpu.index} as MIG slices {slices}")
    return "; ".join(parts) or "no GPU"


def _mask_in_effect(inventory: GpuInventory, environ: Mapping[str, str]) -> tuple[str, str | None]:
    """Return the variable that limits the visible devices, and its value if set."""
    if is_amd(inventory):
        # HIP treats its own variable as unset if it is empty, and then reads CUDA's.
        if not environ.get(HIP) and environ.get(CUDA) is not None:
            return CUDA, environ[CUDA].strip()
        if environ.get(HIP) is None and environ.get(ROCR) is not None:
            return ROCR, environ[ROCR].strip()
        return HIP, _strip_value(environ.get(HIP))
    if not inventory.gpus and environ.get(CUDA) is None and environ.get(ZE):
        return ZE, environ[ZE].strip()
    return CUDA, _strip_value(environ.get(CUDA))


def _strip_value(value: str | None) -> str | None:
    return None if value is None else value.strip()


def _is_slice(device_id: str, gpu: Gpu | None) -> bool:
    return device_id.startswith("MIG-") or bool(gpu and gpu.mig)


def _pick_requested(
    requested: str,
    visible: list[Device],
    whole: Catalog,
    inventory: GpuInventory,
    limit: str | None,
    on_cpus: str,
) -> list[Device]:
    """Return the visible devices that ``--gpus`` names by physical index or UUID.

    Raises ConfigError for a device that does not exist, is not visible, or is named twice.
    """
    entries = [entry.strip() for entry in requested.split(",")]
    if not all(entries):
        raise ConfigError(
            f"{Opt.GPUS(repr(requested))}: an entry is empty",
            hint=f"{Opt.GPUS('0,2')} or {Opt.GPUS('GPU-<uuid>,...')}",
        )
    allowed = {device.key: device for device in visible}
    picked: dict[str, Device] = {}
    for entry in entries:
        meant = [unknown_device(entry)] if limit and limit.startswith(ZE) else whole.find(entry)
        if not meant:
            raise _no_such_gpu_error(entry, requested, inventory, on_cpus)
        for device in meant:
            chosen = allowed.get(device.key)
            if chosen is None and limit is None and (whole.certain or kind_of(entry) != "index"):
                # Named by UUID while indices are unreliable: CUDA's own order, or device files,
                # which have no UUIDs.
                chosen = device
            if chosen is None and limit is None:
                raise _no_such_gpu_error(entry, requested, inventory, on_cpus)
            if chosen is None:
                raise _not_allowed_error(entry, entries, requested, visible, str(limit), on_cpus)
            if device.key in picked:
                raise ConfigError(
                    f"{Opt.GPUS(requested)}: {_device_name(device, entry)} is named twice"
                )
            picked[device.key] = chosen
    chosen_ones = list(picked.values())
    if limit is None and any(kind_of(entry) != "index" for entry in entries):
        return _named_by_uuid(chosen_ones, requested)
    return chosen_ones


def _device_name(device: Device, entry: str) -> str:
    return f"GPU {device.gpu.index}" if device.gpu and not device.mig else entry


def _named_by_uuid(devices: list[Device], requested: str) -> list[Device]:
    """Replace indices by UUIDs, since CUDA accepts no mixture. Raises ConfigError if a device has
    none."""
    if not all(device.uuid for device in devices):
        raise ConfigError(
            f"{Opt.GPUS(requested)} mixes indices and UUIDs, and here the one cannot be told from "
            "the "
            "other",
            hint="name all GPUs by index, or all by UUID",
        )
    return [replace(device, id=device.uuid or device.id) for device in devices]


def _no_such_gpu_error(
    entry: str, requested: str, inventory: GpuInventory, on_cpus: str
) -> NotTheseGpusError:
    if not inventory.gpus:
        why = f": {inventory.problem}" if inventory.problem else ""
        return NotTheseGpusError(
            f"{Opt.GPUS(requested)}: no GPU was found on this machine{why}", hint=on_cpus
        )
    by_uuid = kind_of(entry) != "index"
    uuids = [
        uuid
        for gpu in inventory.gpus
        for uuid in (gpu.uuid, *(mig.uuid for mig in gpu.mig))
        if uuid
    ]
    if by_uuid and sum(uuid.lower().startswith(entry.lower()) for uuid in uuids) > 1:
        message = f"{Opt.GPUS(requested)}: {entry} is the beginning of more than one UUID"
    else:
        message = f"{Opt.GPUS(requested)}: there is no GPU {entry} on this machine"
    return NotTheseGpusError(message, hint=f"it has {describe_gpus(inventory, uuids=by_uuid)}")


def _not_allowed_error(
    entry: str, entries: list[str], requested: str, visible: list[Device], limit: str, on_cpus: str
) -> ConfigError:
    message = f"{Opt.GPUS(requested)}: GPU {entry} is not among the GPUs that {limit} allows"
    indices = [int(other) for other in entries if other.isdecimal()]
    if len(indices) == len(entries) and all(index < len(visible) for index in indices):
        ids = ",".join(visible[index].id for index in indices)
        hint = (
            f"{Opt.GPUS} takes GPUs by physical index or UUID, not by position in the mask: you "
            "may "
            f"mean {Opt.GPUS(ids)}"
        )
    elif visible:
        hint = f"choose among {','.join(device.id for device in visible)}"
    else:
        hint = f"it allows none; {on_cpus}"
    return ConfigError(message, hint=hint)
