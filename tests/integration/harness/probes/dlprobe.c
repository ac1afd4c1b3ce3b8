/* dlopen each name given and print "NAME PATH DEVICE:INODE", or "NAME - the linker's message". */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

int main(int argc, char **argv) {
    int missing = 0;
    for (int i = 1; i < argc; i++) {
        void *handle = dlopen(argv[i], RTLD_NOW | RTLD_LOCAL);
        struct link_map *map = NULL;
        char path[PATH_MAX];
        struct stat status;
        if (!handle || dlinfo(handle, RTLD_DI_LINKMAP, &map) != 0) {
            printf("%s - %s\n", argv[i], dlerror());
            missing = 1;
        } else if (!realpath(map->l_name, path) || stat(path, &status) != 0) {
            printf("%s - %s has no file\n", argv[i], map->l_name);
            missing = 1;
        } else {
            printf("%s %s %lu:%lu\n", argv[i], path, (unsigned long)status.st_dev,
                   (unsigned long)status.st_ino);
        }
    }
    return missing;
}
