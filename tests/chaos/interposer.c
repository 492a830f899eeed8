/* Strikes at one file-system call: preloaded (LD_PRELOAD), armed through chaos_arm() in the process that is to be hit.
 *
 * A call is named by its operation, its path under `root` (a pattern for fnmatch; renames have both: "a -> b"), and how many such
 * calls came before it in this process. Calls go straight to the kernel, so nothing here depends on the library that is stood in for.
 * A file `marker`, made once, says that the strike was made: a run that starts again is not struck again.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { NONE, KILL, KILL_NODE, TEAR, FAIL, SLEEP, STOP };
enum { FDS = 4096, LENGTH = 1024 };

static char root[LENGTH], marker[LENGTH], pattern[LENGTH], operation[32];
static int at, action, value, left, seen, report = -1;
static char *opened[FDS]; /* path of each descriptor that was opened under root */

/* `number`: how many such calls come before. `amount`: an errno, milliseconds, or nothing. `times`: failing calls in a row. */
void chaos_arm(const char *folder, const char *op, const char *path, int number, int what, int amount, int times, const char *once) {
  snprintf(root, LENGTH, "%s", folder);
  snprintf(operation, sizeof operation, "%s", op);
  snprintf(pattern, LENGTH, "%s", path);
  snprintf(marker, LENGTH, "%s", once);
  at = number, value = amount, left = times, seen = 0;
  action = what;
}

/* Write a line for each call under `folder` to `file`. */
void chaos_report(const char *folder, const char *file) {
  snprintf(root, LENGTH, "%s", folder);
  report = syscall(SYS_openat, AT_FDCWD, file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
}

static long raw(long result) { /* syscall() has set errno */
  return result;
}

static void now(char *text, size_t size, const char *op, const char *path) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  snprintf(text, size, "%ld.%06ld\t%s\t%s\n", (long)t.tv_sec, t.tv_nsec / 1000, op, path);
}

/* Whether this is the strike's call: the first to make the marker. */
static int first(const char *op, const char *path) {
  int saved = errno, fd = syscall(SYS_openat, AT_FDCWD, marker, O_WRONLY | O_CREAT | O_EXCL, 0644);
  if (fd < 0) {
    errno = saved;
    return 0;
  }
  char text[2 * LENGTH + 64];
  now(text, sizeof text, op, path);
  raw(syscall(SYS_write, fd, text, strlen(text)));
  syscall(SYS_close, fd);
  errno = saved;
  return 1;
}

static const char *inside(const char *path) {
  size_t length = strlen(root);
  if (!length || strncmp(path, root, length) || (path[length] && path[length] != '/')) return NULL;
  return path[length] ? path + length + 1 : ".";
}

/* The path that a call names, under root; NULL where it is elsewhere. */
static const char *resolve(int folder, const char *path, char *room) {
  if (!path || !*root) return NULL;
  if (path[0] == '/') snprintf(room, LENGTH, "%s", path);
  else if (folder >= 0 && folder < FDS && opened[folder]) snprintf(room, LENGTH, "%s/%s/%s", root, opened[folder], path);
  else return NULL;
  const char *found = inside(room);
  return found && !strncmp(found, "./", 2) ? found + 2 : found;
}

/* What is to be done to a call: NONE, TEAR or FAIL; the rest is done here. */
static int strike(const char *op, const char *path) {
  if (!path) return NONE;
  if (report >= 0) {
    char text[2 * LENGTH + 64];
    now(text, sizeof text, op, path);
    raw(syscall(SYS_write, report, text, strlen(text)));
  }
  if (action == NONE) return NONE;
  if (action == FAIL && seen < 0) { /* it has begun: whatever writes fails, until enough have */
    if (left <= 0 || !strcmp(op, "read") || !strcmp(op, "close")) return NONE;
    left--;
    errno = value;
    return FAIL;
  }
  if (strcmp(op, operation) || fnmatch(pattern, path, 0)) return NONE;
  if (__atomic_fetch_add(&seen, 1, __ATOMIC_SEQ_CST) != at || !first(op, path)) return NONE;
  int what = action;
  if (what == KILL_NODE) syscall(SYS_kill, getppid(), SIGKILL);
  if (what == KILL || what == KILL_NODE) syscall(SYS_kill, getpid(), SIGKILL);
  if (what == STOP) syscall(SYS_kill, getpid(), SIGSTOP);
  if (what == SLEEP) {
    struct timespec t = {value / 1000, value % 1000 * 1000000L};
    nanosleep(&t, NULL);
  }
  if (what == FAIL) {
    seen = -1000000000;
    left--;
    errno = value;
    return FAIL;
  }
  action = NONE;
  return what == TEAR ? TEAR : NONE;
}

static const char *of(int fd) { return fd >= 0 && fd < FDS ? opened[fd] : NULL; }

static int open_at(int folder, const char *path, int flags, mode_t mode) {
  char room[LENGTH];
  const char *found = resolve(folder, path, room);
  const char *op = flags & (O_WRONLY | O_RDWR | O_CREAT) ? "create" : "open";
  if (strike(op, found) == FAIL) return -1;
  int fd = syscall(SYS_openat, folder, path, flags, mode);
  if (fd >= 0 && fd < FDS && *root) opened[fd] = found ? strdup(found) : NULL;
  return fd;
}

#define MODE(flags, mode) \
  mode_t mode = 0; \
  if ((flags) & O_CREAT || ((flags) & O_TMPFILE) == O_TMPFILE) { \
    va_list rest; \
    va_start(rest, flags); \
    mode = va_arg(rest, mode_t); \
    va_end(rest); \
  }

