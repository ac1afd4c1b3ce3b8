/* The machine's mutable state while programs run: lost GPUs, and MIG devices.
 *
 * It consists of two small texts. In a driver root they are files of its folder SIM_STATE_DIR,
 * checked again by every call. A container gets only the library, so there they are the compiled-in
 * texts. Invalid lines are skipped. */
#ifndef GPUHOOK_STATE_H
#define GPUHOOK_STATE_H

#include <stddef.h>
#include <sys/types.h>

#include "tables.h"

#define SIM_STATE_DIR "/simulate"

/* Updates the GPUs' `lost`, `mig_enabled`, `mig_count` and `migs`. With `force`, it also tests
 * again which MIG devices this process can reach. */
void sim_refresh(int force);

/* True if this is the address of a MIG device that exists, or has existed since the start. */
int sim_is_mig(const void *address);

/* The GPU of a word: its number or its UUID. NULL if there is none. */
struct sim_gpu *sim_find_gpu(const char *word);

/* The MIG device of that UUID, if it exists. */
const struct sim_mig *sim_find_mig(const char *uuid);

/* Writes the path of a file in the state folder; 0 if the library isn't in a driver root. */
int sim_state_path(const char *name, char *path, size_t size);

/* A file of the state folder that grows by lines, with the read position. Initially all 0. */
struct sim_log {
    dev_t device;
    ino_t inode;
    off_t at;     /* the offset of the next line */
    int skipping; /* in a line that is too long */
};

#define SIM_LINE 256

/* Opens the file; -1 if there is none. If it was replaced or truncated since the last time, it is
 * read from its start, and *again is 1. */
int sim_open_log(struct sim_log *log, const char *name, off_t *size, int *again);

/* Reads the next complete line; 0 if there is none yet. A line that is too long becomes empty. */
int sim_read_log(struct sim_log *log, int fd, char line[SIM_LINE]);

/* Splits the next line off a text, or the next word off a line, and terminates it. NULL at the
 * end. */
char *sim_next_line(char **text);
char *sim_next_word(char **line);

/* Parses a decimal number of at most `most`; 0 if the word is invalid. */
int sim_number(const char *word, unsigned long long most, unsigned long long *number);

#endif
