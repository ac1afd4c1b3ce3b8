/* Which devices can this process reach? Asked of the device nodes, as the real driver does. */
#ifndef GPUHOOK_REACH_H
#define GPUHOOK_REACH_H

#include "tables.h"

/* Opens and closes the control node. 0, or the errno that kept it from being reached. */
int sim_reach_control(void);

/* The same for /dev/nvidia-uvm. */
int sim_reach_uvm(void);

/* Whether the GPU's node can be reached. */
int sim_reach_gpu(const struct sim_gpu *gpu);

/* Whether both instances of a MIG device can be reached. */
int sim_reach_mig(const struct sim_gpu *gpu, const struct sim_mig *mig);

#endif
