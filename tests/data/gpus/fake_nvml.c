/* A libnvidia-ml.so.1 with two GPUs, the second cut into two MIG slices in places 0 and 2 of three.
 * FAKE_NVML_INIT=N makes nvmlInit_v2 return N, FAKE_NVML_HANG makes it hang, FAKE_NVML_CRASH makes it crash.
 * FAKE_NVML_PROCESSES=N has N processes, from pid 1000 on, hold memory of the first GPU; pid 7 always holds memory of
 * a slice of the second GPU, which itself may not be asked. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { int gpu, slice; } device;
static device gpus[2] = {{0, -1}, {1, -1}}, slices[3] = {{1, 0}, {1, 1}, {1, 2}};
typedef struct { unsigned long long total, free, used; } memory;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci;

int nvmlInit_v2(void) {
    if (getenv("FAKE_NVML_HANG")) for (;;) pause();
    if (getenv("FAKE_NVML_CRASH")) abort();
    return getenv("FAKE_NVML_INIT") ? atoi(getenv("FAKE_NVML_INIT")) : 0;
}
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, device **out) { *out = &gpus[index]; return 0; }
int nvmlDeviceGetUUID(device *d, char *text, unsigned length) {
    if (d->slice < 0) snprintf(text, length, "GPU-%d0000000-fake", d->gpu);
    else snprintf(text, length, "MIG-%d000000%d-fake", d->gpu, d->slice);
    return 0;
}
int nvmlDeviceGetName(device *d, char *text, unsigned length) {
    snprintf(text, length, d->slice < 0 ? "NVIDIA Fake" : "NVIDIA Fake MIG 1g.5gb");
    return 0;
}
int nvmlDeviceGetMemoryInfo(device *d, memory *m) {
    (void)d;
    m->total = 40ULL << 30;
    m->used = 5ULL << 30;
    return 0;
}
typedef struct { unsigned gpu, memory; } rates;
int nvmlDeviceGetUtilizationRates(device *d, rates *r) {
    if (d->gpu == 1) return 3; /* not supported */
    r->gpu = 37;
    r->memory = 5;
    return 0;
}
int nvmlDeviceGetPciInfo_v3(device *d, pci *p) {
    memset(p, 0xff, sizeof *p);
    snprintf(p->bus_id, sizeof p->bus_id, "00000000:%dB:00.0", d->gpu + 1);
    return 0;
}
int nvmlDeviceGetMigMode(device *d, unsigned *current, unsigned *pending) {
    if (d->gpu == 0) return 3; /* not supported */
    *current = *pending = 1;
    return 0;
}
int nvmlDeviceGetMaxMigDeviceCount(device *d, unsigned *count) { (void)d; *count = 3; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(device *d, unsigned index, device **out) {
    (void)d;
    if (index == 1) return 6; /* not found */
    *out = &slices[index];
    return 0;
}
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } process;
int nvmlDeviceGetComputeRunningProcesses_v2(device *d, unsigned *count, process *out) {
    unsigned room = *count, there = 0, first = 1000;
    if (d->gpu == 1 && d->slice < 0) return 4; /* no permission */
    if (d->gpu == 0 && getenv("FAKE_NVML_PROCESSES")) there = atoi(getenv("FAKE_NVML_PROCESSES"));
    if (d->slice == 2) there = 1, first = 7;
    *count = there;
    if (there > room) return 7; /* insufficient size */
    memset(out, 0xff, room * sizeof *out);
    for (unsigned i = 0; i < there; i++) {
        out[i].pid = first + i;
        if (d->gpu == 0) out[i].used = 1 << 20;
    }
    return 0;
}