int open(const char *path, int flags, ...) { MODE(flags, mode) return open_at(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags, mode) return open_at(AT_FDCWD, path, flags | O_LARGEFILE, mode); }
int openat(int folder, const char *path, int flags, ...) { MODE(flags, mode) return open_at(folder, path, flags, mode); }
int openat64(int folder, const char *path, int flags, ...) { MODE(flags, mode) return open_at(folder, path, flags, mode); }
int creat(const char *path, mode_t mode) { return open_at(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }

ssize_t write(int fd, const void *data, size_t size) {
  int what = strike("write", of(fd));
  if (what == FAIL) return -1;
  if (what == TEAR) {
    raw(syscall(SYS_write, fd, data, size / 2));
    syscall(SYS_kill, getpid(), SIGKILL);
  }
  return syscall(SYS_write, fd, data, size);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
  int what = strike("write", of(fd));
  if (what == FAIL) return -1;
  if (what == TEAR) {
    raw(syscall(SYS_pwrite64, fd, data, size / 2, offset));
    syscall(SYS_kill, getpid(), SIGKILL);
  }
  return syscall(SYS_pwrite64, fd, data, size, offset);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off_t offset) { return pwrite(fd, data, size, offset); }

ssize_t writev(int fd, const struct iovec *parts, int count) {
  int what = strike("write", of(fd));
  if (what == FAIL) return -1;
  if (what == TEAR) {
    raw(syscall(SYS_writev, fd, parts, (count + 1) / 2));
    syscall(SYS_kill, getpid(), SIGKILL);
  }
  return syscall(SYS_writev, fd, parts, count);
}

#define ONE(type, name, op, number, arguments, path, ...) \
  type name arguments { return strike(op, path) == FAIL ? -1 : (type)syscall(number, __VA_ARGS__); }
#define AT(name, op, number, arguments, folder, path, ...) \
  int name arguments { \
    char room[LENGTH]; \
    return strike(op, resolve(folder, path, room)) == FAIL ? -1 : (int)syscall(number, __VA_ARGS__); \
  }

ONE(ssize_t, read, "read", SYS_read, (int fd, void *data, size_t size), of(fd), fd, data, size)
ONE(ssize_t, pread, "read", SYS_pread64, (int fd, void *data, size_t size, off_t offset), of(fd), fd, data, size, offset)
ONE(ssize_t, pread64, "read", SYS_pread64, (int fd, void *data, size_t size, off_t offset), of(fd), fd, data, size, offset)
ONE(int, fsync, "fsync", SYS_fsync, (int fd), of(fd), fd)
ONE(int, fdatasync, "fsync", SYS_fdatasync, (int fd), of(fd), fd)
ONE(int, ftruncate, "truncate", SYS_ftruncate, (int fd, off_t size), of(fd), fd, size)
ONE(int, ftruncate64, "truncate", SYS_ftruncate, (int fd, off_t size), of(fd), fd, size)
ONE(int, fallocate, "allocate", SYS_fallocate, (int fd, int mode, off_t from, off_t size), of(fd), fd, mode, from, size)
AT(unlink, "unlink", SYS_unlinkat, (const char *path), AT_FDCWD, path, AT_FDCWD, path, 0)
AT(rmdir, "rmdir", SYS_unlinkat, (const char *path), AT_FDCWD, path, AT_FDCWD, path, AT_REMOVEDIR)
AT(mkdir, "mkdir", SYS_mkdirat, (const char *path, mode_t mode), AT_FDCWD, path, AT_FDCWD, path, mode)
AT(mkdirat, "mkdir", SYS_mkdirat, (int folder, const char *path, mode_t mode), folder, path, folder, path, mode)
AT(truncate, "truncate", SYS_truncate, (const char *path, off_t size), AT_FDCWD, path, path, size)
AT(unlinkat, flags & AT_REMOVEDIR ? "rmdir" : "unlink", SYS_unlinkat, (int folder, const char *path, int flags), folder, path,
   folder, path, flags)

int posix_fallocate(int fd, off_t from, off_t size) {
  if (strike("allocate", of(fd)) == FAIL) return errno;
  return syscall(SYS_fallocate, fd, 0, from, size) ? errno : 0;
}
int posix_fallocate64(int fd, off_t from, off_t size) { return posix_fallocate(fd, from, size); }

int close(int fd) {
  int what = strike("close", of(fd));
  if (fd >= 0 && fd < FDS) opened[fd] = NULL;
  int result = syscall(SYS_close, fd);
  return what == FAIL ? (errno = value, -1) : result;
}

static int rename_at(int from, const char *old, int to, const char *new, unsigned flags) {
  char a[LENGTH], b[LENGTH], both[2 * LENGTH + 8];
  const char *first_path = resolve(from, old, a), *second = resolve(to, new, b);
  if (first_path && second) {
    snprintf(both, sizeof both, "%s -> %s", first_path, second);
    both[LENGTH - 1] = 0;
    if (strike("rename", both) == FAIL) return -1;
  }
  return syscall(SYS_renameat2, from, old, to, new, flags);
}
int rename(const char *old, const char *new) { return rename_at(AT_FDCWD, old, AT_FDCWD, new, 0); }
int renameat(int from, const char *old, int to, const char *new) { return rename_at(from, old, to, new, 0); }
int renameat2(int from, const char *old, int to, const char *new, unsigned flags) { return rename_at(from, old, to, new, flags); }
