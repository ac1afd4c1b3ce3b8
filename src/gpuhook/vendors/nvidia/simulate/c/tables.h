/* The machine a simulated driver pretends to run on, as constant tables.
 *
 * The values are in generated.h and generated.c, written when the driver root is built:
 * inside a container only the library file arrives, so everything must be compiled in. */
#ifndef GPUHOOK_TABLES_H
#define GPUHOOK_TABLES_H

#define SIM_MAX_GPUS 64
#define SIM_MAX_MIGS 7 /* per GPU: the most compute instances any model offers */

enum sim_failure { SIM_FAIL_NONE, SIM_FAIL_NOT_LOADED, SIM_FAIL_VERSION_MISMATCH };

/* A way to cut a GPU instance out of a GPU. */
struct sim_profile {
    const char *name; /* 1g.18gb */
    unsigned number;  /* NVML_GPU_INSTANCE_PROFILE_... */
    unsigned id;      /* what nvidia-smi calls it */
    unsigned slices, memory_slices; /* sevenths of the compute, eighths of the memory */
    unsigned multiprocessors;
    unsigned decoders, media; /* media: JPEG and optical-flow engines */
    unsigned instances;       /* how many fit on a GPU */
    unsigned long long memory; /* bytes */
};

/* A MIG device: compute instance `ci` of GPU instance `gi`, which it fills. The caps are
 * minors of /dev/nvidia-caps/nvidia-capN. */
struct sim_mig {
    const char *uuid; /* MIG-... */
    const struct sim_profile *profile;
    unsigned gi, ci;
    unsigned gi_cap, ci_cap;
    unsigned start; /* first memory slice */
};

struct sim_gpu {
    const char *uuid; /* GPU-... */
    const char *name;
    const char *serial;
    const char *board_part;
    const char *vbios;
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
    int ecc;                       /* the memory has error correction */
    unsigned long long memory;     /* bytes */
    int lost;                      /* fell off the bus */
    int mig_enabled;
    const struct sim_profile *profiles;
    unsigned profile_count; /* 0 for a model without MIG */
    unsigned mig_count;
    struct sim_mig migs[SIM_MAX_MIGS];
};

/* generated.h defines SIM_DRIVER_VERSION, SIM_NVML_VERSION, SIM_DRIVER_BRANCH (strings),
 * SIM_CUDA_VERSION (1000 * major + 10 * minor), SIM_LIBRARY_DIR (where the libraries lie below
 * the driver root), SIM_MARKER (a file at the top of every simulated root),
 * SIM_INIT_NANOSECONDS, SIM_FAILURE and SIM_GPU_COUNT. */
#include "generated.h"

/* In PCI order; defined in generated.c, with one empty entry more than there are GPUs. */
extern const struct sim_gpu sim_gpus[];

#endif
