/* Preloaded into a sidecar by test_store_io.py: while the file $FAILING_DISK_FLAG exists, writing to or syncing a file
   whose path begins with $FAILING_DISK_FILE fails. The flag's letters say how: w: writes with EIO, f: writes with ENOSPC,
   s: syncs with EIO. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static int fails(int fd, const char *ways) {
    const char *flag = getenv("FAILING_DISK_FLAG"), *file = getenv("FAILING_DISK_FILE");
    char link[64], path[4096], letters[8] = "";
    if (!flag || !file) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    if (strncmp(path, file, strlen(file))) return 0;
    int opened = open(flag, O_RDONLY | O_CLOEXEC);
    if (opened < 0) return 0;
    ssize_t count = read(opened, letters, sizeof letters - 1);
    close(opened);
    if (count <= 0 || !strpbrk(letters, ways)) return 0;
    errno = strchr(letters, 'f') ? ENOSPC : EIO;
    return 1;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t pwrite64(int fd, const void *bytes, size_t count, off64_t at) {
    return fails(fd, "wf") ? -1 : NEXT(pwrite64)(fd, bytes, count, at);
}
ssize_t pwrite(int fd, const void *bytes, size_t count, off_t at) {
    return fails(fd, "wf") ? -1 : NEXT(pwrite)(fd, bytes, count, at);
}
ssize_t write(int fd, const void *bytes, size_t count) {
    return fails(fd, "wf") ? -1 : NEXT(write)(fd, bytes, count);
}
int fdatasync(int fd) { return fails(fd, "s") ? -1 : NEXT(fdatasync)(fd); }
int fsync(int fd) { return fails(fd, "s") ? -1 : NEXT(fsync)(fd); }
