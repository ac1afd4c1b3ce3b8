/* The devices that this process can reach, tested by opening nodes as the real driver does. */
#ifndef GPUHOOK_REACH_H
#define GPUHOOK_REACH_H

#include "tables.h"

/* Opens and closes the control node; returns 0, or the errno if it isn't reachable. */
int sim_reach_control(void);

/* The same for /dev/nvidia-uvm. */
int sim_reach_uvm(void);

/* True if the GPU's node can be reached. */
int sim_reach_gpu(const struct sim_gpu *gpu);

/* True if both instances of a MIG device can be reached. */
int sim_reach_mig(const struct sim_gpu *gpu, const struct sim_mig *mig);

#endif
