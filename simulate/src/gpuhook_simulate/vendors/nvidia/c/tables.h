/* The simulated machine as tables.
 *
 * The values are in generated.h and generated.c, written when the driver root is built. A container
 * gets only the library file, so everything must be compiled in. */
#ifndef GPUHOOK_TABLES_H
#define GPUHOOK_TABLES_H

#define SIM_MAX_GPUS 64
#define SIM_MAX_MIGS 7 /* per GPU: the maximum number of compute instances of any model */

/* The remote ends of the GPUs' NVLinks: none, GPU 0 to 1 and 2 to 3 and so on, or switches. */
#define SIM_NVLINK_NONE 0
#define SIM_NVLINK_PAIRS 1
#define SIM_NVLINK_ALL 2

enum sim_failure { SIM_FAIL_NONE, SIM_FAIL_NOT_LOADED, SIM_FAIL_VERSION_MISMATCH };

/* A profile of GPU instances. */
struct sim_profile {
    const char *name; /* 1g.18gb */
    unsigned number;  /* NVML_GPU_INSTANCE_PROFILE_... */
    unsigned id;      /* nvidia-smi's number of it */
    unsigned slices, memory_slices; /* sevenths of the compute, eighths of the memory */
    unsigned multiprocessors;
    unsigned decoders, media; /* media: JPEG and optical-flow engines */
    unsigned instances;       /* the maximum number on a GPU */
    unsigned long long memory; /* bytes */
};

struct sim_gpu;

#define SIM_MIG_UUID 40 /* characters of MIG-8-4-4-4-12 */

/* A MIG device: compute instance `ci`, the only one of GPU instance `gi`. The caps are minors of
 * /dev/nvidia-caps/nvidia-capN. */
struct sim_mig {
    char uuid[SIM_MIG_UUID + 1];
    const struct sim_gpu *gpu;
    const struct sim_profile *profile;
    unsigned gi, ci;
    unsigned gi_cap, ci_cap;
    unsigned start; /* first memory slice */
    int present;    /* 0 for a destroyed one */
    int reachable;  /* by this process */
};

struct sim_gpu {
    const char *uuid; /* GPU-... */
    const char *name;
    const char *serial;
    const char *board_part;
    const char *vbios;
    unsigned slot;                 /* its number among all GPUs, also unplugged ones */
    unsigned minor;                /* the N of /dev/nvidiaN */
    unsigned domain, bus, device;  /* PCI address; the function is always 0 */
    unsigned pci_id, pci_subsystem; /* device id << 16 | vendor id */
    unsigned brand;                /* nvmlBrandType_t */
    unsigned architecture;         /* nvmlDeviceArchitecture_t */
    unsigned cc_major, cc_minor;
    unsigned multiprocessors, cores; /* cores: of the whole GPU */
    unsigned bus_width;            /* bits */
    unsigned sm_clock, memory_clock; /* MHz, the highest */
    unsigned power_limit;          /* milliwatts */
    unsigned pcie_generation;
    unsigned fans;
    unsigned nvlinks, nvlink_version; /* nvmlNvlinkVersion_t; 0 links: it has none */
    unsigned numa_node;            /* its NUMA node */
    int ecc;                       /* the memory has error correction */
    unsigned long long memory;     /* bytes */
    const struct sim_profile *profiles;
    unsigned profile_count; /* 0 for a model without MIG */
    /* The following may change at any call; see state.c. */
    int lost; /* fell off the bus */
    int mig_enabled;
    unsigned mig_count;
    const struct sim_mig *migs[SIM_MAX_MIGS];
};

/* generated.h defines SIM_DRIVER_VERSION, SIM_NVML_VERSION, SIM_DRIVER_BRANCH (strings),
 * SIM_CUDA_VERSION (1000 * major + 10 * minor), SIM_LIBRARY_DIR (the libraries' folder below
 * the driver root), SIM_MARKER (a file at the top of every simulated root),
 * SIM_INIT_NANOSECONDS, SIM_FAILURE, SIM_NVLINK and SIM_GPU_COUNT; SIM_LOST and SIM_MIG, the texts
 * that apply without a driver root with files of that name. */
#include "generated.h"

/* In PCI order; defined in generated.c, with one empty entry more than there are GPUs. */
extern struct sim_gpu sim_gpus[];

#endif
