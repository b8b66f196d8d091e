/* Every file below SHARE, or below the variable ONE_OWNER_OF (which ranks do not get), belongs to user
   1024, as on a share that maps all users to one. */
#define _GNU_SOURCE
#ifndef SHARE
#define SHARE getenv("ONE_OWNER_OF")
#endif
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int below(const char *path)
{
    const char *share = SHARE;
    return share && path && strncmp(path, share, strlen(share)) == 0;
}

static int mapped(int done, int is_below, struct stat *status)
{
    if (done == 0 && is_below) status->st_uid = status->st_gid = 1024;
    return done;
}

int stat(const char *path, struct stat *status)
{
    return mapped(fstatat(AT_FDCWD, path, status, 0), below(path), status);
}

int lstat(const char *path, struct stat *status)
{
    return mapped(fstatat(AT_FDCWD, path, status, AT_SYMLINK_NOFOLLOW), below(path), status);
}

int fstat(int file, struct stat *status)
{
    char link[64], path[PATH_MAX] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length > 0) path[length] = 0;
    return mapped(fstatat(file, "", status, AT_EMPTY_PATH), below(path), status);
}

/* as programs with large files call them; on 64 bits the structures are the same */
int stat64(const char *path, struct stat64 *status) { return stat(path, (struct stat *)status); }
int lstat64(const char *path, struct stat64 *status) { return lstat(path, (struct stat *)status); }
int fstat64(int file, struct stat64 *status) { return fstat(file, (struct stat *)status); }
