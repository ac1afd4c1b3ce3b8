/* The part of NVML's binary interface that the simulated library implements.
 *
 * Numbers and layouts are those of NVML's public interface, as its Python binding (the
 * nvidia-ml-py distribution) declares them. */
#ifndef GPUHOOK_NVML_H
#define GPUHOOK_NVML_H

#include "tables.h"

#define API __attribute__((visibility("default")))
#define ALIAS(name) __attribute__((visibility("default"), alias(name)))

typedef unsigned long long u64;

enum nvml_return {
    NVML_SUCCESS = 0,
    NVML_ERROR_UNINITIALIZED = 1,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_SUPPORTED = 3,
    NVML_ERROR_NO_PERMISSION = 4,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7,
    NVML_ERROR_DRIVER_NOT_LOADED = 9,
    NVML_ERROR_TIMEOUT = 10,
    NVML_ERROR_GPU_IS_LOST = 15,
    NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18,
    NVML_ERROR_MEMORY = 20,
    NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25,
    NVML_ERROR_UNKNOWN = 999,
};

struct nvml_pci_info {
    char bus_id_legacy[16];
    unsigned domain, bus, device;
    unsigned pci_device_id, pci_subsystem_id;
    char bus_id[32];
};

struct nvml_pci_info_ext {
    unsigned version;
    unsigned domain, bus, device;
    unsigned pci_device_id, pci_subsystem_id;
    unsigned base_class, sub_class;
    char bus_id[32];
};

struct nvml_memory {
    u64 total, free, used;
};

struct nvml_memory_v2 {
    unsigned version;
    u64 total, reserved, free, used;
};

struct nvml_utilization {
    unsigned gpu, memory;
};

struct nvml_temperature {
    unsigned version, sensor;
    int temperature;
};

struct nvml_attributes {
    unsigned multiprocessors;
    unsigned copy_engines, decoders, encoders, jpegs, ofas;
    unsigned gi_slices, ci_slices;
    u64 memory_mib;
};

struct nvml_uuid_argument {
    unsigned version;
    unsigned type; /* 1 = text, 2 = 16 bytes */
    union {
        char text[41];
        unsigned char bytes[16];
    } value;
};

/* A device handle is the address of the GPU's or the MIG device's table entry. */
typedef const void *nvml_device;

/* The device of a handle; `mig` is NULL for a whole GPU. */
struct sim_device {
    const struct sim_gpu *gpu;
    const struct sim_mig *mig;
};

/* Looks up a handle; returns NVML_SUCCESS or an error. */
int sim_resolve(nvml_device handle, struct sim_device *device);

/* The same for calls that are only valid for a whole GPU. */
int sim_resolve_gpu(nvml_device handle, const struct sim_gpu **gpu);

/* The reachable GPUs, in PCI order, as nvmlInit found them. */
unsigned sim_gpu_count(void);
const struct sim_gpu *sim_gpu_at(unsigned index);

/* NVML_SUCCESS between nvmlInit and nvmlShutdown. */
int sim_initialized(void);

/* Describes a PCI device whose device and function are 0. */
void sim_pci_info(struct nvml_pci_info *info, unsigned domain, unsigned bus, unsigned id,
                  unsigned subsystem);

/* Copies as much as the first two versions of the structure had room for. */
void sim_old_pci_info(struct nvml_pci_info *old, const struct nvml_pci_info *info);

/* Copies text and its terminator; NVML_ERROR_INSUFFICIENT_SIZE if it doesn't fit. */
int sim_copy(char *buffer, unsigned size, const char *text);

#endif
