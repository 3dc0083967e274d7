// A disk that fails at the n-th call that changes something below a folder, and a log of these calls.
//
// Loaded by LD_PRELOAD, so that it is below Python, torch and the Rust of safetensors. Controlled through ctypes.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[PATH_MAX];
static long failing, count, lines;
static __thread long line; // of the last call of a thread
static char log_path[PATH_MAX];
static int code, persistent, on;
static FILE *calls;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

void disk_start(const char *below, long nth, int error, int always, const char *log) {
    strncpy(folder, below, PATH_MAX - 1);
    failing = nth, code = error, persistent = always, count = lines = 0;
    strncpy(log_path, log, PATH_MAX - 1);
    calls = *log ? fopen(log, "w") : NULL;
    on = 1;
}

long disk_stop(void) {
    on = 0;
    if (calls) fclose(calls);
    calls = NULL;
    return count;
}

static void logged(const char *call, const char *path, const char *other) {
    line = ++lines;
    if (calls) fprintf(calls, "%s\t%s\t%s\n", call, path, other), fflush(calls);
}

// Returns 1 if the call must fail.
static int struck(const char *call, const char *path, const char *other) {
    if (!on || strncmp(path, folder, strlen(folder)) != 0) return 0;
    pthread_mutex_lock(&mutex);
    count++;
    logged(call, path, other);
    int fails = failing && (count == failing || (persistent && count > failing));
    pthread_mutex_unlock(&mutex);
    if (fails) errno = code;
    return fails;
}

static int struck_fd(const char *call, int fd) {
    char link[64], path[PATH_MAX] = "";
    if (!on) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, PATH_MAX - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return struck(call, path, "");
}

static const char *absolute(const char *path, char *buffer) {
    if (path[0] == '/') return path;
    char here[PATH_MAX];
    if (!getcwd(here, sizeof here)) return path;
    snprintf(buffer, 2 * PATH_MAX, "%s/%s", here, path);
    return buffer;
}

#define REAL(name, type) \
    static __typeof__(type) *real; \
    if (!real) real = (__typeof__(real))dlsym(RTLD_NEXT, name)

#define OPEN(function) \
    int function(const char *path, int flags, ...) { \
        REAL(#function, int(const char *, int, ...)); \
        va_list list; \
        va_start(list, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(list, mode_t) : 0; \
        va_end(list); \
        char buffer[2 * PATH_MAX]; \
        int writes = flags & (O_WRONLY | O_RDWR | O_CREAT); \
        if (writes && on && struck("open", absolute(path, buffer), "")) return -1; \
        return real(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(function) \
    int function(int at, const char *path, int flags, ...) { \
        REAL(#function, int(int, const char *, int, ...)); \
        va_list list; \
        va_start(list, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(list, mode_t) : 0; \
        va_end(list); \
        char buffer[2 * PATH_MAX]; \
        int writes = flags & (O_WRONLY | O_RDWR | O_CREAT); \
        if (writes && on && at == AT_FDCWD && struck("open", absolute(path, buffer), "")) return -1; \
        return real(at, path, flags, mode); \
    }
OPENAT(openat)
OPENAT(openat64)

#define DESCRIPTOR(call, result, function, parameters, ...) \
    result function parameters { \
        REAL(#function, result parameters); \
        if (struck_fd(call, fd)) return -1; \
        return real(__VA_ARGS__); \
    }
DESCRIPTOR("write", ssize_t, write, (int fd, const void *data, size_t size), fd, data, size)
DESCRIPTOR("write", ssize_t, pwrite, (int fd, const void *data, size_t size, off_t at), fd, data, size, at)
DESCRIPTOR("write", ssize_t, pwrite64, (int fd, const void *data, size_t size, off64_t at), fd, data, size, at)
DESCRIPTOR("write", ssize_t, writev, (int fd, const struct iovec *parts, int size), fd, parts, size)
DESCRIPTOR("write", int, ftruncate, (int fd, off_t size), fd, size)
DESCRIPTOR("write", int, ftruncate64, (int fd, off64_t size), fd, size)

// Copies the data that a sync has written, to a file beside the log.
static void copied(int fd) {
    char from[64], to[PATH_MAX + 32], data[1 << 16];
    struct stat status;
    if (fstat(fd, &status) || !S_ISREG(status.st_mode)) return;
    snprintf(from, sizeof from, "/proc/self/fd/%d", fd);
    snprintf(to, sizeof to, "%s.%ld", log_path, line);
    FILE *source = fopen(from, "r"), *target = fopen(to, "w");
    size_t size;
    while (source && target && (size = fread(data, 1, sizeof data, source)) > 0) fwrite(data, 1, size, target);
    if (source) fclose(source);
    if (target) fclose(target);
}

#define SYNC(function) \
    int function(int fd) { \
        REAL(#function, int(int)); \
        line = 0; \
        if (struck_fd("fsync", fd)) return -1; \
        int result = real(fd); \
        if (!result && line && calls) copied(fd); \
        return result; \
    }
SYNC(fsync)
SYNC(fdatasync)

int rename(const char *from, const char *to) {
    REAL("rename", int(const char *, const char *));
    char first[2 * PATH_MAX], second[2 * PATH_MAX];
    if (on && struck("rename", absolute(from, first), absolute(to, second))) return -1;
    return real(from, to);
}

int mkdir(const char *path, mode_t mode) {
    REAL("mkdir", int(const char *, mode_t));
    char buffer[2 * PATH_MAX];
    if (on && struck("mkdir", absolute(path, buffer), "")) return -1;
    return real(path, mode);
}

// Removals are logged, and neither counted nor made to fail.
static void removed(int at, const char *path) {
    char link[64], whole[2 * PATH_MAX] = "", buffer[2 * PATH_MAX];
    if (!on) return;
    if (at != AT_FDCWD && path[0] != '/') {
        snprintf(link, sizeof link, "/proc/self/fd/%d", at);
        ssize_t size = readlink(link, whole, PATH_MAX - 1);
        if (size < 0) return;
        whole[size] = 0;
        strncat(strncat(whole, "/", 2), path, PATH_MAX - 2);
        path = whole;
    } else
        path = absolute(path, buffer);
    if (strncmp(path, folder, strlen(folder)) != 0) return;
    pthread_mutex_lock(&mutex);
    logged("unlink", path, "");
    pthread_mutex_unlock(&mutex);
}

int unlink(const char *path) {
    REAL("unlink", int(const char *));
    int result = real(path);
    if (!result) removed(AT_FDCWD, path);
    return result;
}

int unlinkat(int at, const char *path, int flags) {
    REAL("unlinkat", int(int, const char *, int));
    int result = real(at, path, flags);
    if (!result) removed(at, path);
    return result;
}

int rmdir(const char *path) {
    REAL("rmdir", int(const char *));
    int result = real(path);
    if (!result) removed(AT_FDCWD, path);
    return result;
}
