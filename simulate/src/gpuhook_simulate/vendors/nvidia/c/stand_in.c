/* The driver's other programs: each prints that it is simulated, and fails for any other
 * request. */
#include <stdio.h>
#include <string.h>

#include "tables.h"

int main(int argc, char **argv)
{
    const char *slash = strrchr(argv[0], '/'), *name = slash ? slash + 1 : argv[0];

    printf("%s: simulated by gpuhook, driver version %s\n", name, SIM_DRIVER_VERSION);
    return argc > 1 && strcmp(argv[1], "--version") != 0 && strcmp(argv[1], "--help") != 0;
}
