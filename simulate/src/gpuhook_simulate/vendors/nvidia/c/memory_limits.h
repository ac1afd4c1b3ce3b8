/* Memory limits by cgroup, which the driver has since release 615.
 *
 * The simulated driver stores them in extended attributes of the cgroup's folder. So they vanish
 * with the cgroup, and a container sees its own. */
#ifndef GPUHOOK_LIMITS_H
#define GPUHOOK_LIMITS_H

#include "tables.h"

#define SIM_UNLIMITED (~0ULL)

struct sim_limit {
    unsigned long long soft, hard; /* bytes */
};

/* The limits of a cgroup (v2) by its folder; 0 if none were ever set. */
int sim_get_limit(const struct sim_gpu *gpu, const char *folder, struct sim_limit *limit);

/* Sets them; 0 if there is no such cgroup. */
int sim_set_limit(const struct sim_gpu *gpu, const char *folder, struct sim_limit limit);

/* The hard limit of this process: the smallest of its cgroup and those above. */
unsigned long long sim_own_limit(const struct sim_gpu *gpu);

#endif
