/* What changes of the machine while programs run: which GPUs are lost, and their MIG devices.
 *
 * Two small texts say so. In a driver root they are files of its folder SIM_STATE_DIR, looked at
 * again by every call; inside a container, where nothing but the library arrives, they are those
 * that were compiled in. Lines that make no sense are skipped. */
#ifndef GPUHOOK_STATE_H
#define GPUHOOK_STATE_H

#include <stddef.h>
#include <sys/types.h>

#include "tables.h"

#define SIM_STATE_DIR "/simulate"

/* Brings the GPUs' `lost`, `mig_enabled`, `mig_count` and `migs` up to date. With `force`, it is
 * also asked again which MIG devices this process can reach. */
void sim_refresh(int force);

/* Whether this is the address of a MIG device that exists, or has existed since the start. */
int sim_is_mig(const void *address);

/* The GPU that a word means: its number, or its UUID. NULL if there is none. */
struct sim_gpu *sim_find_gpu(const char *word);

/* The MIG device of that UUID, if it exists. */
const struct sim_mig *sim_find_mig(const char *uuid);

/* Writes the path of a file in the state folder; 0 if the library lies in no driver root. */
int sim_state_path(const char *name, char *path, size_t size);

/* A file of the state folder that grows by lines, and how far it has been read. All 0 at first. */
struct sim_log {
    dev_t device;
    ino_t inode;
    off_t at;     /* where the next line begins */
    int skipping; /* inside a line that is too long */
};

#define SIM_LINE 256

/* Opens the file; -1 if there is none. Where it is another one than last time, or has become
 * shorter, it will be read from its beginning, and *again is 1. */
int sim_open_log(struct sim_log *log, const char *name, off_t *size, int *again);

/* Reads the next whole line; 0 if there is none yet. One that is too long comes back empty. */
int sim_read_log(struct sim_log *log, int fd, char line[SIM_LINE]);

/* Cuts the next line off a text, or the next word off a line, and puts a terminator after it.
 * NULL at the end. */
char *sim_next_line(char **text);
char *sim_next_word(char **line);

/* Reads a decimal number of at most `most`; 0 if the word is none. */
int sim_number(const char *word, unsigned long long most, unsigned long long *number);

#endif
