/* The part of CUDA's driver interface that our library implements: numbers and layouts. */
#ifndef GPUHOOK_CUDA_H
#define GPUHOOK_CUDA_H

#include <stddef.h>

#include "tables.h"

#define API __attribute__((visibility("default")))
#define ALIAS(name) __attribute__((visibility("default"), alias(name)))

enum cuda_result {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_SUPPORTED = 801,
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH = 803,
    CUDA_ERROR_MPS_CONNECTION_FAILED = 805,
    CUDA_ERROR_UNKNOWN = 999,
};

/* A CUDA device: a whole GPU, or a MIG device of one. */
struct sim_cuda_device {
    const struct sim_gpu *gpu;
    const struct sim_mig *mig; /* NULL for a whole GPU */
};

/* The device of that number, or NULL with *error set. */
const struct sim_cuda_device *sim_cuda_device(int ordinal, int *error);

/* CUDA_SUCCESS after a successful cuInit. */
int sim_cuda_initialized(void);

/* Registers this process with the MPS daemon of its pipe folder, if the environment names one. */
int sim_cuda_join_mps(void);

#endif
